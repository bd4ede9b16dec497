"""`prune --like`: the settings of a record, and a check that they gave the same again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .budget_values import BUDGETS
from .config import PruneConfig
from .errors import CheckpointError
from .records import RECORD_FILE, read_record, versions


@dataclass(frozen=True)
class Like:
    """A record that a run repeats.

    Attributes:
        path: Where it is.
        record: Its content.
        changed: Names of the settings that the run states otherwise.
    """

    path: Path
    record: Mapping[str, Any]
    changed: frozenset[str] = frozenset()

    def check(self, found: Mapping[str, Any]) -> None:
        """Compare a result with the record, before anything is written.

        Args:
            found: The result's record.

        Raises:
            CheckpointError: If no setting was changed and yet other layers went, or the
                calibration text has other token ids; both values are named.
        """
        if self.changed:
            return
        wanted = {"removed layers": self.record["removed"], "calibration ids": _ids(self.record)}
        now = {"removed layers": found["removed"], "calibration ids": _ids(found)}
        wrong = [
            f"{key} {now[key]}, recorded {wanted[key]}" for key in now if now[key] != wanted[key]
        ]
        if wrong:
            raise CheckpointError(
                f"--like {str(self.path)!r} cannot be repeated: {'; '.join(wrong)}."
                f"{self._other_releases()} Give the text and the model that it was made from, or "
                "state the settings that differ."
            )

    def _other_releases(self) -> str:
        then, now = self.record["versions"], versions()
        other = [
            f"{name} {then[name]}, now {now[name]}"
            for name in now
            if then.get(name, now[name]) != now[name]
        ]
        return f" Other versions: {', '.join(other)}." if other else ""


def settings_like(path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Like]:
    """Read the settings of a run off what it wrote.

    Args:
        path: A checkpoint of `prune`, or its `ghostlayers.json`.
        given: Settings that the command states; they count instead of the recorded ones, and a
            budget instead of the recorded budget.

    Returns:
        All settings, and what the result is compared with.

    Raises:
        CheckpointError: If there is no such record, or this release does not know a setting.
    """
    place = Path(path).expanduser()
    folder = place.parent if place.name == RECORD_FILE else place
    record = read_record(folder)
    recorded = dict(record.get("config") or {})
    known = {item.name for item in fields(PruneConfig)}
    if strange := sorted(set(recorded) - known) or (not recorded and ["none at all"]):
        raise CheckpointError(
            f"--like {path!r} has settings that this release does not know: {', '.join(strange)}. "
            "Use the release that wrote it, or state the settings."
        )
    if any(name in given for name in BUDGETS):
        recorded = {name: value for name, value in recorded.items() if name not in BUDGETS}
    changed = {name for name, value in given.items() if recorded.get(name, value) != value}
    changed |= {name for name in given if name not in recorded}
    if "finetune" in record:
        warnings.warn(
            f"--like {path!r} was distilled after pruning: `finetune` is not repeated.",
            stacklevel=2,
        )
    return {**recorded, **given}, Like(place, record, frozenset(changed))


def _ids(record: Mapping[str, Any]) -> str | None:
    found = (record.get("calibration") or {}).get("ids_sha256")
    return None if found is None else f"sha256 {found[:12]}"
