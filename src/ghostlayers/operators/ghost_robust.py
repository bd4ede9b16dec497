"""Ghosted Layers without its two weak points: massive tokens, and absolute instead of relative fit.

M* = argmin Σ_ordinary ‖x M − Δ‖²/‖x‖² + λ·tr(G)/C·‖M‖² with G = Σ xᵀx/‖x‖², so tr(G)/C = N/C: the
fit is relative, and scaling all states changes nothing. Massive tokens (`token_classes`) do not
enter it; where a direction tells them apart they get y = x + their mean Δ, else they count as
ordinary.
λ is the smallest one whose error on held-out windows is within 2 % of the best: squared error
rewards shrinking a prediction, perplexity does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moments import BoundaryMoments, RobustMoments, SplitMoments
from ..token_classes import SinkRule
from . import OperatorFit
from .ghost import fit_warnings, solution_record, solve_ridge, store_map

RIDGES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
TOLERANCE = 1.02


def choose_ridge(
    fit: BoundaryMoments, held_out: BoundaryMoments
) -> tuple[float, Tensor, dict[float, float]]:
    """Choose the ridge on held-out tokens.

    Args:
        fit: Moments of the fitting part.
        held_out: Moments of the held-out part.

    Returns:
        The ridge, M (C, C) float64 fitted with it on the fitting part, and the held-out relative
        error of every ridge tried.
    """
    values, vectors = torch.linalg.eigh(fit.gram)
    scale = float(fit.gram.trace()) / len(values)
    if scale <= 0.0:
        return 0.0, torch.zeros_like(fit.cross), {}
    values, rotated = values.clamp(min=0), vectors.T @ fit.cross
    against = BoundaryMoments(  # the held-out moments in the eigenbasis of G
        vectors.T @ held_out.gram @ vectors,
        vectors.T @ held_out.cross,
        held_out.delta_squares,
        held_out.target_squares,
    )

    def in_eigenbasis(ridge: float) -> Tensor:
        m: Tensor = rotated / (values + ridge * scale)[:, None]
        return m

    errors = {ridge: against.relative_error(in_eigenbasis(ridge)) for ridge in RIDGES}
    best = min(errors.values())
    ridge = min(ridge for ridge, error in errors.items() if error <= TOLERANCE * best)
    return ridge, vectors @ in_eigenbasis(ridge), errors


def mean_shift(moments: RobustMoments, dtype: torch.dtype) -> Tensor | None:
    """Return the mean Δ of the massive tokens, (C,), or None if there is none."""
    x, y = moments.massive_states()
    return (y - x).mean(dim=0).to(dtype) if len(x) else None


def fit_ghost_robust(
    moments: SplitMoments[RobustMoments],
    *,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
    sinks: SinkRule | None = None,
    rank: int | None = None,
    by_rank: bool = True,
) -> OperatorFit:
    """Fit the operator on ordinary tokens and the constant shift of massive ones.

    Args:
        moments: Robust moments at the boundary.
        ridge: Relative ridge λ; 0 chooses it on held-out windows.
        dtype: Dtype in which the operator will be stored; the errors are those after rounding.
        sinks: How massive tokens are known at inference; None, or a rule that does not separate
            the classes, counts them as ordinary.
        rank: Rank of M; None is full rank.
        by_rank: Whether to report the error at other ranks.

    Returns:
        The fit: `m` (C, C), or `down` (C, r) and `up` (r, C); with massive tokens
        `shift` (C,) and `sink_direction` (C,).
    """
    parts = moments.fit, moments.held_out
    num_massive = len(moments.total.massive_states()[0])
    if sinks is None or not sinks.separates or not num_massive:
        parts = parts[0].as_ordinary(), parts[1].as_ordinary()
    split = SplitMoments(moments.boundary, parts[0].ordinary, parts[1].ordinary)
    ridge, part, tried = fit_without_held_out(split, ridge)
    total = split.total
    solution = solve_ridge(total.gram, total.cross, ridge)
    stored = store_map(
        split, solution.m, part, ridge=ridge, rank=rank, dtype=dtype, by_rank=by_rank
    )
    tensors, fit_part, spec = stored.tensors, stored.fit_part, dict[str, Any](stored.spec)
    shifts, shifts_part = _shifts(parts, sinks, dtype)
    if shifts and sinks is not None:
        spec |= {"sink_cosine": sinks.cosine}
        tensors |= shifts
        fit_part |= shifts_part
    diagnostics = {
        **stored.diagnostics,
        **solution_record(solution, ridge),
        "ridge_errors": {f"{value:g}": error for value, error in tried.items()},
        **sink_record(num_massive, sinks, used="sink_cosine" in spec),
    }
    return OperatorFit(
        name="ghost-robust",
        tensors=tensors,
        diagnostics=diagnostics,
        warnings=tuple(fit_warnings(split, diagnostics, total)),
        spec=spec,
        fit_part=fit_part if part is not None else {},
    )


def fit_without_held_out(
    split: SplitMoments[BoundaryMoments], ridge: float
) -> tuple[float, Tensor | None, dict[float, float]]:
    """Fit without the held-out windows; return λ, chosen if it is 0, M, and errors by λ tried."""
    if not split.fit.num_tokens or not split.held_out.num_tokens:
        return ridge, None, {}
    if ridge == 0.0:
        return choose_ridge(split.fit, split.held_out)
    return ridge, solve_ridge(split.fit.gram, split.fit.cross, ridge).m, {}


def _shifts(
    parts: tuple[RobustMoments, RobustMoments], sinks: SinkRule | None, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors for massive tokens: of all windows, and of those that are not held out.

    Both are empty where there are no such tokens; the first stand in for the second where all of
    them are held out.
    """
    shift, shift_part = mean_shift(parts[0] + parts[1], dtype), mean_shift(parts[0], dtype)
    if shift is None or sinks is None:
        return {}, {}
    both = {"shift": shift, "sink_direction": sinks.direction.to(shift.device)}
    return both, both if shift_part is None else {**both, "shift": shift_part}


def sink_record(num_massive: int, sinks: SinkRule | None, *, used: bool) -> dict[str, Any]:
    """Return JSON values: how many massive tokens there are and how they are told apart."""
    record: dict[str, Any] = {
        "massive_tokens": num_massive,
        "massive_rule": "direction" if used else "counted as ordinary" if num_massive else "none",
    }
    if num_massive and sinks is not None:
        record |= {
            "massive_missed": sinks.missed,
            "massive_false": sinks.false,
            "sink_cosine": sinks.cosine,
        }
    return record
