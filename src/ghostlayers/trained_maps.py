"""A few linear maps of a frozen network that follow a loss; everything else stays as it is.

Legend: P inputs, D outputs of a map, N positions. Rows are positions: z (N, P), y (N, D), W (P, D).
The gradient of W is zᵀ(∂loss/∂y), gathered in float32 whatever the model's dtype.

Channels of one state may differ in size by a factor of a thousand, and an element of W then takes a
change of the large ones to the small ones, or the other way round. So every element is counted in
units of its own: the usual size of its output channel over that of its input channel.
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

# Least size of a channel, in root mean squares over all channels.
LEAST = 1e-4


@dataclass
class TrainedMap:
    """One linear map with a float32 weight, and what its last forward pass saw.

    Attributes:
        module: `nn.Linear` or `Conv1D` whose weight belongs to nobody else.
        start: The weight before the first step, float32, in the module's layout.
        unit: Unit of each element, like `start`.
        moved: What the steps have added, in these units; an optimizer changes it.
        beside_identity: Whether the output of the map is added to its input.
        seen: (z, y) of each call.
    """

    module: nn.Module
    start: Tensor
    unit: Tensor
    moved: nn.Parameter
    beside_identity: bool = False
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, *, beside_identity: bool = False) -> TrainedMap:
        """Give a frozen module a weight of its own and start there, all units 1."""
        old: Any = module.weight
        module.weight = nn.Parameter(old.detach().clone(), requires_grad=False)
        start = old.detach().float().clone()
        moved = nn.Parameter(torch.zeros_like(start))
        return cls(module, start, torch.ones_like(start), moved, beside_identity)

    @property
    def scale(self) -> float:
        """Root mean square of W in its units, of I + W where the map stands beside x."""
        whole = self.start
        if self.beside_identity:
            whole = whole + torch.eye(len(whole)).to(whole)
        return float((whole / self.unit).square().mean().sqrt())

    @property
    def change(self) -> Tensor:
        """What the steps have added, in the module's layout, float32."""
        return self.moved.detach() * self.unit

    def measure_(self, squares: tuple[Tensor, Tensor]) -> None:
        """Set the units.

        Args:
            squares: (P,) and (D,) float32, sums of squares of the channels of z and y over tokens
                of length 1.
        """
        inputs, outputs = (_sizes(each).to(self.start) for each in squares)
        if self.beside_identity:
            outputs = inputs  # y is added to z
        unit = inputs[:, None].reciprocal() * outputs
        self.unit = unit if isinstance(self.module, Conv1D) else unit.T.contiguous()

    @torch.no_grad()
    def write_(self) -> None:
        """Round the weight into the module."""
        stored: Any = self.module.weight
        stored.copy_(self.start + self.change)

    def take_gradient_(self, outputs: Sequence[Tensor], count: int) -> None:
        """Set the gradient of `moved`; the record of the forward pass is used up.

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
        gradient = gradient if isinstance(self.module, Conv1D) else gradient.T
        self.moved.grad = gradient * self.unit


def _sizes(squares: Tensor) -> Tensor:
    """Return root mean squares over that of all channels, none of them 0."""
    mean = squares.mean()
    sizes = (squares / mean).sqrt() if mean > 0 else torch.ones_like(squares)
    return sizes.clamp(min=LEAST)


class ChannelSquares:
    """Sums of squares of the channels that enter and leave maps, over tokens of length 1.

    They are float32 on the device of the model, which need not have float64 (MPS has none).
    """

    def __init__(self, maps: Sequence[TrainedMap]) -> None:
        self.maps = maps
        self.sums: list[list[Tensor]] = [[] for _ in maps]

    def take_(self) -> None:
        """Add what the last forward pass saw; its record is used up."""
        for trained, sums in zip(self.maps, self.sums, strict=True):
            for call in trained.seen:
                rows = [_of_length_1(part.detach().flatten(0, -2).float()) for part in call]
                found = [part.square().sum(dim=0) for part in rows]
                sums[:] = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
            trained.seen.clear()

    def measure_(self) -> None:
        """Set the units of all maps."""
        for trained, sums in zip(self.maps, self.sums, strict=True):
            if sums:
                trained.measure_((sums[0], sums[1]))


def _of_length_1(rows: Tensor) -> Tensor:
    least = torch.finfo(rows.dtype).tiny
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=least)
    return scaled


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
        # Units are measured by each process: they may differ as gradients do.
        trained.unit = distributed.broadcast_(trained.unit.contiguous(), 0)
        trained.moved.copy_(distributed.broadcast_(trained.moved.detach().contiguous(), 0))
        trained.write_()
