"""Copy a checkpoint's tensors from file to file, leaving out and renaming decoder layers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from .decoder import base_model, decoder_path
from .plan import PruningPlan

if TYPE_CHECKING:
    from .loading import ModelSource
    from .pipeline import PruneResult


@dataclass(frozen=True)
class TensorCopy:
    """One tensor of the new checkpoint.

    Attributes:
        name: Its new name.
        num_bytes: Its size in the new file.
        file: Source file, or None for `tensor`.
        source_name: Its name in the source file.
        dtype: Dtype to cast to, or None to copy as stored.
        tensor: A tensor that is not in any source file: an operator, or a changed weight.
    """

    name: str
    num_bytes: int
    file: Path | None = None
    source_name: str = ""
    dtype: torch.dtype | None = None
    tensor: Tensor | None = None

    def read(self) -> Tensor:
        """Return the tensor, contiguous and on the CPU."""
        if self.tensor is not None:
            return self.tensor.detach().to("cpu", self.dtype or self.tensor.dtype).contiguous()
        with safe_open(str(self.file), framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.source_name)
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        return tensor.contiguous()


def layer_prefix(names: Iterable[str], path: str, num_layers: int) -> str | None:
    """Find under which prefix a checkpoint names its decoder layers.

    Args:
        names: All tensor names.
        path: Dotted path of the layer list within the model, such as ``model.layers``. A
            checkpoint of the base model alone leaves out the first part.
        num_layers: Depth L.

    Returns:
        The prefix, ending in a dot, or None if none holds exactly the layers 0..L-1.
    """
    names = list(names)
    parts = path.split(".")
    for first in range(len(parts)):
        prefix = ".".join(parts[first:]) + "."
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        found = {int(match[1]) for name in names if (match := pattern.match(name))}
        if found == set(range(num_layers)):
            return prefix
    return None


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file."""
    with safe_open(str(file), framework="pt") as handle:
        return list(handle.keys())


def rename(name: str, prefix: str, plan: PruningPlan) -> str | None:
    """Return a tensor's name in the pruned checkpoint, or None if its layer is removed."""
    match = re.match(re.escape(prefix) + r"(\d+)\.", name)
    if match is None:
        return name
    layer = int(match[1])
    if layer in plan.removed:
        return None
    return f"{prefix}{plan.kept.index(layer)}.{name[match.end() :]}"


def plan_copy(result: PruneResult, source: ModelSource, dtype: str) -> list[TensorCopy] | None:
    """List the tensors of the new checkpoint, or None if the source cannot be copied by name.

    That is so for sources without safetensors files (GGUF, pickles) and where the files name the
    decoder layers, or a changed weight, in another way than the model does. Changed weights come
    from the model in memory, in the dtype in which the source stores them.
    """
    files = source.safetensors
    if not files:
        return None
    model = result.model
    cast: torch.dtype | None = None if dtype == "auto" else getattr(torch, dtype)
    base = model.base_model_prefix if base_model(model) is not model else ""
    path = ".".join(part for part in (base, decoder_path(model)) if part)
    prefix = layer_prefix(
        [name for file in files for name in tensor_names(file)], path, result.plan.num_layers
    )
    if prefix is None:
        return None
    state, own = model.state_dict(), f"{path}."
    changed = {_file_name(name, own, prefix): name for name in result.changed}
    copies = []
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            for name in tensor_names(file):
                new_name = rename(name, prefix, result.plan)
                if new_name is None:
                    continue
                piece = handle.get_slice(name)
                size = num_bytes(piece, cast)
                if new_name in changed:
                    tensor = state[changed.pop(new_name)]
                    stored = cast or FLOATS.get(piece.get_dtype(), tensor.dtype)
                    size = tensor.numel() * stored.itemsize
                    copies.append(TensorCopy(new_name, size, dtype=stored, tensor=tensor))
                else:
                    copies.append(TensorCopy(new_name, size, file, name, cast))
    if changed:
        return None
    copied = {copy.name for copy in copies}  # of a source that has operators already
    for name, tensor in state.items():
        new_name = prefix + name.removeprefix(own)
        if (".ghost_input." in name or ".ghost_output." in name) and new_name not in copied:
            size = tensor.numel() * tensor.element_size()
            copies.append(TensorCopy(new_name, size, tensor=tensor))
    return copies


def _file_name(name: str, layers: str, prefix: str) -> str:
    """Return under which name the files would hold a parameter of the model."""
    if name.startswith(layers):
        return prefix + name.removeprefix(layers)
    # The files of a base model alone leave out the first part of every name.
    return name.removeprefix(layers.removesuffix(prefix))


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16}
SAFETENSORS_BITS |= {"BF16": 16, "I16": 16, "U16": 16}


def num_bytes(piece: object, cast: torch.dtype | None = None) -> int:
    """Return the size of a slice of a safetensors file, cast if it is of floats; reads no data."""
    name, count = piece.get_dtype(), 1  # type: ignore[attr-defined]
    for extent in piece.get_shape():  # type: ignore[attr-defined]
        count *= extent
    if cast is not None and "F" in name:
        return count * cast.itemsize
    return count * SAFETENSORS_BITS.get(name, 8) // 8


def write_shards(copies: Sequence[TensorCopy], folder: Path, max_shard_bytes: int) -> None:
    """Write tensors as `model.safetensors`, or as shards with an index in the Hub's naming.

    One shard is in memory at a time.
    """
    shards: list[list[TensorCopy]] = [[]]
    size = 0
    for copy in copies:
        if shards[-1] and size + copy.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(copy)
        size += copy.num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(tqdm(shards, desc="writing", disable=None), start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {copy.name: copy.read() for copy in shard}, folder / name, metadata={"format": "pt"}
        )
        weight_map |= {copy.name: name for copy in shard}
    if len(shards) > 1:
        total = sum(copy.num_bytes for copy in copies)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
