"""Weights that accelerate keeps outside the modules: on disk, or in main memory for a GPU.

An offloaded parameter is a meta tensor; the hook of its module fetches the value for each call and
drops it afterwards. Here a whole layer is fetched once for many calls, single values are read, and
a module whose weights change is taken out of the offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def align_hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's device hooks of a module itself; few modules have more than one."""
    hook = vars(module).get("_hf_hook")
    found = getattr(hook, "hooks", [hook])
    return [each for each in found if hasattr(each, "weights_map")]


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate fetches a weight of a module, or of one inside it, for each call."""
    return any(hook.offload for part in module.modules() for hook in align_hooks(part))


def execution_device(module: nn.Module) -> torch.device:
    """Return the device on which a module computes.

    It is that of its first own parameter; of an offloaded one the device that its hook names, of a
    module without hooks the device that is left, the CPU.
    """
    own = next((p for p in module.parameters(recurse=False)), None)
    if own is not None and not own.is_meta:
        return own.device
    for part in module.modules():
        for hook in align_hooks(part):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return torch.device("cpu")


@contextmanager
def loaded(*modules: nn.Module) -> Iterator[None]:
    """Fetch the offloaded weights of modules once, and drop them at the end.

    In between the modules run as often as needed without reading anything; models must not be
    copied meanwhile, since the copy would keep the weights.
    """
    with ExitStack() as stack:
        for part in dict.fromkeys(part for module in modules for part in module.modules()):
            for hook in align_hooks(part):
                if hook.offload:
                    hook.pre_forward(part)
                    hook.offload = False
                    stack.callback(_drop, hook, part)
        yield


def _drop(hook: Any, module: nn.Module) -> None:
    hook.offload = True
    hook.post_forward(module, None)


def stored_tensor(root: nn.Module, path: str) -> Tensor:
    """Return the value of a parameter, read from where it is offloaded to if need be.

    Args:
        root: A module.
        path: Dotted path of the parameter inside it.

    Returns:
        The tensor without gradient; it lives as long as the caller holds it.
    """
    owner, _, name = path.rpartition(".")
    module = root.get_submodule(owner)
    if not module.get_parameter(name).is_meta:
        return module.get_parameter(name).detach()
    with ExitStack() as stack:
        for hook in align_hooks(module):
            hook.pre_forward(module)
            stack.callback(hook.post_forward, module, None)
        return module.get_parameter(name).detach()


def pin_(module: nn.Module) -> None:
    """Keep the own weights of an offloaded module in memory from now on, where it computes."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    hooks = [hook for hook in align_hooks(module) if hook.offload]
    if not hooks:
        return
    remove_hook_from_module(module)
    for hook in hooks:
        for name, tensor in list(module.named_parameters(recurse=False)):
            if tensor.is_meta:
                value = hook.weights_map[name]
                set_module_tensor_to_device(module, name, hook.execution_device, value=value)


def shared_stores(model: nn.Module) -> dict[int, Any]:
    """Return what copies of a model must share, as a memo of `copy.deepcopy`."""
    hooks = [hook for part in model.modules() for hook in align_hooks(part)]
    stores = [store for hook in hooks for store in (hook.weights_map, hook.tied_params_map)]
    return {id(store): store for store in stores if store is not None}


def largest_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the size of the largest of some modules' parameters together, in bytes."""
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in modules]
    return max(sizes, default=0)


@contextmanager
def replaced_forwards(changes: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of modules; what accelerate put there before comes back."""
    with ExitStack() as stack:
        for module, forward in changes.items():
            before = vars(module).get("forward")
            if before is None:
                stack.callback(delattr, module, "forward")
            else:
                stack.callback(setattr, module, "forward", before)
            module.forward = forward
        yield
