"""`prune --like`: the same settings as those of a record, and the same result or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .config import PruneConfig
from .errors import CheckpointError
from .records import RECORD_FILE, read_record

# What may differ from the record without changing the result: where a text lies, what computes.
FREE_SETTINGS = ("calibration", "device", "moments_device")


def read_like(place: str) -> dict[str, Any]:
    """Read the record of a checkpoint.

    Args:
        place: The checkpoint's folder, or the record's file under any name.

    Raises:
        CheckpointError: If there is none, or its weights were trained after `prune`.
    """
    path = Path(place).expanduser()
    if path.is_file() and path.name != RECORD_FILE:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise CheckpointError(f"--like {place!r} is no record: {error}.") from error
    else:
        record = read_record(path.parent if path.is_file() else path)
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise CheckpointError(f"--like {place!r} is no record of `ghostlayers prune`.")
    if record.get("finetune") is not None:
        raise CheckpointError(
            f"--like {place!r}: its weights were trained after `prune`, which cannot make them. "
            "Give the record of the checkpoint before `finetune`."
        )
    return record


def settings_like(record: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record.

    Args:
        record: From `read_like`.
        given: Settings of the command line.

    Raises:
        CheckpointError: If one is given that decides the result, or the record has a setting that
            this release does not know.
    """
    decided = [name for name in given if name not in FREE_SETTINGS]
    if decided:
        free = ", ".join(f"--{name.replace('_', '-')}" for name in FREE_SETTINGS)
        raise CheckpointError(
            f"--like takes the settings of the record, and --{decided[0].replace('_', '-')} is "
            f"given. Allowed beside it: {free}."
        )
    known = {item.name for item in fields(PruneConfig)}
    unknown = sorted(set(record["config"]) - known)
    if unknown:
        raise CheckpointError(
            f"the record has the setting {unknown[0]!r}, which this release does not know. Upgrade "
            "ghostlayers."
        )
    return {**record["config"], **given}


def check_like(found: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Compare what was made with a record, before it is written.

    Raises:
        CheckpointError: If calibration tokens, layers or operators are others.
    """
    for (name, own), (_, wanted) in zip(_facts(found), _facts(record), strict=True):
        if own != wanted:
            raise CheckpointError(
                f"--like: {name} {own}, the record has {wanted}. Use the model, the text and the "
                f"releases of the record ({_releases(record)})."
            )


def _facts(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("calibration ids sha256", (record.get("calibration") or {}).get("ids_sha256")),
        ("removed layers", list(record["removed"])),
        ("operators", [entry["operator"] for entry in record["boundaries"]]),
    ]


def _releases(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())


__all__ = ["FREE_SETTINGS", "check_like", "read_like", "settings_like"]
