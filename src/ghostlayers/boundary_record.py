"""What a checkpoint's record says about each boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .operators import NO_OPERATOR, OperatorFit
from .plan import Boundary, PruningPlan
from .recovered import Recovery

ERRORS = ("error_before", "held_out_error_before")


def boundary_entries(plan: PruningPlan, recovery: Recovery) -> list[dict[str, Any]]:
    """Describe every boundary: its repair and how well it fits, and what the guard tried.

    Returns:
        JSON values, one mapping per boundary. `operator` names what is used; `attached` says
        whether a module is attached, `weights` which weights of layer `changed_layer` (counted in
        the pruned model) are new.
    """
    used = recovery.used
    return [_entry(plan, recovery, boundary, used.get(boundary)) for boundary in plan.boundaries]


def _entry(
    plan: PruningPlan, recovery: Recovery, boundary: Boundary, fit: OperatorFit | None
) -> dict[str, Any]:
    place: dict[str, Any] = {"start": boundary.start, "stop": boundary.stop}
    ladder = recovery.ladders.get(boundary, ())
    if not ladder:
        return {**place, "operator": NO_OPERATOR}
    described = _describe(plan, boundary, ladder[0] if fit is None else fit)
    verdict = recovery.verdict
    guard: Mapping[str, Any] | None = None
    if verdict is not None:
        guard = {"candidate": ladder[0].name, **verdict.boundaries.get(boundary, {})}
    if fit is None:  # the guard dropped all of them: the fit moves into its part
        errors = {key: described[key] for key in ERRORS}
        return {
            **place,
            "operator": NO_OPERATOR,
            **errors,
            "guard": {**(guard or {}), "fit": described},
        }
    entry = {**place, "operator": fit.name, **described}
    return entry if guard is None else {**entry, "guard": guard}


def _describe(plan: PruningPlan, boundary: Boundary, fit: OperatorFit) -> dict[str, Any]:
    described: dict[str, Any] = {"attached": bool(fit.tensors)}
    if fit.tensors:
        layer, side = plan.operator_site(boundary)
        described |= {"layer": layer, "side": side}
    if fit.weights:
        before = plan.kept.index(boundary.start - 1)
        described |= {"changed_layer": before, "weights": list(fit.weights)}
    return {**described, **fit.diagnostics, "warnings": list(fit.warnings)}
