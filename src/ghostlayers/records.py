"""JSON records: what was done, with what, and the file that says so beside the weights."""

from __future__ import annotations

import json
import math
import os
import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import CheckpointError

RECORD_FILE = "ghostlayers.json"
FORMAT_VERSION = 1
PACKAGES = ("ghostlayers", "torch", "transformers", "safetensors", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def has_operators(record: dict[str, Any]) -> bool:
    """Say from a checkpoint's record whether any boundary has an attached operator."""
    return any(
        entry["operator"] != "none" and entry.get("attached", True)
        for entry in record["boundaries"]
    )


def plain(value: Any) -> Any:
    """Turn a value into JSON types; numbers that are not finite become null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file with a final newline; it appears when it is complete."""
    write_whole(path, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file by way of another one in its folder, on the disk before it is renamed.

    A write that is killed, or for which there is no room, leaves the file as it was. A link stays
    one; a device or a pipe is written to as it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    short = sha256(path.name.encode()).hexdigest()[:12]  # the name may be as long as is allowed
    part = path.with_name(f".{short}.incomplete-{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_record(folder: Path) -> dict[str, Any]:
    """Read `ghostlayers.json` of a pruned checkpoint.

    Raises:
        CheckpointError: If the folder has none, or it is of a newer format.
    """
    path = Path(folder) / RECORD_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{str(folder)!r} has no {RECORD_FILE}: it was not written by `ghostlayers prune`."
        )
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if not isinstance(record, dict) or "removed" not in record:
        raise CheckpointError(f"{path} is no record of `ghostlayers prune`.")
    if record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {record.get('format_version')!r}; this release reads "
            f"{FORMAT_VERSION}. Upgrade ghostlayers."
        )
    return record
