"""Tiny random models, one per model type of transformers' causal-LM mapping.

Every config comes from the family's own config class. ``_GENERIC`` holds small values for
field names that many families share; a family receives the ones its class declares. What
they cannot express (a list of layer types, dimensions that must agree) is in ``_EXTRAS``.
Families that mix layer types keep at least two types within the default eight layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Model types that ``AutoModelForCausalLM`` cannot build, or that do not run on token ids.
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "the vision tower needs the timm package",
    "gemma4_assistant": "forward needs hidden states and keys/values of a target model",
    "gemma4_unified_assistant": "forward needs hidden states and keys/values of a target model",
    "musicgen": "the mapping pairs a composite config with a class that needs its decoder part",
    "musicgen_melody": "as musicgen",
}

# Names under which config classes keep their depth; every one present is set.
_DEPTH = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
)

_GENERIC: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "decoder_vocab_size"), 256),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim"), 64),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_heads",
            "attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(
        (
            "intermediate_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_dim",
            "n_inner",
            "ffn_hidden_size",
            "dense_intermediate_size",
            "prefix_dense_intermediate_size",
        ),
        128,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "n_group",
            "topk_group",
        ),
        1,
    ),
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_key_value_heads": 2,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "mamba_expand": 2,
    "expand": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "state_size": 16,
    "ssm_state_size": 16,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}


def _cycle(*values: Any) -> Callable[[int], list[Any]]:
    """Return a function that repeats ``values`` up to the depth it is given."""
    return lambda depth: [values[index % len(values)] for index in range(depth)]


_SLIDING_FULL = _cycle("sliding_attention", "full_attention")


def _first_dense(depth: int) -> list[str]:
    """Return MLP layer types of which only the first two are dense."""
    return ["dense"] * 2 + ["sparse"] * (depth - 2)


_SWA_HEADS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
_INKLING = {**_SWA_HEADS, "d_rel": 4, "rel_extent": 64, "log_scaling_n_floor": 64}
_DSA_HEADS = {"num_key_value_heads": 4}
_DOTS3 = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
    "shared_experts_intermediate_size": 32,
}
_QWEN4 = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [2, 5],
    "ple_embed_dim": 64,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_GEMMA_SHARED = {"layer_types": _SLIDING_FULL, "num_kv_shared_layers": 3}
_NO_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_VISION = {"depth": 2, "num_heads": 4, "image_size": 32, "patch_size": 16, "out_hidden_size": 64}

# What the generic arguments cannot express. A callable is given the depth; a dict under
# the name of a sub-config holds extras for that sub-config.
_EXTRAS: dict[str, dict[str, Any]] = {
    "axk2": _DSA_HEADS,
    "bamba": {"attn_layer_indices": [2, 5]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "vocab_size": 260,
        "patcher_config": {"vocab_size": 260, "num_hidden_layers": 2},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": 64, "num_hidden_layers": 1},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": 64, "num_hidden_layers": 2},
    },
    "codegen": {"rotary_dim": 8},
    "cohere2_moe": {"mlp_layer_types": _first_dense},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": _cycle("sliding_attention", "sliding_attention", "full_attention"),
    },
    "cpmant": {
        "dim_head": 16,
        "dim_ff": 128,
        "prompt_length": 4,
        "prompt_types": 4,
        "segment_types": 4,
    },
    "ctrl": {"dff": 128},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "deepseek_v32": _DSA_HEADS,
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_key_value_heads": 1,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dory": {"n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2},
    "dots1": {"max_window_layers": 4},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "mlp_layer_types": _cycle("sparse"),
        },
        "audio_config": {"adapter_out_dim": 64, "adapter_input_size": 64},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": _GEMMA_SHARED,
    "gemma4": {
        "text_config": {"global_head_dim": 32},
        "vision_config": {"position_embedding_size": 64, "num_hidden_layers": 2},
    },
    "gemma4_assistant": {"text_config": _NO_PER_LAYER_INPUT},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified": {
        "text_config": {"global_head_dim": 32},
        "vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm_moe_dsa": {**_DSA_HEADS, "indexer_types": _cycle("full", "shared")},
    "got_ocr2": {
        "vision_config": {
            "mlp_dim": 64,
            "output_channels": 16,
            "image_size": 64,
            "num_hidden_layers": 2,
            "global_attn_indexes": [1],
        }
    },
    "gpt_neo": {
        "attention_types": lambda depth: [[["global", "local"], depth // 2]],
        "window_size": 8,
    },
    "gptj": {"rotary_dim": 8},
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"),
        {"layer_rope_theta": lambda depth: [1e4 * (index + 1) for index in range(depth)]},
    ),
    "granitemoehybrid": {
        "layer_types": _cycle("linear_attention", "linear_attention", "full_attention")
    },
    "hrm_text": {"H_cycles": 1, "L_cycles": 2},
    "hy_v4": _DSA_HEADS,
    "inkling2_loop_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 2,
        "loop_gate_rank": 8,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "inkling2_text": _INKLING,
    "inkling_text": {**_INKLING, "mlp_layer_types": _first_dense},
    "jetmoe": {"kv_channels": 16},
    "laguna": {
        "layer_types": _cycle("full_attention", "sliding_attention"),
        "num_attention_heads_per_layer": _cycle(4, 8),
    },
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), {"layer_types": _cycle("conv", "conv", "full_attention")}
    ),
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": _SLIDING_FULL, "mlp_layer_types": _first_dense},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "layer_types": _cycle("full_attention", "minimax_m3_sparse"),
        "mlp_layer_types": _first_dense,
    },
    "ministral": {"layer_types": _SLIDING_FULL},
    "mllama": {"text_config": {"cross_attention_layers": [2, 5]}},
    "moshi": {"sliding_window": 64},
    "nemotron_h": {
        "layers_block_type": _cycle("linear_attention", "moe", "full_attention", "mlp"),
        "moe_latent_size": 32,
    },
    "phi4_multimodal": {
        "vision_config": {"num_hidden_layers": 2, "image_size": 28, "crop_size": 28},
        "audio_config": {
            "num_blocks": 2,
            "ext_pw_out_channel": 64,
            "nemo_conv_channels": 16,
            "depthwise_separable_out_channel": 64,
            "input_size": 16,
        },
    },
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3"), {"use_sliding_window": True, "max_window_layers": 4}
    ),
    "qwen4_exp": {"text_config": _QWEN4, "vision_config": _VISION},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "attn_layers": _cycle("local", "lsh"),
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (16, 32),
        "feed_forward_size": 128,
        "attention_head_size": 16,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 16,
        "shape_vocab_size": 16,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "rwkv": {"attention_hidden_size": 64},
    "xlm": {"causal": True},
    "xlnet": {"d_inner": 128, "d_head": 16, "attn_type": "uni"},
    "xlstm": {"embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": _cycle("linear_attention", "linear_attention", "hybrid"),
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def _sub_config_class(config_class: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig]:
    """Resolve the class of a nested config, also where it is declared as AutoConfig."""
    spec = config_class.sub_configs_defaults.get(name)
    if spec is not None and spec.model_type is not None:
        return CONFIG_MAPPING[spec.model_type]
    return config_class.sub_configs[name]


def _build(
    config_class: type[PreTrainedConfig], num_layers: int, extras: dict[str, Any]
) -> PreTrainedConfig:
    """Build a config class from the generic arguments it knows, then from its extras."""
    names = {field.name for field in fields(config_class)}
    wanted = {**_GENERIC, **dict.fromkeys(_DEPTH, num_layers)}
    if "qk_rope_head_dim" in names:
        wanted["head_dim"] = wanted["qk_rope_head_dim"]
    kwargs = {name: value for name, value in wanted.items() if name in names}
    for name in config_class.sub_configs:
        kwargs[name] = _build(
            _sub_config_class(config_class, name), num_layers, extras.get(name, {})
        )
    for name, value in extras.items():
        if name not in config_class.sub_configs:
            kwargs[name] = value(num_layers) if callable(value) else value
    return config_class(**kwargs)


def tiny_config(model_type: str, num_layers: int = 8, **overrides: Any) -> PreTrainedConfig:
    """Build a small config with the config class of a model type.

    Args:
        model_type: A key of transformers' causal-LM mapping.
        num_layers: Depth of the decoder (of every tower of a composite config).
        **overrides: Fields that replace the small defaults; a dict for a sub-config.

    Returns:
        The config of the whole model, so with a nested text config where the family has one.
    """
    extras = {**_EXTRAS.get(model_type, {}), **overrides}
    return _build(CONFIG_MAPPING[model_type], num_layers, extras)


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Re-draw every matrix from N(0, 0.1) and add N(0, 0.2) to every norm weight.

    The default initialisation (0.02, all-one norms) hides most layer mix-ups. State-space
    parameters (``A_log``, ``dt_bias``, ``D``) and frozen tables keep their initial values.

    Args:
        model: Model whose parameters are changed in place.
        seed: Seed of the draws; the global random state is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if not parameter.requires_grad or "A_log" in name:
                continue
            if parameter.dim() >= 2:
                parameter.copy_(0.1 * noise)
            elif re.search(r"norm|(^|[._])ln(_|\d|\.)", name.lower()):
                parameter.add_(0.2 * noise)
        for module in model.modules():
            # Loading re-zeroes this row in some families, and trained checkpoints have it so.
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0


def tiny_model(
    model_type: str, num_layers: int = 8, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Build a small random causal LM in eval mode.

    Args:
        model_type: A key of transformers' causal-LM mapping that is not in ``UNBUILDABLE``.
        num_layers: Depth of the decoder.
        seed: Seed of the weights.
        **overrides: Config fields, see `tiny_config`.

    Returns:
        The model that ``AutoModelForCausalLM`` picks for the config, with large weights.
    """
    config = tiny_config(model_type, num_layers, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    return model.eval()
