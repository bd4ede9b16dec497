"""A linear map of the normalised state, y = x + RMSNorm(x) M: a layer that llama.cpp can run.

M* = argmin Σ w ‖z M − Δ‖² + λ·tr(G)/C·‖M‖², z = RMSNorm(x), w = 1/max(‖x‖, ‖y‖)², over all tokens;
λ is chosen as for `ghost-robust`. After the linear attention layer of Nemotron-NAS (Puzzle, arXiv
2411.19146), there found by training.
"""

from __future__ import annotations

import torch

from ..moments import BoundaryMoments, SplitMoments
from ..norm_moments import NormMoments
from . import OperatorFit
from .ghost import fit_warnings, solution_record, solve_ridge, store_map
from .ghost_robust import fit_without_held_out


def fit_ghost_norm(
    moments: SplitMoments[NormMoments],
    *,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
    rank: int | None = None,
    by_rank: bool = True,
) -> OperatorFit:
    """Fit the operator on all counted tokens.

    Args:
        moments: Moments at the boundary.
        ridge: Relative ridge λ; 0 chooses it on held-out windows.
        dtype: Dtype in which the operator will be stored; the errors are those after rounding.
        rank: Rank of M; None is full rank.
        by_rank: Whether to report the error at other ranks.

    Returns:
        The fit: `m` (C, C), or `down` (C, r) and `up` (r, C); its spec holds `norm_eps`.
    """
    norm_eps = moments.fit.norm_eps
    split = SplitMoments[BoundaryMoments](moments.boundary, moments.fit, moments.held_out)
    ridge, part, tried = fit_without_held_out(split, ridge)
    total = split.total
    solution = solve_ridge(total.gram, total.cross, ridge)
    stored = store_map(
        split, solution.m, part, ridge=ridge, rank=rank, dtype=dtype, by_rank=by_rank
    )
    diagnostics = {
        **stored.diagnostics,
        **solution_record(solution, ridge),
        "ridge_errors": {f"{value:g}": error for value, error in tried.items()},
        "norm_eps": norm_eps,
    }
    return OperatorFit(
        name="ghost-norm",
        tensors=stored.tensors,
        diagnostics=diagnostics,
        warnings=tuple(fit_warnings(split, diagnostics, total)),
        spec={**stored.spec, "norm_eps": norm_eps},
        fit_part=stored.fit_part,
    )
