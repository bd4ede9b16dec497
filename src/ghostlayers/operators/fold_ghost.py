"""Fold and ghost together: change the MLP output map before a cut and put an operator behind it.

min over D, M of Σ_ordinary ‖(x + mD)(I + M) − y‖²/‖x‖² + Σ_massive ‖mD‖²/‖x‖² + λ·s‖D‖² + μ·t‖M‖²

m is the MLP map's real input, D the change of its weight, s and t the mean diagonals of the Gram
matrices. D for a fixed M is a Sylvester equation, M for a fixed D is ridge regression; they are
solved in turn, from M = 0. The ridge is on D itself: on D(I + M), which would make one linear
system of it, it lets cond(I + M) explode. Massive tokens get their own shift behind the operator,
and their term keeps the changed map from moving them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..feature_moments import StateFeatureMoments
from ..moments import BoundaryMoments, RobustMoments, SplitMoments
from ..plan import Boundary
from ..token_classes import SinkRule
from . import OperatorFit
from .fold import TOLERANCE, fold_record, rounded_weight
from .ghost import antisymmetric_share, fit_errors, fit_warnings
from .ghost_robust import mean_shift, sink_record

RIDGES = (0.3, 1.0, 3.0, 10.0)
OPERATOR_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
ROUNDS = 4
# Rounding M to its stored dtype may cost this share of the error before its ridge is raised.
ROUNDING_COST = 1.01


def solve_operator(moments: BoundaryMoments, ridge: float) -> Tensor:
    """Solve (G + μ·tr(G)/C·I) M = R, (C, C) float64."""
    system = moments.gram.clone()
    system.diagonal().add_(ridge * float(system.trace()) / len(system) or 1.0)
    m: Tensor = torch.cholesky_solve(moments.cross, torch.linalg.cholesky(system))
    return m


class JointSolver:
    """Solves for D and M from one set of moments; the large eigenproblem is solved once."""

    def __init__(self, moments: StateFeatureMoments) -> None:
        self.moments = moments
        k, every = moments.width, moments.ordinary
        self.gram_mx, self.cross_m = every.gram[:k, k:], every.cross[:k]
        gram = every.gram[:k, :k]
        m, x, _ = moments.massive_features()
        m = m / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
        values, self.vectors = torch.linalg.eigh(gram + m.T @ m)
        self.values = values.clamp(min=0)
        self.scale = float(gram.diagonal().mean()) or 1.0

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return D (width, C) and M (C, C), float64, for a ridge λ on D."""
        size = self.cross_m.shape[1]
        d, m = None, self.cross_m.new_zeros(size, size)
        for _ in range(ROUNDS):
            d = self._change(m, ridge)
            m = solve_operator(self.moments.behind(d).ordinary, OPERATOR_RIDGES[0])
        assert d is not None
        return d, m

    def _change(self, m: Tensor, ridge: float) -> Tensor:
        """Solve for D: (Gm + K) D AAᵀ + λs D = (Rm − Gmx A) Aᵀ with A = I + M."""
        a = m.clone()
        a.diagonal().add_(1.0)
        values, vectors = torch.linalg.eigh(a @ a.T)
        right = (self.cross_m - self.gram_mx @ a) @ a.T
        system = self.values[:, None] * values[None, :] + ridge * self.scale
        d: Tensor = self.vectors @ ((self.vectors.T @ right @ vectors) / system) @ vectors.T
        return d


def choose_joint(
    fit: StateFeatureMoments, held_out: StateFeatureMoments, ridge: float
) -> tuple[Tensor | None, float, dict[float, float]]:
    """Choose λ on held-out ordinary tokens.

    Returns:
        D fitted without them (None if one part is empty), λ, and the held-out error of every λ.
    """
    if not fit.ordinary.num_tokens or not held_out.ordinary.num_tokens:
        return None, ridge or max(RIDGES), {}
    solver = JointSolver(fit)
    changes: dict[float, Tensor] = {}
    errors: dict[float, float] = {}
    for value in [ridge] if ridge else RIDGES:
        d, m = solver.solve(value)
        changes[value], errors[value] = d, held_out.behind(d).ordinary.relative_error(m)
    best = min(errors.values())
    chosen = min(value for value, error in errors.items() if error <= TOLERANCE * best)
    return changes[chosen], chosen, errors


