"""A teacher's top-K log-probabilities on disk: computed once, read window by window.

A folder holds `teacher.json`, which says of which teacher, windows and K it is, and safetensors
shards of consecutive windows with `log_probs` (n, T, K) float16 and `ids` (n, T, K) int32. Shards
appear under their final name only when they are complete, so that an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from .budget_values import format_quantity
from .calibration import Windows
from .decoder import check_ids, input_device, input_embeddings
from .divergence import top_log_probs
from .errors import CalibrationError, CheckpointError, GhostlayersError
from .model_checks import evaluating
from .offload import stored_tensor
from .records import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BYTES_PER_VALUE = 6  # float16 and int32
MAX_SHARD_BYTES = 256 * 2**20
KEY_FILE = "teacher.json"


def cache_bytes(num_windows: int, window: int, top_k: int) -> int:
    """Return the size of a cache, n * T * K * 6 bytes."""
    return num_windows * window * top_k * BYTES_PER_VALUE


def weights_sha256(model: PreTrainedModel) -> str:
    """Hash a model's weights: names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        value = stored_tensor(model, name) if tensor.is_meta else tensor
        flat = value.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class TeacherLogits:
    """A complete cache.

    Attributes:
        folder: Where it is.
        key: What it was made of: `teacher_sha256`, `ids_sha256`, `windows`, `window`, `top_k`,
            `vocabulary`.
    """

    folder: Path
    key: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return cache_bytes(*(self.key[name] for name in ("windows", "window", "top_k")))

    @property
    def windows_per_shard(self) -> int:
        """Windows per file; the last one may hold fewer."""
        return max(1, MAX_SHARD_BYTES // cache_bytes(1, self.key["window"], self.key["top_k"]))

    @property
    def digest(self) -> str:
        """SHA-256 of the key."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()

    def shard(self, index: int) -> Path:
        """Return the path of a shard."""
        return self.folder / f"windows-{index:05d}.safetensors"

    def read(self, window: int) -> tuple[Tensor, Tensor]:
        """Return one window's log-probabilities (T, K) float16 and token ids (T, K) int32."""
        shard, row = divmod(window, self.windows_per_shard)
        with safe_open(str(self.shard(shard)), framework="pt") as file:
            return file.get_slice("log_probs")[row], file.get_slice("ids")[row]


def cache_teacher(
    teacher: PreTrainedModel,
    windows: Windows,
    folder: str | Path,
    *,
    top_k: int = 50,
    batch_size: int = 1,
    replace_stale: bool = False,
    progress: bool = True,
) -> TeacherLogits:
    """Compute a teacher's top-K log-probabilities, as far as the folder does not hold them.

    Args:
        teacher: The dense model.
        windows: (n, T) ids.
        folder: Where the cache is, or goes.
        top_k: K.
        batch_size: Windows per forward pass.
        replace_stale: Delete a cache of another teacher, other windows or another K.
        progress: Show a progress bar when standard error is a terminal.

    Raises:
        CheckpointError: If the folder holds another cache and `replace_stale` is not given, holds
            something else, or its disk is too small.
        CalibrationError: If a token id is not in the vocabulary or the logits are not finite.
        GhostlayersError: If K exceeds the vocabulary.
    """
    check_ids(teacher, windows.ids)
    vocabulary = len(input_embeddings(teacher))
    if top_k > vocabulary:
        raise GhostlayersError(
            f"`top_k` is {top_k}; allowed: 1 to {vocabulary}, the teacher's vocabulary."
        )
    key = {
        "teacher_sha256": weights_sha256(teacher),
        "ids_sha256": windows.ids_sha256,
        "windows": windows.ids.shape[0],
        "window": windows.ids.shape[1],
        "top_k": top_k,
        "vocabulary": vocabulary,
    }
    cache = TeacherLogits(Path(folder), key)
    _prepare_folder(cache, replace_stale=replace_stale)
    shards = windows.ids.split(cache.windows_per_shard)
    missing = [index for index in range(len(shards)) if not cache.shard(index).exists()]
    with evaluating(teacher):
        for index in tqdm(missing, desc="teacher", disable=None if progress else True):
            _write_shard(cache, index, *top_of(teacher, shards[index], top_k, batch_size))
    return cache


def _prepare_folder(cache: TeacherLogits, *, replace_stale: bool) -> None:
    folder, key_file = cache.folder, cache.folder / KEY_FILE
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cache {str(folder)!r} is a file. Give a folder.")
    try:
        found: Any = json.loads(key_file.read_text("utf-8")) if key_file.is_file() else None
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(
            f"{key_file} is damaged ({error}). Delete its folder, or give another one."
        ) from error
    if found is None and folder.exists() and any(folder.iterdir()):
        raise CheckpointError(
            f"cache {str(folder)!r} holds other files. Give a new folder, or one that "
            "`ghostlayers finetune` made."
        )
    if found is not None and found != cache.key:
        differs = [name for name in cache.key if found.get(name) != cache.key[name]]
        line = f"cache {str(folder)!r} is stale ({', '.join(differs)} differ)"
        if not replace_stale:
            raise CheckpointError(f"{line}. Delete it, or give another folder.")
        warnings.warn(f"{line}; computing it again.", stacklevel=3)
        shutil.rmtree(folder)
        found = None
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(cache)
        part = folder / f"{KEY_FILE}.part"
        write_json(part, cache.key)
        part.replace(key_file)


def _check_space(cache: TeacherLogits) -> None:
    free = shutil.disk_usage(cache.folder).free
    if cache.num_bytes > free:
        raise CheckpointError(
            f"the teacher's logits need {format_quantity('target_bytes', cache.num_bytes)}, "
            f"{cache.folder} has {format_quantity('target_bytes', free)} free. Lower `top_k` or "
            "`num_windows`, or give another cache."
        )


def top_of(
    teacher: PreTrainedModel, ids: Tensor, top_k: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return (n, T, K) log-probabilities and token ids of (n, T) windows, see `top_log_probs`.

    Raises:
        CalibrationError: If the logits are not finite.
    """
    parts = []
    for batch in ids.split(batch_size):
        logits = teacher(input_ids=batch.to(input_device(teacher)), use_cache=False).logits
        if bool(logits.isnan().any()):
            raise CalibrationError(
                f"the teacher's logits are not finite in {teacher.dtype}: check its weights, or "
                "use a checkpoint in float32 or bfloat16."
            )
        parts.append([part.cpu() for part in top_log_probs(logits, top_k)])
    return torch.cat([values for values, _ in parts]), torch.cat([tokens for _, tokens in parts])


def _write_shard(cache: TeacherLogits, index: int, log_probs: Tensor, ids: Tensor) -> None:
    path = cache.shard(index)
    part = path.with_suffix(".part")
    try:
        save_file({"log_probs": log_probs, "ids": ids}, part, metadata={"digest": cache.digest})
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"cache {str(cache.folder)!r} cannot be written ({error}). Free some space and start "
            "again, or give another cache."
        ) from error
