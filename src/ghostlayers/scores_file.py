"""The file of scores: one safetensors file, and JSON in its header.

Tensors: `similarity` (L+1, L+1) float64, `window_ids` (n, T) int32, `massive` (n·T,) bool, and
`error_before` and `error_after` (L+1, L+1) float64 of the recoverability where it was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .calibration import Windows
from .errors import CheckpointError
from .records import plain
from .recoverability import Recoverability
from .scores import Scores
from .selection import Measured
from .similarity import Similarity

SCORES_VERSION = 1
METADATA_KEY = "ghostlayers_scores"


def save_scores(scores: Scores, path: str | Path, *, force: bool = False) -> Path:
    """Write scores; see `Scores.save`."""
    target, tensors = check_scores_target(path, force=force), _tensors(scores)
    header = {
        "format_version": SCORES_VERSION,
        "num_tokens": scores.measured.similarity.num_tokens,
        "model": dict(scores.model),
        "dtype": scores.dtype,
        "settings": dict(scores.settings),
        "calibration": scores.windows.record(),
        "calibration_details": scores.windows.details,
        "recoverability": _recoverability_header(scores.recoverability),
        "versions": dict(scores.versions),
    }
    header["content_sha256"] = _content_sha256(header, tensors)
    part = target.with_name(f".{target.name}.incomplete-{os.getpid()}")
    try:
        save_file(tensors, part, metadata={METADATA_KEY: json.dumps(plain(header))})
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"scores {str(target)!r} cannot be written ({error}).") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _tensors(scores: Scores) -> dict[str, torch.Tensor]:
    measured, found = scores.measured, scores.recoverability
    tensors = {
        "similarity": torch.from_numpy(measured.similarity.matrix),
        "window_ids": scores.windows.ids.to("cpu", torch.int32),
    }
    if measured.massive is not None:
        tensors["massive"] = measured.massive.cpu()
    if found is not None:
        tensors["error_before"] = torch.from_numpy(found.error_before)
        tensors["error_after"] = torch.from_numpy(found.error_after)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _recoverability_header(found: Recoverability | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "num_tokens": found.num_tokens,
        "held_out_tokens": found.held_out_tokens,
        "ridge": dict(found.ridge),
    }


def _content_sha256(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(plain(dict(header)), sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def check_scores_target(path: str | Path, *, force: bool = False) -> Path:
    """Check a file for scores before anything is measured.

    Raises:
        CheckpointError: If it exists and `force` is not given, or its folder cannot be written.
    """
    target = Path(path).expanduser()
    if target.is_dir():
        raise CheckpointError(f"scores {str(target)!r} is a folder. Give a file name.")
    if target.exists() and not force:
        raise CheckpointError(
            f"scores {str(target)!r} exist. Choose another name, or --force (force=True)."
        )
    if not target.absolute().parent.is_dir() or not os.access(target.absolute().parent, os.W_OK):
        raise CheckpointError(
            f"scores {str(target)!r}: their folder does not exist or cannot be written."
        )
    return target


def load_scores(path: str | Path) -> Scores:
    """Read scores that `Scores.save` wrote.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is no such file, is damaged, or is of another format version.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise CheckpointError(f"scores {str(file)!r} do not exist. Make them with analyze --save.")
    try:
        with safe_open(str(file), framework="pt") as handle:
            text = (handle.metadata() or {}).get(METADATA_KEY)
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"scores {str(file)!r} are damaged: {error}.") from error
    if text is None:
        raise CheckpointError(f"{str(file)!r} was not written by `analyze --save`.")
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"scores {str(file)!r} are damaged: {error}.") from error
    version, written = header.get("format_version"), header.pop("content_sha256", None)
    if version != SCORES_VERSION:
        raise CheckpointError(
            f"scores {str(file)!r} have format version {version!r}; this release reads "
            f"{SCORES_VERSION}. Measure again with `analyze --save`."
        )
    if _content_sha256(header, tensors) != written:
        raise CheckpointError(
            f"scores {str(file)!r} are damaged: their content does not have the hash written with "
            "it. Measure again with `analyze --save`."
        )
    return _from_file(header, tensors)


def _from_file(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Scores:
    calibration, recoverability = header["calibration"], header["recoverability"]
    windows = Windows(
        ids=tensors["window_ids"].to(torch.int64),
        source=calibration["source"],
        bos_per_window=calibration["bos_per_window"],
        requested=calibration["requested_windows"],
        details=header["calibration_details"],
    )
    if recoverability is not None:
        recoverability = Recoverability(
            error_before=tensors["error_before"].numpy(),
            error_after=tensors["error_after"].numpy(),
            num_tokens=recoverability["num_tokens"],
            held_out_tokens=recoverability["held_out_tokens"],
            ridge={int(start): ridge for start, ridge in recoverability["ridge"].items()},
        )
    similarity = Similarity(tensors["similarity"].numpy(), header["num_tokens"])
    return Scores(
        measured=Measured(similarity, tensors.get("massive")),
        windows=windows,
        model=header["model"],
        dtype=header["dtype"],
        settings=header["settings"],
        versions=header["versions"],
        recoverability=recoverability,
    )
