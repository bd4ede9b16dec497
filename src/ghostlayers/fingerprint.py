"""Tell models apart cheaply: by config and by a sample of every tensor.

The sample is evenly spread over each parameter and persistent buffer: another model, another
revision or a fine-tuned copy has another fingerprint, at the cost of reading a few elements of each
tensor. A change of single elements between the sampled ones is not seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import distributed
from .offload import align_hooks

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
    into which it was loaded only by the rounding of its weights. Of offloaded tensors, which lie
    mapped in files, only the pages of those elements are read, and no device is used.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            if tensor.is_meta:
                tensor = _offloaded(module, name)
            digest.update(f"{path}.{name}{tuple(tensor.shape)}".encode())
            digest.update(_sample(tensor))
    return digest.hexdigest()


def _offloaded(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return an offloaded tensor from where it lies."""
    stores = [hook.weights_map for hook in align_hooks(module) if hook.offload]
    tensor: torch.Tensor = stores[0][name]
    return tensor


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


def shared_fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Return the `fingerprint` of the first process' model, on all processes; one reads weights."""
    found: dict[str, str] = {}
    with distributed.section():
        if distributed.rank() == 0:
            found = fingerprint(model)
    return distributed.same(found)


def function_key(function: Callable[..., Any]) -> Any:
    """Return JSON values that tell functions of this package apart, and their bound arguments."""
    if isinstance(function, partial):
        return [function_key(function.func), *function.args, function.keywords]
    return function.__qualname__
