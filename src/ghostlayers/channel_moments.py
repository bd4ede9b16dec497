"""Mean absolute values per channel at a boundary, as they are or after a rotation.

Legend: N counted tokens, C hidden size. X (N, C) enters the boundary, Y (N, C) should leave it; H
(C, C) is the identity or the matrix of `rotation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .exact_sums import SHARED
from .moments import BoundaryMoments
from .rotation import rotation_matrix


@dataclass
class ChannelMoments:
    """Sums of absolute values of one set of tokens at one boundary.

    Attributes:
        second: Second moments of the same tokens: they give the error of any operator as it is
            stored, rounding included.
        input_sums: (C,) float64, Σ|XH| over the tokens.
        target_sums: (C,) float64, Σ|YH|.
        rotation: (C, C) float64, H; None is the identity.
    """

    second: BoundaryMoments
    input_sums: Tensor
    target_sums: Tensor
    rotation: Tensor | None = field(default=None, metadata={SHARED: True})

    @classmethod
    def zeros(
        cls, size: int, device: torch.device | str = "cpu", rotation: Tensor | None = None
    ) -> ChannelMoments:
        """Return empty moments for hidden size `size`."""
        sums = torch.zeros(2, size, dtype=torch.float64, device=device)
        return cls(BoundaryMoments.zeros(size, device), sums[0], sums[1], rotation)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N."""
        return self.second.num_tokens

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add tokens.

        Args:
            x: (n, C), states that enter the boundary; cast to float64 before anything is summed.
            y: (n, C), states that should leave it.
        """
        x = x.to(self.input_sums.device, torch.float64)
        y = y.to(self.input_sums.device, torch.float64)
        self.second.add(x, y)
        self.add_sums(x, y)

    def add_sums(self, x: Tensor, y: Tensor) -> None:
        """Add tokens to the sums alone: where others keep the second moments; float64 states."""
        for state, sums in ((x, self.input_sums), (y, self.target_sums)):
            turned = state if self.rotation is None else state @ self.rotation
            sums += turned.abs().sum(dim=0)

    def __add__(self, other: ChannelMoments) -> ChannelMoments:
        """Return the moments of both sets of tokens together."""
        return self.with_second(self.second + other.second).plus_sums(other)

    def with_second(self, second: BoundaryMoments) -> ChannelMoments:
        """Return the same sums beside second moments that others keep."""
        return replace(self, second=second)

    def plus_sums(self, other: ChannelMoments) -> ChannelMoments:
        """Return the sums of both sets of tokens; the second moments stay."""
        device = self.input_sums.device
        return replace(
            self,
            input_sums=self.input_sums + other.input_sums.to(device),
            target_sums=self.target_sums + other.target_sums.to(device),
        )

    def scale(self) -> Tensor:
        """Return d = Σ|YH| / Σ|XH|, (C,) float64; 1 for a channel that is zero in every X."""
        dead = self.input_sums == 0
        return torch.where(dead, 1.0, self.target_sums / torch.where(dead, 1.0, self.input_sums))

    def num_dead(self) -> int:
        """Number of channels that are zero in every X."""
        return int((self.input_sums == 0).sum())


def rotation_of(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `rotation.rotation_matrix`, (C, C) float64: H Hᵀ = I."""
    return torch.from_numpy(rotation_matrix(size)).to(device)


def rotated_moments() -> Callable[..., ChannelMoments]:
    """Return what makes empty moments after a rotation; all of one device share H."""
    rotations: dict[Any, Tensor] = {}

    def zeros(size: int, device: torch.device | str = "cpu") -> ChannelMoments:
        key = size, str(device)
        if key not in rotations:
            rotations[key] = rotation_of(size, device)
        return ChannelMoments.zeros(size, device, rotations[key])

    return zeros


def moments_maker(operator: str) -> Callable[..., Any] | None:
    """Return what makes the empty moments of an operator; None if those of `moments` serve it."""
    if operator == "linearpatch-rotate":
        return rotated_moments()
    return ChannelMoments.zeros if operator == "linearpatch-diag" else None
