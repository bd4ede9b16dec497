"""Whether a comparison may go on in a folder that holds one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compare_results import CompareResults
from .errors import CalibrationError
from .records import plain

# Settings that list what the grid holds: a run may ask for more than is there.
AXES = ("num_remove", "layers", "select", "recover", "fit", "calibration", "num_windows")


def check_continues(
    results: CompareResults,
    settings: dict[str, Any],
    fingerprint: dict[str, str],
    volatile: Sequence[str],
    place: Path,
) -> bool:
    """Refuse to continue a run of other settings or of another model.

    Args:
        results: What is there.
        settings: Every setting asked for.
        fingerprint: Of the model at hand.
        volatile: Names of settings that change no number.
        place: The folder, for messages.

    Returns:
        Whether the grid grows: some of `AXES` hold more than before, and nothing else differs.

    Raises:
        CalibrationError: Naming the difference.
    """
    assert results.run is not None
    then, now, grows = results.run.settings, plain(settings), False
    for name in sorted({*then, *now} - set(volatile)):
        old, new = then.get(name), now.get(name)
        if old == new:
            continue
        what = f"-o {str(place)!r} holds a comparison with `{name}` {old!r}, asked for is {new!r}."
        if name not in AXES:
            raise CalibrationError(f"{what} Choose another folder, or the same settings.")
        lost = [value for value in old or () if value not in (new or ())]
        if lost:
            raise CalibrationError(
                f"{what} A grid can grow but not shrink: name {', '.join(map(str, lost))} as well, "
                "or choose another folder."
            )
        grows = True
    if results.run.model["fingerprint"] != fingerprint:
        raise CalibrationError(
            f"-o {str(place)!r} holds a comparison of another model "
            f"({results.run.model['name']}, weights sha256 "
            f"{results.run.model['fingerprint']['weights_sha256'][:12]}, this one's is "
            f"{fingerprint['weights_sha256'][:12]}). Choose another folder."
        )
    return grows


__all__ = ["AXES", "check_continues"]
