"""Tell models apart cheaply: by config and by a sample of every tensor.

The sample is evenly spread over each parameter and persistent buffer: another model, another
revision or a fine-tuned copy has another fingerprint, at the cost of reading a few elements of each
tensor. A change of single elements between the sampled ones is not seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED_ELEMENTS = 64
# What a config says about files, versions and precision: not about what the model computes.
VOLATILE_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def config_sha256(config: Any) -> str:
    """Return a hash over the fields of a config that describe the model."""
    text = json.dumps(_stable(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _stable(v) for k, v in value.items() if k not in VOLATILE_FIELDS}
    return [_stable(item) for item in value] if isinstance(value, list | tuple) else value


@torch.no_grad()
def weights_sha256(model: PreTrainedModel) -> str:
    """Return a hash over name, shape and sampled elements of every stored tensor.

    The elements are hashed as float32 (integers as int64): the hash of a model depends on the dtype
    into which it was loaded only by the rounding of its weights.
    """
    from accelerate.utils import align_module_device

    digest = hashlib.sha256()
    for path, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        own = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        }
        offloaded = any(tensor.is_meta for tensor in own.values())
        with align_module_device(module) if offloaded else nullcontext():
            for name in own:
                tensor = getattr(module, name)
                digest.update(f"{path}.{name}{tuple(tensor.shape)}".encode())
                digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].cpu()
    wide = some.to(torch.float32 if some.is_floating_point() else torch.int64)
    return wide.numpy().tobytes()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Return a hash over dtype, shape and bytes of a tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Return `config_sha256` and `weights_sha256` of a model."""
    return {
        "config_sha256": config_sha256(model.config),
        "weights_sha256": weights_sha256(model),
    }


def function_key(function: Callable[..., Any]) -> Any:
    """Return JSON values that tell functions of this package apart, and their bound arguments."""
    if isinstance(function, partial):
        return [function_key(function.func), *function.args, function.keywords]
    return function.__qualname__
