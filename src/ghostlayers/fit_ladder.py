"""The ladder of one operator: its fit, and the same fit with heavier ridges, for the guard.

The ridge with the lowest error of the hidden state on held-out windows is often too light for what
the model says, above all at shallow cuts and where there are few tokens. Which ridge stands, the
guard decides by loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .moments import SplitMoments
from .operators import RIDGED, OperatorFit
from .repairs import is_tested
from .steps import fit_operator
from .token_classes import SinkRule

# Ridges on the ladder below the one that the error of the state chooses, as far as they exceed it.
HEAVIER = (1e-3, 3e-2, 3e-1)
# A heavier ridge is more than so many times that one.
MIN_STEP = 2.0


def fit_ladder(
    moments: SplitMoments[Any],
    *,
    operator: str,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
    sinks: SinkRule | None = None,
    rank: int | None = None,
    ridges: Sequence[float] = (),
) -> tuple[OperatorFit, ...]:
    """Fit an operator; where the guard may choose its ridge, heavier ones as well.

    Args:
        moments: From `collect_moments`.
        operator: Name of the method.
        ridge: Relative ridge; if it is not 0, it is the only one.
        dtype: Dtype in which the operator will be stored.
        sinks: From `fit_sink_rules`; read by robust operators.
        rank: Rank of the map, for the operators in `RANKED`; None is full rank.
        ridges: Those of another ladder that this one is to match, if the operator is in `RIDGED`.

    Returns:
        The fits, the lightest ridge first; only one unless the operator is in `RIDGED` and could
        also be fitted without the held-out windows.
    """
    settings: dict[str, Any] = {"operator": operator, "dtype": dtype, "sinks": sinks, "rank": rank}
    if ridges and operator in RIDGED:
        return tuple(fit_operator(moments, ridge=value, **settings) for value in ridges)
    first = fit_operator(moments, ridge=ridge, **settings)
    if ridge or operator not in RIDGED or not is_tested(first):
        return (first,)
    return (first, *heavier_fits(first, moments, **settings))


def heavier_fits(
    first: OperatorFit, moments: SplitMoments[Any], **settings: Any
) -> list[OperatorFit]:
    """Fit with the ridges of `HEAVIER` above that of a fit; `settings` as for `fit_operator`."""
    tried = first.diagnostics["ridge_errors"]
    lightest = MIN_STEP * float(first.diagnostics["ridge"])
    fits = [fit_operator(moments, ridge=value, **settings) for value in HEAVIER if value > lightest]
    return [replace(fit, diagnostics={**fit.diagnostics, "ridge_errors": tried}) for fit in fits]


def ridges_of(ladder: Sequence[OperatorFit]) -> list[float]:
    """List the ridges of the fits among which the guard may choose."""
    return [fit.diagnostics["ridge"] for fit in ladder if fit.name in RIDGED]
