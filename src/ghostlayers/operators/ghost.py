"""Ghosted Layers (arXiv 2605.15491): the least-squares linear map in place of removed layers.

W* = I + M*, M* = argmin_M ‖XM − Δ‖_F², Δ = Y − X; rows are tokens, X (N, C). With `ridge` λ the
penalty λ·tr(XᵀX)/C·‖M‖_F² is added (the published code adds an absolute 1e-6 to the diagonal).
M is stored instead of W, so that the identity keeps its full precision in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..moments import BoundaryMoments, SplitMoments
from . import OperatorFit
from .low_rank import RankedMap, dense_map

# Eigenvalues below CUTOFF · C · machine epsilon · the largest one count as zero.
CUTOFF = 1.0


@dataclass(frozen=True)
class Solution:
    """Result of a least-squares solve from moments.

    Attributes:
        m: (C, C) float64, row convention.
        condition: Condition number of the system solved, after scaling to a unit diagonal.
        rank: Numerical rank of the Gram matrix.
    """

    m: Tensor
    condition: float
    rank: int


def solve_ridge(gram: Tensor, cross: Tensor, ridge: float = 0.0) -> Solution:
    """Solve (G + λ·tr(G)/C·I) M = R for symmetric positive semi-definite G.

    A system of full numerical rank is scaled to a unit diagonal first, so that one channel many
    orders larger than the rest does not cost the others their digits. Otherwise the minimum-norm
    solution G⁺R is taken, through the eigendecomposition of the unscaled G.

    Args:
        gram: (C, C) float64, G = XᵀX.
        cross: (C, K) float64, R = XᵀΔ.
        ridge: λ ≥ 0, relative to the mean of G's diagonal.

    Returns:
        The solution, the scaled system's condition number, and the numerical rank.
    """
    size = gram.shape[0]
    cutoff = CUTOFF * size * torch.finfo(gram.dtype).eps
    diagonal = gram.diagonal()
    shift = ridge * float(diagonal.sum()) / size
    scale = (diagonal + shift).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    system = gram / scale[:, None] / scale[None, :]
    system.diagonal().add_(shift / scale.square())
    values, vectors = torch.linalg.eigh(system)
    largest = float(values[-1])
    if largest <= 0.0:
        return Solution(m=torch.zeros_like(cross), condition=float("inf"), rank=0)
    condition = largest / max(float(values[0]), largest * 1e-300)
    if float(values[0]) > cutoff * largest:
        m = vectors @ ((vectors.T @ (cross / scale[:, None])) / values[:, None])
        return Solution(m=m / scale[:, None], condition=condition, rank=size)
    values, vectors = torch.linalg.eigh(gram)
    used = values > cutoff * values[-1]
    basis = vectors[:, used]
    m = basis @ ((basis.T @ cross) / (values[used] + shift)[:, None])
    return Solution(m=m, condition=float("inf"), rank=int(used.sum()))


def antisymmetric_share(m: Tensor) -> float:
    """Return ‖(M − Mᵀ)/2‖_F / ‖M‖_F: how much of the map is rotation, in [0, 1]."""
    norm = float(m.norm())
    return float((m - m.T).norm()) / 2.0 / norm if norm > 0 else 0.0


def solution_record(solution: Solution, ridge: float) -> dict[str, object]:
    """Return JSON values: λ, and what the solve and its (C, C) map are like."""
    return {
        "ridge": ridge,
        "rank": solution.rank,
        "condition": solution.condition,
        "frobenius_norm": float(solution.m.norm()),
        "antisymmetric_share": antisymmetric_share(solution.m),
    }


def fit_errors(moments: SplitMoments, m: Tensor, m_fit_part: Tensor | None) -> dict[str, object]:
    """Relative errors ‖X + XM − Y‖/‖Y‖ before and after, on calibration and held-out windows.

    Args:
        moments: Moments of the boundary.
        m: (C, C) operator fitted on all tokens.
        m_fit_part: (C, C) operator fitted without the held-out windows; None if there are none.
    """
    total, held_out = moments.total, moments.held_out
    return {
        "num_tokens": total.num_tokens,
        "hidden_size": total.gram.shape[0],
        "error_before": total.relative_error(),
        "error_after": total.relative_error(m),
        "held_out_tokens": held_out.num_tokens,
        "held_out_error_before": None if m_fit_part is None else held_out.relative_error(),
        "held_out_error_after": None if m_fit_part is None else held_out.relative_error(m_fit_part),
    }


def fit_ghost(
    moments: SplitMoments[BoundaryMoments],
    *,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
    rank: int | None = None,
    by_rank: bool = True,
) -> OperatorFit:
    """Fit the operator of Ghosted Layers (paper, equation 5) on all counted tokens.

    Args:
        moments: Moments at the boundary.
        ridge: Relative ridge λ; 0 gives the minimum-norm solution X⁺Δ.
        dtype: Dtype in which the operator will be stored. M is rounded to it here, so that the
            errors reported are those of the operator that a reload gives.
        rank: Rank of M; None is full rank.
        by_rank: Whether to report the error at other ranks.

    Returns:
        The fit; `tensors["m"]` is (C, C) of that dtype, or `down` (C, r) and `up` (r, C).
    """
    total, part = moments.total, None
    solution = solve_ridge(total.gram, total.cross, ridge)
    if moments.fit.num_tokens and moments.held_out.num_tokens:
        part = solve_ridge(moments.fit.gram, moments.fit.cross, ridge).m
    stored = store_map(
        moments, solution.m, part, ridge=ridge, rank=rank, dtype=dtype, by_rank=by_rank
    )
    diagnostics = {**stored.diagnostics, **solution_record(solution, ridge)}
    return OperatorFit(
        name="ghost",
        tensors=stored.tensors,
        diagnostics=diagnostics,
        spec=stored.spec,
        fit_part=stored.fit_part,
        warnings=tuple(fit_warnings(moments, diagnostics, total)),
    )


@dataclass(frozen=True)
class StoredMap:
    """A fitted map as it is stored.

    Attributes:
        tensors: Of the final map.
        fit_part: Of the map fitted without the held-out windows; empty if there are none.
        spec: What the module needs to know: its rank.
        diagnostics: JSON values: errors, also by rank.
    """

    tensors: dict[str, Tensor]
    fit_part: dict[str, Tensor]
    spec: dict[str, int]
    diagnostics: dict[str, object]


def store_map(
    moments: SplitMoments[BoundaryMoments],
    m: Tensor,
    part: Tensor | None,
    *,
    ridge: float,
    rank: int | None,
    dtype: torch.dtype,
    by_rank: bool,
) -> StoredMap:
    """Reduce a fitted map to its rank, round it and measure what is stored.

    Args:
        moments: Moments of the boundary.
        m: (C, C) float64, full-rank solution on all tokens.
        part: The same without the held-out windows; None if there are none.
        ridge: λ of both.
        rank: Rank to store; None is full rank.
        dtype: Dtype to store.
        by_rank: Whether to report the error at other ranks.
    """
    total = moments.total
    tensors, errors = _reduced(m, total, total, ridge, rank, dtype, by_rank)
    fit_part, held_out_errors = dict[str, Tensor](), None
    if part is not None:
        fit_part, held_out_errors = _reduced(
            part, moments.fit, moments.held_out, ridge, rank, dtype, by_rank
        )
    diagnostics = fit_errors(moments, dense_map(tensors), dense_map(fit_part) if fit_part else None)
    diagnostics["map_rank"] = rank or len(m)
    if by_rank:
        diagnostics |= {"error_by_rank": errors, "held_out_error_by_rank": held_out_errors}
    return StoredMap(tensors, fit_part, {} if rank is None else {"rank": rank}, diagnostics)


def _reduced(
    m: Tensor,
    fit: BoundaryMoments,
    scored: BoundaryMoments,
    ridge: float,
    rank: int | None,
    dtype: torch.dtype,
    by_rank: bool,
) -> tuple[dict[str, Tensor], dict[str, float] | None]:
    """Return a map fitted on some tokens as it is stored, and its errors by rank on others."""
    if rank is None and not by_rank:
        return {"m": m.to(dtype)}, None
    ranked = RankedMap.of(m, fit.gram, ridge)
    return ranked.tensors(rank, dtype), ranked.errors(scored) if by_rank else None


def fit_warnings(
    moments: SplitMoments, diagnostics: dict[str, Any], total: BoundaryMoments
) -> list[str]:
    """Return what the user should know about a fit, one line each."""
    where, size = moments.boundary, total.gram.shape[0]
    ridge = diagnostics.get("operator_ridge", diagnostics["ridge"])
    found = []
    if total.num_tokens < size:
        fitted = f"has the ridge {ridge:g}" if ridge else "is the minimum-norm one"
        found.append(
            f"boundary {where}: {total.num_tokens} calibration tokens for hidden size {size}; the "
            f"fit {fitted}. Use at least {4 * size} tokens{'' if ridge else ' or a ridge'}."
        )
    before, after = (diagnostics[f"held_out_error_{key}"] for key in ("before", "after"))
    if isinstance(before, float) and isinstance(after, float) and after >= before:
        heavier = f"a ridge above {ridge:g}" if ridge else "a ridge such as 1e-3"
        found.append(
            f"boundary {where}: on held-out windows the operator is no better than none (relative "
            f"error {after:.4f} against {before:.4f}). Use more windows or {heavier}."
        )
    return found
