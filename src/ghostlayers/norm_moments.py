"""Second moments of RMS-normalised states at a boundary, of a relative fit.

Legend as in `moments`; z = x / sqrt(mean(x²) + ε) is x behind an RMSNorm with unit weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .channel_moments import moments_maker
from .decoder import text_config
from .moments import BoundaryMoments

DEFAULT_EPS = 1e-6


class NormMoments(BoundaryMoments):
    """Moments of z and Δ, each token weighted with 1/max(‖x‖, ‖y‖)².

    `gram` is Σ w zᵀz, `cross` Σ w zᵀΔ, the squares are those of √w·Δ and √w·y: so
    `relative_error` is that of y = x + z M. A token that is massive on either side of the cut,
    whose Δ no map of z can give, weighs no more than any other.

    Attributes:
        norm_eps: ε. Not summed where moments are.
    """

    norm_eps: float

    @classmethod
    def zeros(
        cls, size: int, device: torch.device | str = "cpu", norm_eps: float = DEFAULT_EPS
    ) -> NormMoments:
        """Return empty moments for hidden size `size`."""
        empty = BoundaryMoments.zeros(size, device)
        moments = cls(empty.gram, empty.cross)
        moments.norm_eps = norm_eps
        return moments

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add tokens; see `BoundaryMoments.add`."""
        x = x.to(self.gram.device, torch.float64)
        y = y.to(self.gram.device, torch.float64)
        largest = torch.maximum(x.norm(dim=1, keepdim=True), y.norm(dim=1, keepdim=True))
        weight = torch.where(largest > 0, 1.0 / largest, 0.0)
        z, delta = weight * rms_normalised(x, self.norm_eps), weight * (y - x)
        self.gram.addmm_(z.T, z)
        self.cross.addmm_(z.T, delta)
        self.delta_squares += float(delta.square().sum())
        self.target_squares += float((weight * y).square().sum())
        self.num_tokens += x.shape[0]

    def __add__(self, other: BoundaryMoments) -> NormMoments:
        """Return the moments of both sets of tokens together."""
        both = NormMoments(**vars(super().__add__(other)))
        both.norm_eps = self.norm_eps
        return both


def rms_normalised(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def norm_epsilon(config: Any) -> float:
    """Return what the model's own RMSNorms add to the mean square; 1e-6 if it has none."""
    found = getattr(text_config(config), "rms_norm_eps", None)
    return float(found) if isinstance(found, float) and found > 0 else DEFAULT_EPS


def moments_of_operator(operator: str, config: Any) -> Callable[..., Any] | None:
    """Return what makes the empty moments of an operator in a model with this config.

    None if those of `moments` serve it.
    """
    if operator == "ghost-norm":
        return partial(NormMoments.zeros, norm_eps=norm_epsilon(config))
    return moments_maker(operator)
