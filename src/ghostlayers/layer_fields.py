"""Config fields that describe single layers, and how they follow a removal.

Used by `decoder` only. Fields are known by what they mean, never by the family that has them. A
per-layer list is filtered by kept index, never cut to length: cutting puts sliding windows, rotary
switches or sparse layers onto the wrong layers without an error. What the new order cannot express
is refused, with the field and its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import UnsupportedModelError

# Fields that may hold the depth; a config class declares one of them (xlstm: two).
DEPTH_FIELDS = (
    "decoder_layers",
    "num_decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
)
# One entry per layer, in order: filter by kept index.
PER_LAYER_LISTS = frozenset(
    {
        "activation_sparsity_pattern",
        "attention_layers",
        "indexer_types",
        "intermediate_size",
        "layer_rope_theta",
        "layer_types",
        "layers_block_type",
        "mlp_layer_types",
        "moe_topk",
        "no_rope_layers",
        "num_attention_heads",
        "num_attention_heads_per_layer",
        "num_experts",
        "num_key_value_heads",
    }
)
# Indices of layers: keep those that stay, renumbered.
INDEX_LISTS = frozenset(
    {
        "attn_layer_indices",
        "cross_attention_layers",
        "full_attn_idxs",
        "hybrid_layer_ids",
        "local_layer_ids",
        "mlp_only_layers",
        "moe_layers",
    }
)
# The first n layers are of another kind: count how many of them stay.
LEADING_COUNTS = ("first_k_dense_replace", "num_dense_layers")
# Lists that may be as long as the model is deep by coincidence; they do not describe layers.
UNRELATED_LISTS = frozenset(
    {
        "architectures",
        "block_types",  # a repeated pattern; see _repeated_pattern
        "eos_token_id",
        "keys_to_ignore_at_inference",
        "mlp_multipliers",
        "mrope_section",
        "ssm_multipliers",
        "suppress_tokens",
    }
)
# Fields that make a family's depth inexpressible, and why.
REFUSED_FIELDS = {
    "hidden_size_per_layer_input": "per-layer embeddings are stored in one tensor for all layers",
    "loop_layer_index_start": "layers attend over the outputs of blocks of layers, by index",
    "n_layers_per_attn_res_block": "layers attend over the outputs of blocks of layers, by index",
    "num_kv_shared_layers": "the last layers borrow keys and values of earlier ones",
    "num_layers_per_stack": "two stacks of layers run in turn",
    "rescale_every": "weights are rescaled in place by layer index; set it to 0 to prune",
    "attn_layers": "the layers are reversible, with two residual streams",
}


def depth_names(config: Any) -> list[str]:
    """Return the fields in which a config class keeps its depth, most specific first."""
    declared = getattr(type(config), "__dataclass_fields__", None) or vars(config)
    names = [name for name in DEPTH_FIELDS if name in declared][:1]
    return names + [name for name in ("num_blocks",) if names and name in declared]


def depth_fields(config: Any, kept: Sequence[int], depth: int) -> dict[str, Any]:
    """Compute the config fields that change when only some layers stay.

    Args:
        config: The config that holds the decoder's depth.
        kept: Kept layers, ascending, 0-based indices of the dense model.
        depth: Depth L of the dense model.

    Returns:
        New values by field name. Nothing is changed.

    Raises:
        UnsupportedModelError: If a field describes layers in a way that cannot be carried over; the
            message names the field and its value.
    """
    values = vars(config)
    fields: dict[str, Any] = dict.fromkeys(depth_names(config), len(kept))
    for name, reason in REFUSED_FIELDS.items():
        if values.get(name):
            raise _refuse(config, name, reason)
    position = {layer: index for index, layer in enumerate(kept)}
    for name, value in values.items():
        if not isinstance(value, list | tuple) or name in UNRELATED_LISTS:
            continue
        if name in INDEX_LISTS:
            fields[name] = [position[layer] for layer in value if layer in position]
        elif name in PER_LAYER_LISTS and len(value) == depth:
            fields[name] = [value[layer] for layer in kept]
        elif len(value) == depth and not name.startswith("_"):
            raise _refuse(
                config,
                name,
                "it has one entry per layer, and ghostlayers does not know its meaning",
            )
    for name in LEADING_COUNTS:
        if isinstance(values.get(name), int):
            fields[name] = sum(layer < values[name] for layer in kept)
    for name, carry_over in SPECIAL_FIELDS.items():
        if values.get(name) is not None:
            fields |= carry_over(config, kept, depth)
    kinds = fields.get("indexer_types")
    if kinds and kinds[0] == "shared":
        raise _refuse(
            config, "indexer_types", "the first kept layer borrows the index of a removed one"
        )
    return fields


def _refuse(config: Any, name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"cannot prune this config safely: {reason} (`{name}` is {getattr(config, name)!r}, "
        f"model_type {config.model_type!r})."
    )


def _sparse_step(config: Any, kept: Sequence[int], _depth: int) -> dict[str, Any]:
    """A step of sparse layers becomes an explicit list of the dense ones."""
    listed = config.mlp_only_layers or []
    dense = [
        index
        for index, layer in enumerate(kept)
        if layer in listed or (layer + 1) % config.decoder_sparse_step or not config.num_experts
    ]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _repeated_pattern(config: Any, kept: Sequence[int], _depth: int) -> dict[str, Any]:
    """A pattern that repeats over the depth becomes an explicit list."""
    pattern = config.block_types
    return {"block_types": [pattern[layer % len(pattern)] for layer in kept]}


def _counted_pattern(config: Any, kept: Sequence[int], _depth: int) -> dict[str, Any]:
    return {"attention_types": [[[config.attention_layers[layer]], 1] for layer in kept]}


def _moe_range(config: Any, kept: Sequence[int], _depth: int) -> dict[str, Any]:
    """Sparse layers in a range at an interval (end inclusive) stay expressible if contiguous."""
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    sparse = [
        index
        for index, layer in enumerate(kept)
        if (layer + 1) % config.moe_layer_interval == 0 and first <= layer <= last
    ]
    if sparse and sparse != list(range(sparse[0], sparse[-1] + 1)):
        raise _refuse(
            config, "moe_layer_interval", "the kept sparse layers are no contiguous range"
        )
    return {
        "moe_layer_interval": 1,
        "moe_layer_start_index": sparse[0] if sparse else len(kept),
        "moe_layer_end_index": sparse[-1] if sparse else len(kept),
    }


def _period(config: Any, name: str, kept: Sequence[int]) -> dict[str, Any]:
    period, offset = getattr(config, f"{name}_period"), getattr(config, f"{name}_offset")
    wanted = [layer % period == offset for layer in kept]
    if not any(wanted):
        return {f"{name}_period": len(kept) + 1, f"{name}_offset": len(kept)}
    for new_period in range(1, len(kept) + 1):
        for new_offset in range(new_period):
            if wanted == [i % new_period == new_offset for i in range(len(kept))]:
                return {f"{name}_period": new_period, f"{name}_offset": new_offset}
    raise _refuse(config, f"{name}_period", "the kept layers follow no period and offset")


def _periods(config: Any, kept: Sequence[int], _depth: int) -> dict[str, Any]:
    """Two kinds of layers at periods; a list stored beside them decides instead."""
    if "layers_block_type" in vars(config):
        return {}
    return _period(config, "attn_layer", kept) | _period(config, "expert_layer", kept)


def _sections(config: Any, kept: Sequence[int], depth: int) -> dict[str, Any]:
    first = config.n_input_layers
    last = first + config.n_recurrent_layers
    edges = {
        "n_input_layers": (0, first),
        "n_recurrent_layers": (first, last),
        "n_output_layers": (last, depth),
    }
    return {name: sum(a <= layer < b for layer in kept) for name, (a, b) in edges.items()}


def _one_based_ids(config: Any, kept: Sequence[int], _depth: int) -> dict[str, Any]:
    """1-based indices of layers whose ordinal in the list seeds hash tables."""
    old = list(config.ple_layer_ids)
    stay = [layer for layer in old if layer - 1 in kept]
    if stay != old[: len(stay)]:
        raise _refuse(config, "ple_layer_ids", "the ordinal of a kept entry would change")
    changes: dict[str, Any] = {"ple_layer_ids": [kept.index(layer - 1) + 1 for layer in stay]}
    return changes if stay else changes | {"number_of_conv_states": 1}


def _depth_scale(config: Any, kept: Sequence[int], depth: int) -> dict[str, Any]:
    """The residual scale is scale_depth / √L: change it so that the quotient stays."""
    return {"scale_depth": config.scale_depth * (len(kept) / depth) ** 0.5}


def _overrides(config: Any, _kept: Sequence[int], _depth: int) -> dict[str, Any]:
    if getattr(config._heterogeneity_spec, "per_layer_overrides", None):
        raise UnsupportedModelError(
            "cannot prune this config safely: `per_layer_config` changes single layers by index "
            f"(model_type {config.model_type!r})."
        )
    return {}


SPECIAL_FIELDS: dict[str, Callable[[Any, Sequence[int], int], dict[str, Any]]] = {
    "decoder_sparse_step": _sparse_step,
    "block_types": _repeated_pattern,
    "attention_types": _counted_pattern,
    "moe_layer_interval": _moe_range,
    "attn_layer_period": _periods,
    "n_recurrent_layers": _sections,
    "ple_layer_ids": _one_based_ids,
    "scale_depth": _depth_scale,
    "_heterogeneity_spec": _overrides,
}


def layer_kinds(config: Any, depth: int) -> list[str] | None:
    """Return each layer's kind where the config names it, such as `full_attention` or `conv`."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == depth:
            return [str(kind) for kind in kinds]
    return None


def protected_layers(config: Any, depth: int) -> tuple[int, ...]:
    """Return layers that no selector may remove.

    In a hybrid model the cache reads the sequence length off an attention layer: the last one
    stays. Cross-attention layers do nothing on text alone, so a score on text calls them free:
    they stay as well.
    """
    protected = set(getattr(config, "cross_attention_layers", None) or ())
    kinds = layer_kinds(config, depth) or []
    attention = [layer for layer, kind in enumerate(kinds) if is_attention(kind)]
    if attention and len(attention) < depth:
        protected.add(attention[-1])
    return tuple(sorted(protected))


def is_attention(kind: str) -> bool:
    """Say whether a layer kind has a key/value cache (linear attention has a state instead)."""
    return ("attention" in kind or "sparse" in kind or kind == "hybrid") and "linear" not in kind