def stored_operator(moments: BoundaryMoments, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Solve for M as it will be stored; raise its ridge while rounding costs too much.

    Returns:
        M rounded to `dtype`, and the ridge.
    """
    for ridge in OPERATOR_RIDGES:
        exact = solve_operator(moments, ridge)
        m = exact.to(dtype)
        if moments.relative_error(m) <= ROUNDING_COST * moments.relative_error(exact) + 1e-9:
            break
    return m, ridge


def _operator_part(behind: RobustMoments, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return M and the shift behind a map that was changed without the held-out windows."""
    shift = mean_shift(behind, dtype)
    part = {"m": stored_operator(behind.ordinary, dtype)[0]}
    return part if shift is None else {**part, "shift": shift}


def _held_out_errors(
    held_out: StateFeatureMoments, part: Tensor | None, fit_part: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the held-out record; `part` is the change of the map fitted on the other windows."""
    before = after = None
    if part is not None:
        before = held_out.behind().ordinary.relative_error()
        after = held_out.behind(part).ordinary.relative_error(fit_part["m"])
    return {
        "held_out_tokens": held_out.ordinary.num_tokens,
        "held_out_error_before": before,
        "held_out_error_after": after,
    }


def _shape_of(m: Tensor) -> dict[str, float]:
    """Return the condition number of I + M, and the norm and the rotation share of M."""
    return {
        "condition": float(torch.linalg.cond(torch.eye(len(m)).to(m) + m)),
        "frobenius_norm": float(m.norm()),
        "antisymmetric_share": antisymmetric_share(m),
    }


def fit_fold_ghost(
    fit: StateFeatureMoments,
    held_out: StateFeatureMoments,
    weight: Tensor,
    *,
    boundary: Boundary,
    path: str,
    sink_rule: Callable[[SplitMoments[RobustMoments], Tensor], SinkRule | None],
    transposed: bool = False,
    ridge: float = 0.0,
) -> OperatorFit | None:
    """Fit both parts.

    Args:
        fit: Moments of the fitting part.
        held_out: Moments of the held-out part; afterwards both parts are in `fit`.
        weight: Present weight of the MLP map, as stored.
        boundary: The boundary.
        path: Path of the weight in the layer before it.
        sink_rule: Called with the moments behind the changed map and the new weight; finds how
            massive tokens are known there. Not called if there are none.
        transposed: Whether the weight is stored as (in, out).
        ridge: λ; 0 chooses it on held-out tokens.

    Returns:
        The fit, or None if massive tokens cannot be told from others behind the changed map.
    """

    def changed(d: Tensor) -> tuple[Tensor, Tensor]:
        new, kept = rounded_weight(weight, d if transposed else d.T)
        return new, kept if transposed else kept.T

    part, ridge, errors = choose_joint(fit, held_out, ridge)
    weights_part, fit_part = {}, {}
    if part is not None:
        weights_part[path], part = changed(part)
        fit_part = _operator_part(fit.behind(part), weight.dtype)
    found = _held_out_errors(held_out, part, fit_part)
    total = fit.add_(held_out)
    new, d = changed(JointSolver(total).solve(ridge)[0])
    behind = total.behind(d)
    m, operator_ridge = stored_operator(behind.ordinary, weight.dtype)
    tensors, spec, rule = {"m": m}, {}, None
    split = SplitMoments(boundary, behind, RobustMoments.zeros(len(m), m.device))
    if total.num_massive:
        rule = sink_rule(split, new)
        if rule is None or not rule.separates:
            return None
        spec = {"sink_cosine": rule.cosine}
        both = {"sink_direction": rule.direction.to(m.device)}
        shift = mean_shift(behind, weight.dtype)
        assert shift is not None
        tensors |= {**both, "shift": shift}
        fit_part = {"shift": shift, **fit_part, **both} if fit_part else {}
    ordinary = SplitMoments(boundary, behind.ordinary, BoundaryMoments.zeros(len(m), m.device))
    diagnostics: dict[str, Any] = fit_errors(ordinary, m, None)
    diagnostics |= {
        "error_before": total.behind().ordinary.relative_error(),
        **found,
        "maps": [path],
        **fold_record(ridge, errors),
        "operator_ridge": operator_ridge,
        **_shape_of(m.to(d)),
        **sink_record(total.num_massive, rule, used=bool(spec)),
    }
    return OperatorFit(
        name="fold+ghost",
        tensors=tensors,
        diagnostics=diagnostics,
        warnings=tuple(fit_warnings(ordinary, diagnostics, behind.ordinary)),
        spec=spec,
        fit_part=fit_part,
        weights={path: new},
        weights_part=weights_part,
    )
