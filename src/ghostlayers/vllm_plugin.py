"""What vLLM runs at its start, in every process: it then loads our checkpoints by itself.

The entry point `vllm.general_plugins` of the package names `register`. Checkpoints with operators
then need no `trust_remote_code`; they run on vLLM's Transformers backend, at the speed of its
kernels. Stock checkpoints (no operator, or folded) do not need this: vLLM has classes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BACKEND = "vllm.model_executor.models.transformers"
# Fields by which vLLM tells a mixture of experts from a dense model.
EXPERT_FIELDS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def register() -> None:
    """Register the config of our checkpoints, and the class that runs each architecture."""
    from vllm import ModelRegistry

    from .registration import register as register_config

    register_config()
    for name, backend in backend_classes():
        ModelRegistry.register_model(name, f"{BACKEND}:{backend}")


def backend_classes() -> Iterator[tuple[str, str]]:
    """Yield architecture names of checkpoints with operators, and their class in the backend.

    Left out are families where a checkpoint's own config decides between experts and none, and
    those of several towers: with `trust_remote_code` vLLM decides that by itself.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type, named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if model_type not in CONFIG_MAPPING:
            continue
        backend = _backend_class(CONFIG_MAPPING[model_type])
        for name in (named,) if isinstance(named, str) else named:
            if backend is not None:
                yield f"Ghost{name}", backend


def _backend_class(config: Any) -> str | None:
    if {"text_config", "decoder", "generator"} & set(config.sub_configs):
        return None
    parts = config.sub_configs.values()
    if any(hasattr(part, field) for part in parts for field in EXPERT_FIELDS):
        return None
    names = {n for field in EXPERT_FIELDS for n in (field, config.attribute_map.get(field, field))}
    counts = [getattr(config, name) for name in names if hasattr(config, name)]
    if not counts:
        return "TransformersForCausalLM"
    return "TransformersMoEForCausalLM" if all(counts) else None


__all__ = ["backend_classes", "register"]
