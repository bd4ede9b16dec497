"""Whether a comparison may go on in a folder that holds one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .compare_config import short_names
from .compare_results import CompareResults, RunLine
from .errors import CalibrationError
from .operators import NO_OPERATOR
from .records import plain
from .selectors import AUTO

# Settings that list what the grid holds: a run may ask for more than is there.
AXES = ("num_remove", "layers", "select", "recover", "fit", "calibration", "num_windows")


def check_continues(
    results: CompareResults,
    settings: dict[str, Any],
    model: Mapping[str, Any],
    volatile: Sequence[str],
    place: Path,
) -> bool:
    """Refuse to continue a run of other settings or of another model.

    Args:
        results: What is there.
        settings: Every setting asked for.
        model: `fingerprint` and `dtype` of the model at hand, as in `RunLine.model`.
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
    _check_names(then, now, place)
    _check_search(results, then["recover"], now["recover"], place)
    _check_model(results.run, model, place)
    return grows


def _check_names(then: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> None:
    """Refuse a text that takes the short name of one whose cells are there."""
    before, after = (short_names(tuple(each["calibration"])) for each in (then, now))
    for source, name in before.items():
        if after[source] != name:
            raise CalibrationError(
                f"-o {str(place)!r} holds cells of the calibration {name!r}, and another text that "
                "is asked for has the same name. Rename that file, or choose another folder."
            )


def _check_search(
    results: CompareResults, then: Sequence[str], now: Sequence[str], place: Path
) -> None:
    """Refuse operators with which `auto` would search otherwise than it did."""
    before, after = (set(operators) == {NO_OPERATOR} for operators in (then, now))
    if before != after and any(cut.selector == AUTO for cut in results.cuts):
        raise CalibrationError(
            f"-o {str(place)!r} holds cuts of `auto`, searched without repairs since `recover` was "
            f"{NO_OPERATOR} alone; with {', '.join(now)} it searches with them. Choose another "
            "folder."
        )


def _check_model(run: RunLine, model: Mapping[str, Any], place: Path) -> None:
    wanted, found = run.model["fingerprint"], model["fingerprint"]
    if wanted != found:
        raise CalibrationError(
            f"-o {str(place)!r} holds a comparison of another model ({run.model['name']}, weights "
            f"sha256 {wanted['weights_sha256'][:12]}, this one's is "
            f"{found['weights_sha256'][:12]}). Choose another folder."
        )
    if run.model["dtype"] != model["dtype"]:
        raise CalibrationError(
            f"-o {str(place)!r} holds a comparison in {run.model['dtype']}, this model is in "
            f"{model['dtype']}. Choose another folder, or weights stored in {run.model['dtype']}."
        )


def check_same_tokens(name: str, then: str, now: str, place: Path) -> None:
    """Refuse a text that no longer gives the tokens that cells were measured on.

    Args:
        name: Short name of the text.
        then: SHA-256 of its token ids, as stored.
        now: That of the windows at hand.
        place: The folder, for messages.

    Raises:
        CalibrationError: If they differ; both are named.
    """
    if then != now:
        raise CalibrationError(
            f"-o {str(place)!r} holds results on other tokens of {name!r} (ids sha256 {then[:12]}, "
            f"now {now[:12]}): its content or the tokenizer changed. Choose another folder."
        )


def check_scored(results: CompareResults, hashes: Mapping[str, str], place: Path) -> None:
    """Compare the scored texts with those on which the dense model was scored.

    Args:
        results: What is there.
        hashes: SHA-256 of the token ids of each text, by short name.
        place: The folder, for messages.

    Raises:
        CalibrationError: If the tokens of one differ.
    """
    for name, known in (results.dense.perplexity if results.dense else {}).items():
        check_same_tokens(name, known["ids_sha256"], hashes[name], place)


def grown_line(line: RunLine, before: RunLine | None) -> RunLine:
    """Return the line of a run that goes on, with what a file said of the grid if it has none."""
    if before is None or line.planned is not None:
        return line
    return replace(line, title=before.title, expected=before.expected, planned=before.planned)


__all__ = ["AXES", "check_continues", "check_same_tokens", "check_scored", "grown_line"]
