"""Open MODEL: a Hub id, a checkpoint folder, or a `.gguf` file."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .devices import resolve_device
from .errors import CheckpointError, GhostlayersError, UnsupportedModelError, one_line
from .placement import Placement, check_parts, check_places, place_

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GHOST_MODEL_TYPE = "ghostlayers"
# What a GGUF load leaves on the model and its config, and what would make saving refuse it.
GGUF_TRACES = (
    "hf_quantizer",
    "is_quantized",
    "quantization_method",
    "quantization_config",
    "_pre_quantization_dtype",
    "_model_name_or_path",
)
SETTINGS_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
# Names of a tokenizer's files, of which each has one or more.
TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*merges*", "*bpe*")
SNAPSHOT_IGNORE = ("original/*", "consolidated*", "*.gguf", "*.bin", "*.pth", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are on this machine.

    Attributes:
        name: MODEL as it was given.
        folder: Local folder with the config and the weights.
        gguf: File name within `folder` when the source is a GGUF file.
        revision: Commit of a Hub snapshot, when known.
        on_hub: Whether `name` is a Hub id; `load_model` then fetches the weights.
    """

    name: str
    folder: Path
    gguf: str | None = None
    revision: str | None = None
    on_hub: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained` for this source."""
        return {"gguf_file": self.gguf} if self.gguf else {}

    @property
    def safetensors(self) -> list[Path]:
        """The weight files that transformers reads, if safetensors; else an empty list."""
        single, index = (self.folder / f"model.safetensors{end}" for end in ("", ".index.json"))
        if self.gguf:
            return []
        if single.is_file() or not index.is_file():
            return [single] if single.is_file() else []
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [self.folder / name for name in sorted(set(listed))]


def locate(name: str) -> ModelSource:
    """Find a model's files; of a Hub id, the config and the tokenizer are downloaded if need be.

    Raises:
        CheckpointError: If there is no such file, folder or repository.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"MODEL {name!r} is a file. Allowed: a checkpoint folder, a .gguf file or a Hub id."
            )
        return ModelSource(name, path.parent, gguf=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"MODEL {name!r} has no config.json: it is not a checkpoint.")
        return ModelSource(name, path)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"MODEL {name!r} does not exist.")
    return _download(name)


def _located(source: ModelSource | str | Path) -> ModelSource:
    return source if isinstance(source, ModelSource) else locate(str(source))


def _download(name: str) -> ModelSource:
    folder = _snapshot(name, allow_patterns=list(SETTINGS_FILES))
    revision = folder.name if len(folder.name) == 40 else None
    return ModelSource(name, folder, revision=revision, on_hub=True)


def _snapshot(name: str, **patterns: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, **patterns))
    except (OSError, HFValidationError, ValueError) as error:
        raise CheckpointError(
            f"MODEL {name!r} is no local folder and cannot be fetched from the Hub "
            f"({type(error).__name__}). Check the name and the network, or give a local path."
        ) from error


def _fetch_weights(source: ModelSource) -> None:
    """Download the weights of a Hub id: safetensors, or what there is without them."""
    if not source.on_hub:
        return
    _snapshot(source.name, revision=source.revision, ignore_patterns=list(SNAPSHOT_IGNORE))
    if not source.safetensors:
        ignore = list(SNAPSHOT_IGNORE[:3])
        _snapshot(source.name, revision=source.revision, ignore_patterns=ignore)


def load_config(source: ModelSource) -> Any:
    """Read a model's config; no weight is opened.

    Raises:
        UnsupportedModelError: If transformers knows no causal LM for it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from . import modeling_ghostlayers  # noqa: F401  (registers the model type)

    try:
        config = AutoConfig.from_pretrained(source.folder, **source.keywords)
    except Exception as error:  # transformers' own, hub's strict dataclasses, ...
        raise CheckpointError(
            one_line(f"MODEL {source.name!r}: cannot read its config", error)
        ) from error
    known = type(config) in AutoModelForCausalLM._model_mapping
    if not known and config.model_type != GHOST_MODEL_TYPE:
        raise UnsupportedModelError(
            f"MODEL {source.name!r} (model_type {config.model_type!r}) is no causal language model "
            "that transformers knows. Allowed: decoder-only models."
        )
    return config


def load_tokenizer(source: ModelSource | str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Args:
        source: Hub id, checkpoint folder or `.gguf` file, or what `locate` found.

    Raises:
        CheckpointError: If the source holds none.
    """
    from transformers import AutoTokenizer

    source = _located(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.folder, **source.keywords
        )
    except Exception as error:  # the tokenizers library raises bare exceptions
        if not source.gguf and not any(any(source.folder.glob(n)) for n in TOKENIZER_FILES):
            raise CheckpointError(
                f"MODEL {source.name!r} has no tokenizer files (tokenizer.json, tokenizer.model, "
                "...). Copy those of the model it was made from into its folder."
            ) from error
        raise CheckpointError(
            one_line(f"MODEL {source.name!r}: cannot load a tokenizer", error)
        ) from error
    return tokenizer


def load_model(
    source: ModelSource | str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    placement: Placement | None = None,
) -> PreTrainedModel:
    """Load a causal LM in evaluation mode.

    A GGUF source is dequantised and becomes an ordinary model: its stale quantization record goes,
    so that it can be saved.

    Args:
        source: Hub id, checkpoint folder or `.gguf` file, or what `locate` found.
        dtype: `auto` keeps the stored dtype (float32 for GGUF).
        device: See `resolve_device`; not read if the placement has a device map.
        placement: Where the weights go if they do not fit on one device.

    Returns:
        The model.

    Raises:
        CheckpointError: If a weight is missing, unexpected or of another shape.
        GhostlayersError: If a device does not exist here, or a place is for no part of the model.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    source = _located(source)
    placement = Placement() if placement is None else placement
    target = None if placement.device_map is not None else resolve_device(device)
    if source.gguf and target is None:
        raise GhostlayersError(
            f"MODEL {source.name!r} is a GGUF file and `device_map` is given: it is dequantised in "
            "memory as a whole. Leave out `device_map`, or save it as a checkpoint first."
        )
    check_places(placement)
    _fetch_weights(source)
    if source.gguf and dtype == "auto":
        dtype = "float32"
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    keywords = source.keywords
    if source.gguf and hasattr(transformers, "GgufConfig"):
        # Newer releases otherwise keep GGUF blocks packed where a kernel for them exists.
        keywords["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=wanted,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named by check_loading_info
                **keywords,
                **placement.keywords(),
            )
    except GhostlayersError:
        raise
    except Exception as error:  # safetensors, pickle and the quantizers have their own classes
        raise CheckpointError(one_line(f"MODEL {source.name!r}: cannot load it", error)) from error
    model: PreTrainedModel = loaded[0]
    check_loading_info(source.name, loaded[1])
    if source.gguf:
        _forget_quantization(model)
    if target is not None:
        model.to(target)  # type: ignore[arg-type]
    check_parts(model, placement)
    place_(model, placement)
    model.eval()
    return model


def check_loading_info(name: str, info: Any) -> None:
    """Raise unless every tensor of the checkpoint met its place in the model.

    Raises:
        CheckpointError: Naming the first tensors that are missing, unexpected or mismatched.
    """
    faults = {
        kind: sorted(str(key) for key in info[kind])
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    }
    if faults:
        parts = [
            f"{len(keys)} {kind.replace('_', ' ')} ({keys[0]}, ...)"
            for kind, keys in faults.items()
        ]
        raise CheckpointError(
            f"MODEL {name!r}: weights and config disagree: {'; '.join(parts)}. "
            "The model would run with random or missing weights."
        )


def _forget_quantization(model: PreTrainedModel) -> None:
    for holder in (model, model.config):
        for attribute in GGUF_TRACES:
            if attribute in vars(holder):
                delattr(holder, attribute)
