"""Change weights of a pruned model without touching the dense model whose tensors it shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from .decoder import base_model, decoder_path
from .errors import UnsupportedModelError
from .offload import pin_

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def layers_prefix(model: PreTrainedModel) -> str:
    """Return how the model names its decoder layers' parameters, such as ``model.layers.``."""
    base = model.base_model_prefix if base_model(model) is not model else ""
    return "".join(f"{part}." for part in (base, decoder_path(model)) if part)


def change_weights_(model: PreTrainedModel, values: Mapping[str, Tensor]) -> frozenset[str]:
    """Give parameters new values, in place of the model but not of its old tensors.

    Every changed parameter is a new one; whoever shares the old tensor keeps it. The names returned
    belong into `PruneResult.changed`, so that the writer takes these tensors from the model instead
    of from the source's files.

    Args:
        model: A model made by `share_tensors`.
        values: New values by parameter name; cast to the parameter's dtype and device.

    Returns:
        The names.

    Raises:
        UnsupportedModelError: If a parameter is tied to another one of the model.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {name: group for group in names.values() for name in group}
    for name, value in values.items():
        module, _, attribute = name.rpartition(".")
        old = model.get_parameter(name)
        if len(tied[name]) > 1:
            raise UnsupportedModelError(
                f"{name!r} cannot be changed alone: it is tied ({', '.join(tied[name])})."
            )
        if value.shape != old.shape:
            raise ValueError(f"{name!r} is {tuple(old.shape)}, got {tuple(value.shape)}")
        pin_(model.get_submodule(module))
        old = model.get_parameter(name)
        with torch.no_grad():
            new = nn.Parameter(value.to(old.device, old.dtype).contiguous(), old.requires_grad)
        setattr(model.get_submodule(module), attribute, new)
    return frozenset(values)
