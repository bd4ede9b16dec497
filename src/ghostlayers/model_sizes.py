"""How many parameters or bytes each decoder layer holds, by structure.

A parameter that several modules share (tied embeddings, shared layers) counts once. What several
layers share goes only when all of them go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .changed_weights import layers_prefix
from .decoder import num_decoder_layers
from .plan import PruningPlan
from .quantized import is_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .loading import ModelSource

# What the header of a safetensors file needs for one tensor, at most: its name, shape and place.
HEADER_BYTES = 256
OPERATOR_NAMES = (".ghost_input.", ".ghost_output.")


@dataclass(frozen=True)
class ModelSizes:
    """Amounts (parameters or bytes) of a dense model.

    Attributes:
        num_layers: Depth L.
        by_owners: Amount by the set of the layers that hold it, and nothing else does.
        outside: What is not, or not only, in decoder layers: embeddings, norms, head.
    """

    num_layers: int
    by_owners: Mapping[frozenset[int], int]
    outside: int

    @property
    def in_layers(self) -> int:
        """Amount in all decoder layers."""
        return sum(self.by_owners.values())

    @property
    def total(self) -> int:
        """Amount of the whole model."""
        return self.in_layers + self.outside

    def removed(self, layers: Iterable[int]) -> int:
        """Return what goes with these layers."""
        gone = set(layers)
        return sum(amount for owners, amount in self.by_owners.items() if owners <= gone)

    def held_by(self, layer: int) -> int:
        """Return what one layer holds, shared parts included: no less than what goes with it."""
        return sum(amount for owners, amount in self.by_owners.items() if layer in owners)


def parameter_sizes(model: PreTrainedModel) -> ModelSizes:
    """Count a dense model's parameters."""
    named = model.named_parameters(remove_duplicate=False)
    return _sizes(model, ((name, id(p), p.numel()) for name, p in named), layers_prefix(model))


def byte_sizes(
    model: PreTrainedModel, source: ModelSource | None = None, dtype: str = "auto"
) -> ModelSizes:
    """Count the bytes of the weight files that `save_pruned` writes.

    Args:
        model: The dense model.
        source: Where the weights lie that will be copied; None counts those in memory.
        dtype: Dtype to cast to; `auto` copies tensors as they are stored.
    """
    from .pipeline import PruneResult
    from .tensor_copy import layer_prefix, plan_copy

    depth, prefix = num_decoder_layers(model.config), layers_prefix(model)
    copies = None
    if source is not None:
        dense = PruneResult(model, PruningPlan(depth, ()), {}, {})
        copies = plan_copy(dense, source, dtype)
    if copies is not None:
        stored = layer_prefix([copy.name for copy in copies], prefix.removesuffix("."), depth)
        assert stored is not None  # plan_copy found it as well
        entries = [(item.name, id(item), item.num_bytes + HEADER_BYTES) for item in copies]
        return _sizes(model, entries, stored)
    state = model.state_dict(keep_vars=True)
    entries = [
        (name, id(tensor), tensor.numel() * tensor.element_size() + HEADER_BYTES)
        for name, tensor in state.items()
    ]
    return _sizes(model, entries, prefix)


def _sizes(
    model: PreTrainedModel, entries: Iterable[tuple[str, int, int]], prefix: str
) -> ModelSizes:
    """Sort (name, identity, amount) by the layers that hold them."""
    owners: dict[int, set[int | None]] = {}
    amounts: dict[int, int] = {}
    for name, identity, amount in entries:
        index = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else ""
        owners.setdefault(identity, set()).add(int(index) if index.isdecimal() else None)
        amounts[identity] = amount
    by_owners: dict[frozenset[int], int] = {}
    outside = 0
    for identity, holders in owners.items():
        layers = frozenset(layer for layer in holders if layer is not None)
        if None in holders:
            outside += amounts[identity]
        else:
            by_owners[layers] = by_owners.get(layers, 0) + amounts[identity]
    return ModelSizes(num_decoder_layers(model.config), by_owners, outside)


def structure(config: Any) -> PreTrainedModel:
    """Build the unquantized model that a config describes; parameters hold no memory."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if is_quantized(config):
        del config.quantization_config
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def counted_parameters(model: PreTrainedModel) -> ModelSizes:
    """Count a model's parameters; of low-bit weights those that its config describes."""
    if is_quantized(model.config):
        model = structure(model.config)
    return parameter_sizes(model)


def operator_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the parameters and the bytes of the operators that are attached to a model."""
    tensors = [
        tensor
        for name, tensor in model.state_dict().items()
        if any(part in name for part in OPERATOR_NAMES)
    ]
    sizes = (tensor.numel() * tensor.element_size() + HEADER_BYTES for tensor in tensors)
    return sum(tensor.numel() for tensor in tensors), sum(sizes)
