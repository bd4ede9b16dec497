"""Ghosted Layers (arXiv 2605.15491): the least-squares linear map in place of removed layers.

W* = I + M*, M* = argmin_M ‖XM − Δ‖_F², Δ = Y − X; rows are tokens, X (N, C). With `ridge` λ the
penalty λ·tr(XᵀX)/C·‖M‖_F² is added (the published code adds an absolute 1e-6 to the diagonal).
M is stored instead of W, so that the identity keeps its full precision in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..moments import BoundaryMoments, SplitMoments
from . import OperatorFit

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
    moments: SplitMoments, *, ridge: float = 0.0, dtype: torch.dtype = torch.float64
) -> OperatorFit:
    """Fit the operator of Ghosted Layers (paper, equation 5) on all counted tokens.

    Args:
        moments: Moments at the boundary.
        ridge: Relative ridge λ; 0 gives the minimum-norm solution X⁺Δ.
        dtype: Dtype in which the operator will be stored. M is rounded to it here, so that the
            errors reported are those of the operator that a reload gives.

    Returns:
        The fit; `tensors["m"]` is (C, C) of that dtype.
    """
    total = moments.total
    solution = solve_ridge(total.gram, total.cross, ridge)
    stored = solution.m.to(dtype)
    fit_part = None
    if moments.fit.num_tokens and moments.held_out.num_tokens:
        fit_part = solve_ridge(moments.fit.gram, moments.fit.cross, ridge).m.to(dtype)
    diagnostics = fit_errors(moments, stored, fit_part)
    diagnostics |= {
        "ridge": ridge,
        "rank": solution.rank,
        "condition": solution.condition,
        "frobenius_norm": float(solution.m.norm()),
        "antisymmetric_share": antisymmetric_share(solution.m),
    }
    return OperatorFit(
        name="ghost",
        tensors={"m": stored},
        diagnostics=diagnostics,
        fit_part={} if fit_part is None else {"m": fit_part},
        warnings=tuple(fit_warnings(moments, diagnostics, total)),
    )


def fit_warnings(
    moments: SplitMoments, diagnostics: dict[str, object], total: BoundaryMoments
) -> list[str]:
    """Return what the user should know about a fit, one line each."""
    where, size = moments.boundary, total.gram.shape[0]
    found = []
    if total.num_tokens < size:
        found.append(
            f"boundary {where}: {total.num_tokens} calibration tokens for hidden size {size}; the "
            f"fit is the minimum-norm one. Use at least {4 * size} tokens or a ridge."
        )
    before, after = (diagnostics[f"held_out_error_{key}"] for key in ("before", "after"))
    if isinstance(before, float) and isinstance(after, float) and after >= before:
        found.append(
            f"boundary {where}: on held-out windows the operator is no better than none (relative "
            f"error {after:.4f} against {before:.4f}). Use more windows or a ridge such as 1e-3."
        )
    return found
