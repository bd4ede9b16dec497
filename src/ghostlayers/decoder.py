"""Where a Hugging Face causal LM keeps its decoder layers, and how to remove some of them.

The only place that knows model layouts. Everything is derived from module structure and config,
never from a name: neither the folder's nor the class's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import CalibrationError, UnsupportedModelError
from .layer_fields import depth_fields
from .plan import PruningPlan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

# Attributes by which attention modules remember their layer's position (the cache slot).
LAYER_INDEX_ATTRIBUTES = ("layer_idx", "layer_id", "layer_index", "layer_number")


def text_config(config: Any) -> Any:
    """Return the config that holds the decoder's depth (the nested one of a wrapper)."""
    return config.get_text_config(decoder=True)


def num_decoder_layers(config: Any) -> int:
    """Read the depth from a config.

    Raises:
        UnsupportedModelError: If the config describes no decoder-only stack.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is an encoder-decoder. Allowed: decoder-only causal "
            "language models."
        )
    depth = getattr(text_config(config), "num_hidden_layers", None)
    if not isinstance(depth, int) or depth < 1:
        raise UnsupportedModelError(
            f"the config of model_type {config.model_type!r} names no number of decoder layers "
            f"(num_hidden_layers is {depth!r}). Allowed: decoder-only causal language models."
        )
    return depth


def base_model(model: PreTrainedModel) -> nn.Module:
    """Return the model without its language-modelling head."""
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    return base


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that token ids must be on."""
    device: torch.device = input_embeddings(model).device
    return device


def input_embeddings(model: PreTrainedModel) -> torch.Tensor:
    """Return the (vocabulary, C) token embeddings."""
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight


def check_ids(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Check that token ids are in the model's vocabulary.

    Raises:
        CalibrationError: If one is not: they are from the tokenizer of another model.
    """
    size = len(input_embeddings(model))
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise CalibrationError(
            f"token ids reach from {int(ids.min())} to {int(ids.max())}, the model's vocabulary "
            f"has {size}. Give the model's own tokenizer."
        )


def decoder_path(model: PreTrainedModel) -> str:
    """Find the decoder layers: the shallowest `ModuleList` as long as the config says.

    Returns:
        Dotted path relative to the base model, such as ``layers``, ``h`` or ``decoder.layers``.

    Raises:
        UnsupportedModelError: If there is none, or several at the same depth of nesting.
    """
    from torch import nn

    depth = num_decoder_layers(model.config)
    base = base_model(model)
    paths = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if paths:
        nesting = min(path.count(".") for path in paths)
        paths = [path for path in paths if path.count(".") == nesting]
    if len(paths) != 1:
        found = f"{len(paths)} module lists ({', '.join(paths)})" if paths else "no module list"
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) has {found} of "
            f"{depth} decoder layers. Allowed: models with exactly one."
        )
    return str(paths[0])


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers of a causal LM."""
    from torch import nn

    layers = base_model(model).get_submodule(decoder_path(model))
    if not isinstance(layers, nn.ModuleList):  # pragma: no cover - guaranteed by decoder_path
        raise UnsupportedModelError(f"{decoder_path(model)} is not a list of layers.")
    return layers


def check_causal(model: PreTrainedModel) -> None:
    """Check by a forward pass of a few tokens that no position sees a later one.

    Raises:
        UnsupportedModelError: If changing the last token changes an earlier output: the model is
            an encoder, and removing layers by next-token statistics makes no sense.
    """
    import torch

    vocabulary = len(input_embeddings(model))
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=input_device(model)) % vocabulary
    training = model.training
    model.eval()  # dropout is random
    try:
        with torch.no_grad():
            states = base_model(model)(input_ids=ids, use_cache=False)[0]
    finally:
        model.train(training)
    # What is not finite is reported by the sweep, with its layer.
    if not torch.allclose(states[0, :-1], states[1, :-1], rtol=1e-3, atol=1e-3, equal_nan=True):
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) attends to later "
            "tokens: it is an encoder. Allowed: decoder-only causal language models."
        )


def share_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and config, but share every parameter and buffer.

    Changing the copy's structure leaves the original as it is, and no weight is held twice.

    Returns:
        A model of the same class.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def remove_layers_(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Remove decoder layers in place.

    The list is shortened, every module that remembers its layer's index is renumbered, and the
    config's depth and per-layer fields follow. Removing nothing changes nothing.

    Args:
        model: A causal LM.
        layers: 0-based indices of the layers to remove, in any order.

    Returns:
        The same model.

    Raises:
        PlanError: If a layer is outside the model, named twice, or none would stay.
        UnsupportedModelError: If the config cannot describe the shorter model; nothing is changed.
    """
    stack = decoder_layers(model)
    plan = PruningPlan(len(stack), tuple(layers))
    if not plan.removed:
        return model
    config = text_config(model.config)
    changes = depth_fields(config, plan.kept)
    kept = [stack[layer] for layer in plan.kept]
    del stack[:]
    for new_index, (old_index, layer) in enumerate(zip(plan.kept, kept, strict=True)):
        _renumber(layer, old_index, new_index)
        stack.append(layer)
    for name, value in changes.items():
        setattr(config, name, value)
    return model


def _renumber(layer: nn.Module, old_index: int, new_index: int) -> None:
    for module in layer.modules():
        for name in LAYER_INDEX_ATTRIBUTES:
            if vars(module).get(name) == old_index:
                setattr(module, name, new_index)


def pruned_config(config: Any, plan: PruningPlan) -> Any:
    """Return a copy of a config as it must read after the plan's removal.

    Raises:
        UnsupportedModelError: If a per-layer field cannot be carried over.
    """
    new = copy.deepcopy(config)
    target = text_config(new)
    for name, value in depth_fields(text_config(config), plan.kept).items():
        setattr(target, name, value)
    return new
