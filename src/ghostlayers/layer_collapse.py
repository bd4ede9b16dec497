"""Merge decoder layers into one (LaCo, Yang et al., arXiv 2402.11187)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .changed_weights import change_weights_, layers_prefix
from .decoder import decoder_layers, remove_layers_

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def collapsed(base: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return θ_l + Σ_j (θ_{l+j} − θ_l), the layer merge of the paper (section 2).

    The published code subtracts the running sum instead of θ_l, which leaves the last θ_{l+j}; the
    paper's formula is followed.

    Args:
        base: θ_l.
        others: θ_{l+1}, θ_{l+2}, ..., of the same shape.

    Returns:
        A new tensor in the dtype of `base`, summed in float32 (float64 if it is that).
    """
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    start = base.detach().to(dtype)
    total = start.clone()
    for other in others:
        total += other.detach().to(start.device, dtype) - start
    return total.to(base.dtype)


def mismatch(model: PreTrainedModel, position: int, count: int) -> str | None:
    """Say why layers cannot be merged; None if they can.

    Args:
        model: The model.
        position: The layer that stays.
        count: Number of layers above it that go.
    """
    layers = decoder_layers(model)
    base = {name: tuple(p.shape) for name, p in layers[position].named_parameters()}
    for parameter in layers[position].parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            return "its weights are offloaded or low-bit"
    for above in range(position + 1, position + 1 + count):
        other = {name: tuple(p.shape) for name, p in layers[above].named_parameters()}
        differing = sorted(
            name for name in base.keys() | other.keys() if base.get(name) != other.get(name)
        )
        if differing:
            return f"layers differ in {len(differing)} parameters, such as {differing[0]}"
    return None


def collapse_(model: PreTrainedModel, position: int, count: int) -> PreTrainedModel:
    """Merge the `count` layers above a layer into it and remove them, in place.

    All parameters of a layer are merged, norms and biases included (the published code merges the
    seven linear maps of a Llama layer).

    Args:
        model: A model made by `share_tensors`; changed weights become new parameters.
        position: The layer that stays.
        count: Number of layers above it that go.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: If a parameter is tied to another layer's, or the config cannot
            describe the shorter model.
    """
    layers, prefix = decoder_layers(model), layers_prefix(model)
    above = range(position + 1, position + 1 + count)
    values = {
        f"{prefix}{position}.{name}": collapsed(
            parameter, [layers[index].get_parameter(name) for index in above]
        )
        for name, parameter in layers[position].named_parameters()
    }
    change_weights_(model, values)
    return remove_layers_(model, above)
