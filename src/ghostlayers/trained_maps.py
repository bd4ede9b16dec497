"""A few linear maps of a frozen network that follow a loss; everything else stays as it is.

Legend: P inputs, D outputs of a map, N positions. Rows are positions: z (N, P), y (N, D), W (P, D).
The gradient of W is zᵀ(∂loss/∂y), gathered in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from . import distributed


@dataclass
class TrainedMap:
    """One linear map with a float32 weight, and what its last forward pass saw.

    Attributes:
        module: `nn.Linear` or `Conv1D` whose weight belongs to nobody else.
        weight: Float32, in the module's layout; an optimizer changes it.
        start: The weight before the first step.
        scale: Root mean square of the weight, that of I + W where the map stands beside x.
        seen: (z, y) of each call.
    """

    module: nn.Module
    weight: nn.Parameter
    start: Tensor
    scale: float
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, *, beside_identity: bool = False) -> TrainedMap:
        """Give a frozen module a weight of its own and start there.

        Args:
            module: The map.
            beside_identity: Whether its output is added to its input.
        """
        old: Any = module.weight
        module.weight = nn.Parameter(old.detach().clone(), requires_grad=False)
        start = old.detach().float().clone()
        whole = start + torch.eye(len(start)).to(start) if beside_identity else start
        scale = float(whole.square().mean().sqrt())
        return cls(module, nn.Parameter(start.clone()), start, scale)

    @property
    def change(self) -> Tensor:
        """What the steps have added, in the module's layout, float32."""
        return self.weight.detach() - self.start

    @torch.no_grad()
    def write_(self) -> None:
        """Round the weight into the module."""
        stored: Any = self.module.weight
        stored.copy_(self.weight)

    def take_gradient_(self, outputs: Sequence[Tensor], count: int) -> None:
        """Set the weight's gradient; the record of the forward pass is used up.

        Args:
            outputs: ∂loss/∂y of each call.
            count: What the loss is divided by.
        """
        rows = [
            (z.flatten(0, -2).float(), g.flatten(0, -2).float())
            for (z, _), g in zip(self.seen, outputs, strict=True)
        ]
        self.seen.clear()
        # The gradient is taken in the model's dtype up to here, and summed in float32.
        gradient = torch.stack([z.T @ g for z, g in rows]).sum(dim=0) / count
        self.weight.grad = gradient if isinstance(self.module, Conv1D) else gradient.T.contiguous()


@contextmanager
def recording(maps: Sequence[TrainedMap]) -> Iterator[None]:
    """Record what enters and leaves the maps; what leaves them carries gradients."""

    def recorder(trained: TrainedMap) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            if not y.requires_grad:
                y.requires_grad_(True)
            trained.seen.append((args[0].detach(), y))
            return y.clone()  # a layer may write into what it gets

        return hook

    handles = [trained.module.register_forward_hook(recorder(trained)) for trained in maps]
    try:
        with torch.enable_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for trained in maps:
            trained.seen.clear()


def take_gradients_(loss: Tensor, maps: Sequence[TrainedMap], count: int) -> None:
    """Set the gradients of loss / count in all maps."""
    outputs = [y for trained in maps for _, y in trained.seen]
    found = list(torch.autograd.grad(loss, outputs))
    for trained in maps:
        calls = len(trained.seen)
        trained.take_gradient_(found[:calls], count)
        found = found[calls:]


@torch.no_grad()
def take_weights_of_first_(maps: Sequence[TrainedMap]) -> None:
    """Give all processes of a session the first one's weights: gradients of a GPU may differ."""
    if distributed.size() == 1:
        return
    for trained in maps:
        own = trained.weight.detach().contiguous()
        trained.weight.copy_(distributed.broadcast_(own, 0))
        trained.write_()
