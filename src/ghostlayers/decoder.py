"""Where a Hugging Face causal LM keeps its decoder layers, and how to remove some of them.

The only place that knows model layouts (with `layer_fields` for config fields and `model_checks`
for what is tried out). Everything is derived from module structure and config, never from a name:
neither the folder's nor the class's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import CalibrationError, UnsupportedModelError
from .layer_fields import depth_fields, depth_names
from .plan import PruningPlan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

# Attributes by which modules remember their layer's position (the cache slot).
LAYER_INDEX_ATTRIBUTES = ("layer_idx", "layer_id", "layer_index", "layer_number")


def text_config(config: Any) -> Any:
    """Return the config that holds the decoder's depth: itself, or the nested one of a wrapper.

    `get_text_config` may return a copy, to which writing would be lost; such a config is its own.
    """
    nested = config.get_text_config(decoder=True)
    owned = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return nested if any(nested is part for part in owned) else config


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
    text = text_config(config)
    depth = getattr(text, (depth_names(text) or ["num_hidden_layers"])[0], None)
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
    from .offload import execution_device

    return execution_device(model.get_input_embeddings())


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

    In a wrapper of several towers only the part that owns the text config is searched.

    Returns:
        Dotted path relative to the base model, such as ``layers``, ``h`` or ``decoder.layers``.

    Raises:
        UnsupportedModelError: If there is none, or several at the same depth of nesting.
    """
    from torch import nn

    depth, text = num_decoder_layers(model.config), text_config(model.config)
    base = base_model(model)
    paths = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if text is not model.config:
        towers = [name for name, m in base.named_modules() if getattr(m, "config", None) is text]
        paths = [path for path in paths if any(path.startswith(f"{tower}.") for tower in towers)]
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
    layers: nn.ModuleList = base_model(model).get_submodule(decoder_path(model))  # type: ignore[assignment]
    return layers


def share_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and config, but share every parameter and buffer.

    Changing the copy's structure leaves the original as it is, and no weight is held twice.

    Returns:
        A model of the same class.
    """
    from .offload import shared_stores

    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo | shared_stores(model))


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy modules and config; parameters are new, frozen, and share the storage of the old.

    Gradients and `requires_grad` of the copy are its own. It is in evaluation mode.
    """
    from torch import nn

    from .offload import shared_stores

    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    memo |= shared_stores(model)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    copied: PreTrainedModel = copy.deepcopy(model, memo)
    copied.eval()
    return copied


def pruned_config(config: Any, plan: PruningPlan) -> Any:
    """Return a copy of a config as it must read after the plan's removal.

    The copy is made anew from its own values, so it is what a reload will hold.

    Raises:
        UnsupportedModelError: If a per-layer field cannot be carried over, or if the config class
            turns one of them into something else.
    """
    new = copy.deepcopy(config)
    changes = depth_fields(text_config(config), plan.kept, plan.num_layers)
    vars(text_config(new)).update(changes)
    try:
        rebuilt = type(new).from_dict(new.to_dict())
    except Exception as error:  # config classes validate in many ways
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} has no config for the kept layers {plan.kept} "
            f"({type(error).__name__}: {reason})."
        ) from error
    for name, value in changes.items():
        found = getattr(text_config(rebuilt), name, None)
        same = list(found) == value if isinstance(found, list | tuple) else found == value
        if not same:
            raise UnsupportedModelError(
                f"model_type {config.model_type!r} cannot keep the layers {plan.kept}: its config "
                f"turns `{name}` from {value!r} into {found!r}."
            )
    return new


def remove_layers_(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Remove decoder layers in place.

    The list is shortened, every module that remembers its layer's index is renumbered, and the
    config's depth and per-layer fields follow. Before that a model without weights is built from
    the new config and compared: what a reload would make of the kept layers must be what they are.
    Removing nothing changes nothing.

    Args:
        model: A causal LM.
        layers: 0-based indices of the layers to remove, in any order.

    Returns:
        The same model.

    Raises:
        PlanError: If a layer is outside the model, named twice, or none would stay.
        UnsupportedModelError: If the config cannot describe the shorter model, or a constant that
            depends on a layer's index would change by a reload; nothing is changed.
    """
    from .model_checks import compare_with_reload, depth_attributes, rebuild_without_weights

    stack = decoder_layers(model)
    plan = PruningPlan(len(stack), tuple(layers))
    if not plan.removed:
        return model
    config = text_config(model.config)
    fresh = rebuild_without_weights(model, pruned_config(model.config, plan))
    fresh_stack = decoder_layers(fresh)
    compare_with_reload(stack, fresh_stack, plan, model.config.model_type)
    outside = depth_attributes(model, fresh, decoder_path(model))
    kept = [stack[layer] for layer in plan.kept]
    del stack[:]
    for layer, twin in zip(kept, fresh_stack, strict=True):
        _renumber(layer, twin)
        stack.append(layer)
    for module, name, value in outside:
        setattr(module, name, value)
    vars(config).update(depth_fields(config, plan.kept, plan.num_layers))
    return model


def _renumber(layer: nn.Module, twin: nn.Module) -> None:
    """Give a layer the index attributes that its twin in a rebuilt model has."""
    twins = dict(twin.named_modules())
    for path, module in layer.named_modules():
        for name in LAYER_INDEX_ATTRIBUTES:
            if name in vars(module):
                setattr(module, name, getattr(twins[path], name))
