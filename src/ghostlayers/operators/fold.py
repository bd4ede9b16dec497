"""Fold: refit the output maps of the layer before a cut, in closed form. No parameter is added.

D* = argmin Σ w‖zD − Δ‖² + λ·s‖D‖², Δ = y − x, over all tokens, with w = 1/max(‖x‖, ‖y‖)². z are
the real inputs of the maps, D is the change of their weights (the ridge pulls towards the present
ones), and s is the mean of the Gram matrix's diagonal over a map's features. λ is the smallest of
the grid whose error on held-out windows is within 2 % of the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..feature_moments import FeatureMoments, block_scale

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# The attention map is solved for together with the MLP map and then kept alone. What its change
# does to the MLP's input is not in these moments: a heavier ridge keeps that small.
JOINT_RIDGES = (1.0, 3.0, 10.0)
TOLERANCE = 1.02


def solve_fold(moments: FeatureMoments, ridge: float, sizes: Sequence[int]) -> Tensor:
    """Solve (G + λ·diag(s)) D = R; s is the mean diagonal of each block of features, (K, C)."""
    scale = block_scale(moments.gram, sizes)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    system = moments.gram.clone()
    system.diagonal().add_(ridge * scale)
    factor = torch.linalg.cholesky(system, out=system)
    d: Tensor = torch.cholesky_solve(moments.cross, factor)
    return d


def fit_fold(
    fit: FeatureMoments,
    held_out: FeatureMoments,
    *,
    ridge: float = 0.0,
    grid: Sequence[float] = RIDGES,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor | None, float, dict[float, float]]:
    """Choose the ridge on held-out tokens.

    Args:
        fit: Moments of the fitting part.
        held_out: Moments of the held-out part.
        ridge: λ; 0 chooses it.
        grid: The choice.
        sizes: Features of each block; None makes one block.

    Returns:
        D (K, C) float64 fitted without the held-out tokens (None if one part is empty), the ridge,
        and the held-out relative errors. Call `solve_fold` with the ridge for the final D.
    """
    sizes = sizes or [len(fit.gram)]
    if not fit.num_tokens or not held_out.num_tokens:
        return None, ridge or max(grid), {}
    solved: dict[float, Tensor] = {}
    errors: dict[float, float] = {}
    for value in [ridge] if ridge else grid:
        d = solve_fold(fit, value, sizes)
        solved[value], errors[value] = d.to("cpu"), held_out.relative_error(d)
    best = min(errors.values())
    chosen = min(value for value, error in errors.items() if error <= TOLERANCE * best)
    return solved[chosen].to(fit.gram.device), chosen, errors


def rounded_weight(weight: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Add a change to a weight in its own dtype.

    Args:
        weight: The present weight, in its stored layout.
        change: Float64 of the same layout.

    Returns:
        The new weight, and the change that rounding left of it in float64.
    """
    present = weight.detach().to(change.device, torch.float64)
    new = (present + change).to(weight.dtype)
    return new, new.double() - present


def fold_record(ridge: float, errors: dict[float, float]) -> dict[str, Any]:
    """Return JSON values of a choice of ridge."""
    return {"ridge": ridge, "ridge_errors": {f"{value:g}": e for value, e in errors.items()}}
