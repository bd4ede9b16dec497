"""Config fields that describe single layers, and how they follow a removal.

Used by `decoder` only. A per-layer list is filtered by kept index, never cut to length: cutting
puts sliding windows, rotary switches or sparse layers onto the wrong layers without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import UnsupportedModelError

# One entry per layer, in order: filter by kept index.
PER_LAYER_LISTS = frozenset(
    {
        "layer_types",
        "mlp_layer_types",
        "no_rope_layers",
        "layers_block_type",
        "attention_layers",
    }
)
# Indices of layers: keep those that stay, renumbered.
INDEX_LISTS = frozenset({"mlp_only_layers", "full_attn_idxs"})
# Lists that may be as long as the model is deep by coincidence; they do not describe layers.
UNRELATED_LISTS = frozenset({"architectures", "id2label", "label2id", "eos_token_id"})


def depth_fields(config: Any, kept: Sequence[int]) -> dict[str, Any]:
    """Compute the config fields that change when only some layers stay.

    Args:
        config: Text config of the dense model (the one that holds the depth).
        kept: Kept layers, ascending, 0-based indices of the dense model.

    Returns:
        New values by field name. Nothing is changed.

    Raises:
        UnsupportedModelError: If a field describes layers in a way that cannot be carried over; the
            message names the field and its value.
    """
    depth = int(config.num_hidden_layers)
    fields: dict[str, Any] = {"num_hidden_layers": len(kept)}
    position = {layer: index for index, layer in enumerate(kept)}
    for name, value in vars(config).items():
        if not isinstance(value, list | tuple) or name in UNRELATED_LISTS:
            continue
        if name in INDEX_LISTS:
            fields[name] = [position[layer] for layer in value if layer in position]
        elif len(value) == depth:
            if name not in PER_LAYER_LISTS:
                raise UnsupportedModelError(
                    f"cannot prune this config safely: `{name}` has one entry per layer "
                    f"({list(value)}), and ghostlayers does not know what it means "
                    f"(model_type {config.model_type!r})."
                )
            fields[name] = [value[layer] for layer in kept]
    return fields
