"""`prune --like`: the same settings as those of a record, and the same result or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .config import PruneConfig
from .errors import CheckpointError
from .json_shape import Maybe, Values, shape_error
from .records import FORMAT_VERSION, RECORD_FILE, read_record, versions
from .setting_types import is_of, kind_name

# What may differ from the record without changing the result: where a text lies, what computes.
FREE_SETTINGS = ("calibration", "device", "moments_device")
SHAPE = {
    "format_version": int,
    "removed": [int],
    "boundaries": [{"operator": str}],
    "calibration": Maybe({"ids_sha256": str}),
    "versions": Values(str),
    "fingerprint": Maybe({"config_sha256": str, "weights_sha256": Maybe(str)}),
}
NOT_COMPARED = "--like: the record has no hash of the dense model's weights, they are not compared"


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
    _check_shape(place, record)
    if record.get("finetune") is not None:
        raise CheckpointError(
            f"--like {place!r}: its weights were trained after `prune`, which cannot make them. "
            "Give the record of the checkpoint before `finetune`."
        )
    return record


def _check_shape(place: str, record: Mapping[str, Any]) -> None:
    """Check what is compared with the result."""
    wrong = shape_error(record, SHAPE)
    if wrong is not None:
        raise CheckpointError(
            f"--like {place!r} is damaged: {wrong}. Give a record as `prune` wrote it."
        )
    if record["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"--like {place!r} has format version {record['format_version']}; this release reads "
            f"{FORMAT_VERSION}. Upgrade ghostlayers."
        )


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
    kinds = {item.name: str(item.type) for item in fields(PruneConfig)}
    for name, value in record["config"].items():
        if not is_of(kinds[name], value):
            raise CheckpointError(
                f"the record has `{name}` {value!r}; allowed: {kind_name(kinds[name])}. Give a "
                "record as `prune` wrote it."
            )
    return {**record["config"], **given}


def check_like_model(found: Mapping[str, str], record: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare the dense model with that of a record, before anything is measured.

    What another transformers release says in a config differs, so configs are compared under one
    release alone. A record without hashes, of an older release, is used.

    Args:
        found: The model's `fingerprint`; without `weights_sha256` where no weight is read.
        record: From `read_like`.

    Returns:
        A line if weights could not be compared.

    Raises:
        CheckpointError: If the weights or the config are others; both hashes are named.
    """
    wanted = record.get("fingerprint") or {}
    same_release = record["versions"].get("transformers") == versions()["transformers"]
    for part in ("config", "weights") if same_release else ("weights",):
        own, other = found.get(f"{part}_sha256"), wanted.get(f"{part}_sha256")
        if own is not None and other is not None and own != other:
            raise CheckpointError(
                f"--like: the record was made from another model: {part} sha256 {other[:12]}, that "
                f"of MODEL is {own[:12]}. Use the model and the releases of the record "
                f"({_releases(record)})."
            )
    compared = found.get("weights_sha256") and wanted.get("weights_sha256")
    return () if compared else (NOT_COMPARED,)


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
    return ", ".join(f"{name} {value}" for name, value in record["versions"].items())


__all__ = ["FREE_SETTINGS", "check_like", "check_like_model", "read_like", "settings_like"]
