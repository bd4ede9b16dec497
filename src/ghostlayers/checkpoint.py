"""Write and read pruned checkpoints.

Weights are copied tensor by tensor from the source's safetensors files where there are any, so that
what stays is bit-identical and the model is never needed whole. The folder appears under its final
name only when it is complete.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import modeling_ghostlayers
from .budget_values import format_quantity
from .decoder import decoder_layers
from .errors import CheckpointError
from .loading import ModelSource, load_model, load_tokenizer, locate
from .model_card import model_card
from .offload import is_offloaded, largest_bytes
from .older_transformers import write_older_keys
from .output_folder import HIDDEN_CONFIG, check_output, complete_folder, hide_config
from .records import RECORD_FILE, read_record, write_json
from .tensor_copy import TensorCopy, plan_copy, write_shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .pipeline import PruneResult
    from .placement import Placement

MAX_SHARD_BYTES = 2 * 10**9


@dataclass(frozen=True)
class PrunedCheckpoint:
    """A pruned checkpoint, loaded.

    Attributes:
        model: The model with its operators, in evaluation mode.
        tokenizer: Its tokenizer, or None if the folder has none.
        record: Content of `ghostlayers.json`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    record: dict[str, Any]


def save_pruned(
    result: PruneResult,
    out: str | Path,
    *,
    source: ModelSource | None = None,
    dtype: str = "auto",
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a pruned model as a checkpoint folder.

    Without operators it is a stock checkpoint. With operators it carries `modeling_ghostlayers.py`
    and a model type of its own, so that no loader can drop them silently.

    Args:
        result: From `prune`.
        out: Folder to write.
        source: Where the dense weights lie; they are then copied file to file. None writes the
            tensors of the model in memory.
        dtype: `auto` copies tensors as they are stored; else floating-point tensors are cast.
        force: Replace an existing folder.
        max_shard_bytes: Largest size of one weight file.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the folder exists without `force`, or the disk is too small.
    """
    path = check_output(out, force=force, source=source)
    tensors = plan_copy(result, source, dtype) if source is not None else None
    if tensors is None and any(tensor.is_meta for tensor in result.model.parameters()):
        raise CheckpointError(
            "the weights are not in memory and the source has no safetensors files to copy them "
            "from. Give a source with safetensors files."
        )
    with complete_folder(path, force=force) as folder:
        _check_space(folder, result.model)
        if tensors is None:
            _save_from_memory(result.model, folder, max_shard_bytes)
        else:
            _save_from_files(result.model, tensors, folder, _shard_bytes(result, max_shard_bytes))
            copy_generation_config(source, folder)
        hide_config(folder)
        if result.tokenizer is not None:
            _save_tokenizer(result.tokenizer, folder)
        write_older_keys(folder, result.model.config, name=HIDDEN_CONFIG)
        origin = source and {
            "model": source.name,
            "gguf": source.gguf,
            "revision": source.revision,
        }
        record = {
            **result.record,
            "source": result.record.get("source", origin),  # a pruned source names the dense one
            "dtype": str(result.model.dtype).removeprefix("torch."),
        }
        write_json(folder / RECORD_FILE, record)
        (folder / "README.md").write_text(model_card(record), encoding="utf-8")
    return path


def load_pruned(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    placement: Placement | None = None,
) -> PrunedCheckpoint:
    """Load a checkpoint that `save_pruned` wrote; every tensor must be in its place.

    Args:
        path: The folder.
        dtype: `auto` keeps the stored dtype.
        device: `auto` takes CUDA if there is one.
        placement: See `load_model`.

    Returns:
        The model, its tokenizer and its record.

    Raises:
        CheckpointError: If it is no such checkpoint, or a tensor is missing, unexpected or of
            another shape, those of the operators included.
    """
    folder = Path(path).expanduser()
    source = locate(str(folder))
    record = read_record(folder)
    model = load_model(source, dtype=dtype, device=device, placement=placement)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return PrunedCheckpoint(model, load_tokenizer(source) if has_tokenizer else None, record)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # each kind has its own class for a full disk
        raise CheckpointError(f"the tokenizer cannot be written ({error}).") from error


def _check_space(folder: Path, model: PreTrainedModel) -> None:
    need = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise CheckpointError(
            f"the checkpoint needs {format_quantity('target_bytes', need)}, {folder.parent} has "
            f"{format_quantity('target_bytes', free)} free. Free some space or choose another "
            "folder."
        )


def copy_generation_config(source: ModelSource | None, folder: Path) -> None:
    """Copy the source's generation config as it is, if it has one."""
    name = "generation_config.json"
    if source is not None and (source.folder / name).is_file():
        shutil.copyfile(source.folder / name, folder / name)


def _shard_bytes(result: PruneResult, limit: int) -> int:
    """Bound a shard, which is in memory as a whole, by the largest layer of an offloaded model."""
    if not is_offloaded(result.model):
        return limit
    return min(limit, largest_bytes(decoder_layers(result.model)))


def _save_from_memory(model: PreTrainedModel, folder: Path, max_shard_bytes: int) -> None:
    own: Any = getattr(model, "generation_config", None)
    if own is not None:  # saving one is refused for sampling settings without do_sample
        model.generation_config = type(own)()
    # transformers writes on the first process alone; each that comes so far has a model to write
    vars(model)["should_save_on_this_rank"] = bool
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_bytes)
    finally:
        model.generation_config = own
        del vars(model)["should_save_on_this_rank"]
    if own is not None:
        own.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _save_from_files(
    model: PreTrainedModel, tensors: list[TensorCopy], folder: Path, max_shard_bytes: int
) -> None:
    write_shards(tensors, folder, max_shard_bytes)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if config.model_type == modeling_ghostlayers.MODEL_TYPE:
        shutil.copyfile(modeling_ghostlayers.__file__, folder / "modeling_ghostlayers.py")
