"""Which parameters a distillation trains, and a working copy of the model to train them in.

The working copy shares the storage of every frozen weight with the model given in; trained
parameters are float32 copies of their own, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .changed_weights import change_weights_, layers_prefix
from .decoder import frozen_copy, share_tensors
from .errors import GhostlayersError, RequirementError, UnsupportedModelError
from .finetune_config import FinetuneConfig
from .modeling_ghostlayers import GhostOperator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEFT_MISSING = (
    "`train` lora needs peft, which is not installed. Run: python -m pip install "
    "'ghostlayers[finetune]'"
)


def check_trainable(config: FinetuneConfig, *, has_operators: bool, what: str) -> None:
    """Check what can be said before any weight is loaded.

    Raises:
        GhostlayersError: If operators are to be trained and there are none.
        RequirementError: If adapters are to be trained and peft is not installed.
    """
    if config.train == "operators" and not has_operators:
        raise GhostlayersError(
            f"`train` is 'operators', but {what} has none. Use `train` lora (--train lora), or "
            "prune with an attached operator."
        )
    if config.train == "lora":
        try:
            import peft  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "peft":
                raise
            raise RequirementError(PEFT_MISSING) from error


def operator_parameters(model: nn.Module) -> list[str]:
    """Name the operators' parameters that may be trained: all but the fixed sink direction."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, GhostOperator)
        for name, parameter in module.named_parameters()
        if name != "sink_direction" and parameter.is_floating_point()
    ]


def linear_maps(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Find the decoder layers' linear maps by their class, operators and tied weights left out.

    Experts that are fused in one parameter are no such maps.
    """
    from transformers.pytorch_utils import Conv1D

    holders: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    prefix = layers_prefix(model)
    return {
        path: module
        for path, module in model.named_modules()
        if path.startswith(prefix)
        and isinstance(module, nn.Linear | Conv1D)
        and not hasattr(module, "_ghost_part")
        and holders[id(module.weight)] == 1
    }


@dataclass
class WorkingCopy:
    """A model under training.

    Attributes:
        net: What is run: the copy, or the copy inside a peft model.
        operators: Names of the operators' parameters in the model given in.
        maps: Names of the maps that carry adapters.
        parameters: The trained parameters by their name in `net`, float32.
    """

    net: nn.Module
    operators: tuple[str, ...]
    maps: tuple[str, ...]
    parameters: dict[str, nn.Parameter]

    def state(self) -> dict[str, Tensor]:
        """Copy the trained values to the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def load_(self, state: dict[str, Tensor]) -> None:
        """Set the trained values."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])

    def changed_values(self) -> dict[str, Tensor]:
        """Return the new values by their names in the model given in; adapters are merged.

        Adapters cannot be trained on after that.
        """
        net: Any = self.net
        if self.maps:
            # safe_merge adds to a copy: the storage is shared with the model given in.
            net = net.merge_and_unload(safe_merge=True)
        names = [*self.operators, *(f"{path}.weight" for path in self.maps)]
        return {name: net.get_parameter(name).detach() for name in names}


def working_copy(model: PreTrainedModel, config: FinetuneConfig, *, autocast: bool) -> WorkingCopy:
    """Make the copy to train in; `model` stays as it is.

    Without autocast to bfloat16, or where the model is in float16, the copy is float32 throughout.

    Raises:
        UnsupportedModelError: If there is nothing to train, or a weight is not in memory.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError("a weight is offloaded. Load the model in memory to train it.")
    net: Any = frozen_copy(model)
    if not autocast or model.dtype not in (torch.bfloat16, torch.float32):
        net.float()
    operators = tuple(operator_parameters(net))
    for name in operators:
        path, _, attribute = name.rpartition(".")
        # Trained values are copies, or training would reach into the model given in.
        value = net.get_parameter(name).detach().to(torch.float32, copy=True)
        setattr(net.get_submodule(path), attribute, nn.Parameter(value))
    trained = {name: net.get_parameter(name) for name in operators}
    maps: tuple[str, ...] = ()
    if config.train == "lora":
        found = linear_maps(net)
        if not found:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no linear map in its decoder layers that an adapter "
                "can be put on. Use `train` operators."
            )
        net, maps = _add_adapters(net, found, config), tuple(found)
        for parameter in trained.values():
            parameter.requires_grad_(True)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    if not parameters:
        raise UnsupportedModelError(f"{type(model).__name__} has no operator. Use `train` lora.")
    return WorkingCopy(net, operators, maps, parameters)


def _add_adapters(net: Any, maps: dict[str, nn.Module], config: FinetuneConfig) -> Any:
    """Wrap the model by peft; the adapters' product starts at zero."""
    from peft import LoraConfig, get_peft_model

    transposed = not all(isinstance(module, nn.Linear) for module in maps.values())
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(maps),
        fan_in_fan_out=transposed,
    )
    return get_peft_model(net, settings).eval()


def with_changes(
    model: PreTrainedModel, values: dict[str, Tensor]
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Return the model with new values, in its own dtype; all other tensors are shared.

    Returns:
        The new model, and the names that changed.
    """
    changed = share_tensors(model)
    return changed, change_weights_(changed, values)


@contextmanager
def own_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch; the global random state is as it was afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
