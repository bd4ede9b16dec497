"""ReplaceMe (arXiv 2505.02819): a linear transform T of the MLP output before a cut.

m is what the MLP of the layer before the cut adds to the residual stream, bias and residual
multiplier included; x = (x − m) + m enters the cut and becomes (x − m) + mT. `lstsq`:
T = argmin ‖mT − (Δ + m)‖², Δ = y − x. `cosine`: T minimises the mean cosine distance between
(x − m) + mT and y. T is merged into the map that computes m, so nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..feature_moments import FeatureMoments
from .fold import TOLERANCE
from .ghost import solve_ridge

# L-BFGS on all kept tokens at once. Every CHECK_EVERY iterations the held-out distance is looked
# at: of the numbers of iterations within TOLERANCE of the lowest one the largest is used.
MAX_ITERATIONS = 100
CHECK_EVERY = 5
HISTORY = 10
# Tokens of which the distance is computed at once.
CHUNK = 8192


@dataclass(frozen=True)
class TransformFit:
    """A fitted transform.

    Attributes:
        t: (C, C) float64, fitted on all tokens.
        t_part: The same without the held-out windows; None if there are none.
        diagnostics: JSON values that the method adds.
    """

    t: Tensor
    t_part: Tensor | None
    diagnostics: dict[str, Any]


@dataclass
class TokenStates:
    """States of single tokens: what the cosine needs and no moments give.

    Attributes:
        m: (n, C) float32, the MLP's contribution.
        rest: (n, C) float32, x − m.
        y: (n, C) float32.
    """

    m: Tensor
    rest: Tensor
    y: Tensor

    def __add__(self, other: TokenStates) -> TokenStates:
        """Return both sets of tokens together."""
        return TokenStates(
            torch.cat([self.m, other.m]),
            torch.cat([self.rest, other.rest]),
            torch.cat([self.y, other.y]),
        )

    def distance(self, t: Tensor) -> Tensor:
        """Return the mean cosine distance of (x − m) + mT to y; T is (C, C).

        If T wants a gradient, it is added to `t.grad` chunk by chunk, and the graphs are freed.
        """
        total = t.new_zeros(())
        for rows in zip(*(part.split(CHUNK) for part in (self.m, self.rest, self.y)), strict=True):
            m, rest, y = rows
            cosines = torch.cosine_similarity(m @ t + rest, y, dim=1)
            share = (1.0 - cosines).sum() / len(self.m)
            if share.requires_grad:
                share.backward()
            total += share.detach()
        return total


def fit_lstsq(
    fit: FeatureMoments, held_out: FeatureMoments, total: FeatureMoments, *, ridge: float = 0.0
) -> TransformFit:
    """Solve for T (paper, equation 5).

    T = I + D with D = argmin ‖mD − Δ‖² + λ·tr(mᵀm)/C·‖D‖²: with λ = 0 the same T as that of the
    paper; a ridge, or too few tokens, pull towards T = I, not towards 0.

    Args:
        fit: Moments of m against Δ of the fitting part.
        held_out: The same of the held-out part.
        total: The same of both.
        ridge: λ.

    Returns:
        The transform.
    """
    part = None
    if fit.num_tokens and held_out.num_tokens:
        part = _plus_identity(solve_ridge(fit.gram, fit.cross, ridge).m)
    solution = solve_ridge(total.gram, total.cross, ridge)
    found = {"ridge": ridge, "rank": solution.rank, "condition": solution.condition}
    return TransformFit(_plus_identity(solution.m), part, found)


def fit_cosine(fit: TokenStates, held_out: TokenStates) -> TransformFit:
    """Minimise the mean cosine distance by L-BFGS from T = I (paper, equation 6).

    The published code takes Adam (learning rate 1e-4, 10 epochs, batches of 1024 tokens); with the
    few tokens of a usual calibration that hardly leaves T = I. Nothing here is drawn at random.

    Args:
        fit: Tokens of the fitting part.
        held_out: Tokens of the held-out part.

    Returns:
        The transform. Without held-out tokens all `MAX_ITERATIONS` are run.
    """
    every, part = fit + held_out, None
    iterations, distances = MAX_ITERATIONS, dict[int, float]()
    if len(fit.m) and len(held_out.m):
        part, distances = _minimise(fit, MAX_ITERATIONS, held_out)
        iterations = _last_good(distances)
    t, _ = _minimise(every, iterations)
    identity = torch.eye(len(t)).to(t)
    found: dict[str, Any] = {
        "optimised_tokens": len(every.m),
        "iterations": iterations,
        "cosine_distance_before": float(every.distance(identity)),
        "cosine_distance_after": float(every.distance(t)),
        "held_out_cosine_distance_before": distances.get(0),
        "held_out_cosine_distance_after": distances.get(iterations),
    }
    return TransformFit(t.double(), None if part is None else part.double(), found)


def _last_good(distances: dict[int, float]) -> int:
    """Return the largest number of iterations within `TOLERANCE` of the lowest distance.

    Zero is none of the choices: a published method is used whether it helps or not.
    """
    lowest = min(distance for count, distance in distances.items() if count)
    good = [count for count, distance in distances.items() if distance <= TOLERANCE * lowest]
    return max(good)


def _minimise(
    states: TokenStates, iterations: int, held_out: TokenStates | None = None
) -> tuple[Tensor, dict[int, float]]:
    """Run L-BFGS from T = I.

    Returns:
        T (C, C) float32 after all iterations, or after `_last_good` of the held-out distances; and
        these by the number of iterations, until one is no good.
    """
    t = torch.eye(states.m.shape[1], device=states.m.device).requires_grad_()
    good, distances = t.detach().clone(), dict[int, float]()
    if held_out is not None:
        distances[0] = float(held_out.distance(good))

    def closure() -> Tensor:
        optimiser.zero_grad()
        return states.distance(t)

    optimiser = torch.optim.LBFGS(
        [t], max_iter=CHECK_EVERY, history_size=HISTORY, line_search_fn="strong_wolfe"
    )
    with torch.enable_grad():
        for done in range(CHECK_EVERY, iterations + 1, CHECK_EVERY):
            optimiser.step(closure)
            if held_out is None:
                continue
            distances[done] = float(held_out.distance(t.detach()))
            if _last_good(distances) != done:
                break
            good = t.detach().clone()
    return (t.detach() if held_out is None else good), distances


def _plus_identity(d: Tensor) -> Tensor:
    t = d.clone()
    t.diagonal().add_(1.0)
    return t
