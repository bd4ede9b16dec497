"""Fit `fold+ghost`: a changed MLP map before a cut and an operator behind it, at one boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .boundary_runs import BoundaryBatch, BoundaryRuns
from .decoder import decoder_layers
from .exact_sums import SplitSums
from .feature_moments import StateFeatureMoments
from .fingerprint import tensor_sha256
from .fit_ladder import fit_ladder
from .fold_maps import Change, FoldMap, change_map
from .fold_plan import moments_device
from .fold_sites import FoldSites
from .folding import features_of, too_few
from .moments import RobustMoments, SplitMoments
from .operators import OperatorFit
from .operators.fold import fold_record
from .operators.fold_ghost import JointSolver, choose_joint, fit_fold_ghost
from .operators.ghost_robust import sink_record
from .steps import fit_operator
from .token_classes import SinkRule

if TYPE_CHECKING:
    from .config import PruneConfig


def fit_fold_ghost_boundary(
    runs: BoundaryRuns,
    found: FoldSites,
    config: PruneConfig,
    massive: Tensor,
    ridges: Sequence[float] = (),
) -> tuple[OperatorFit, ...]:
    """Fit an MLP map and an operator together at one boundary, and `ghost-robust` alone beside it.

    Args:
        runs: Runs up to the boundary.
        found: The maps of the layer before it.
        config: `ridge` and `moments_device` are read.
        massive: (N,) bool of all calibration tokens.
        ridges: Those of `ghost-robust`, if they are known.

    Returns:
        The fits from the most complex one on.
    """
    site, boundary = found.mlp, runs.boundary
    layer = decoder_layers(runs.dense)[boundary.start - 1]
    mlp = FoldMap(layer, site, moments_device(runs.dense, config))
    if not mlp.is_linear:
        return _fit_fold_ghost_behind_norm(runs, mlp, config, massive, ridges)
    fit, held_out = _state_moments(runs, mlp, massive)
    split = SplitMoments(boundary, fit.behind(), held_out.behind())
    rule = runs.sink_rule(split, massive) if massive.any() else None
    robust = fit_ladder(
        split, operator="ghost-robust", dtype=runs.dense.dtype, sinks=rule, ridges=ridges
    )
    num_massive = fit.num_massive + held_out.num_massive
    separates = rule is not None and rule.separates
    if not separates:
        fit.count_massive_as_ordinary_()
        held_out.count_massive_as_ordinary_()

    def sink_rule(behind: SplitMoments[RobustMoments], new: Tensor) -> SinkRule | None:
        return runs.sink_rule(behind, massive, {site.weight: new})

    tokens = fit.ordinary.num_tokens + held_out.ordinary.num_tokens
    warnings = too_few(boundary, tokens, len(fit.unit_sum))
    joint = fit_fold_ghost(
        fit,
        held_out,
        mlp.weight,
        boundary=boundary,
        path=site.weight,
        sink_rule=sink_rule,
        transposed=site.transposed,
        ridge=config.ridge,
    )
    if joint is None:
        line = (
            f"boundary {boundary}: ghost-robust instead of fold+ghost (behind the changed map no "
            "direction tells massive tokens from others)."
        )
        return tuple(replace(fit, warnings=(*fit.warnings, line)) for fit in robust)
    diagnostics = joint.diagnostics
    if not separates:
        diagnostics = {**diagnostics, **sink_record(num_massive, rule, used=False)}
    joint = replace(joint, diagnostics=diagnostics, warnings=(*joint.warnings, *warnings))
    return (joint, *robust)


def _fit_fold_ghost_behind_norm(
    runs: BoundaryRuns,
    mlp: FoldMap,
    config: PruneConfig,
    massive: Tensor,
    ridges: Sequence[float],
) -> tuple[OperatorFit, ...]:
    """Change an MLP map before a norm and put an operator behind it.

    Both are solved for together, as if what the norm divides by stayed. The operator is then fitted
    anew to the states behind the changed layer, as `ghost-robust` is.
    """
    given: dict[str, Any] = {"operator": "ghost-robust", "dtype": runs.dense.dtype}

    def rule_of(
        split: SplitMoments[RobustMoments], weights: Mapping[str, Tensor]
    ) -> SinkRule | None:
        return runs.sink_rule(split, massive, weights) if massive.any() else None

    fit, held_out = _state_moments(runs, mlp, massive)
    bare = SplitMoments(runs.boundary, fit.behind(), held_out.behind())
    robust = fit_ladder(bare, sinks=rule_of(bare, {}), ridges=ridges, **given)
    num_tokens, features = bare.total.ordinary.num_tokens, len(fit.unit_sum)
    del bare
    part, ridge, errors = choose_joint(fit, held_out, config.ridge)
    total = fit.add_(held_out)
    gram = total.ordinary.gram[: mlp.width, : mlp.width]
    changes = [Change(JointSolver(total).solve(ridge)[0], gram)]
    if part is not None:
        own = held_out.ordinary.gram[: mlp.width, : mlp.width]
        changes.append(Change(part, gram, own, is_part=True))
    changed, *rest = (each.weights for each in change_map(runs, mlp, changes, {}))
    del fit, held_out, total, gram, changes

    def behind(weights: Mapping[str, Tensor]) -> SplitMoments[RobustMoments]:
        return runs.split_moments(weights, massive=massive, device=mlp.device)

    moments = behind(changed)
    given |= {"sinks": rule_of(moments, changed), "by_rank": False}  # it has full rank always
    tested = None
    if rest:  # the ridge is chosen behind a map that has not seen the held-out windows either
        tested = fit_operator(behind(rest[0]), **given)
        given["ridge"] = tested.diagnostics["ridge"]
    operator = fit_operator(moments, **given)
    same = ("error_before", "held_out_error_before")
    diagnostics = {
        **operator.diagnostics,
        **{key: robust[0].diagnostics[key] for key in same},
        "held_out_error_after": tested and tested.diagnostics["held_out_error_after"],
        **fold_record(ridge, errors),
        "maps": list(changed),
        "operator_ridge": operator.diagnostics["ridge"],
    }
    joint = replace(
        operator,
        name="fold+ghost",
        diagnostics=diagnostics,
        warnings=(*operator.warnings, *too_few(runs.boundary, num_tokens, features)),
        fit_part={} if tested is None else tested.fit_part,
        weights=changed,
        weights_part=rest[0] if rest else {},
        sites={mlp.site.weight: mlp.site},
    )
    return (joint, *robust)


def _state_moments(
    runs: BoundaryRuns, mlp: FoldMap, massive: Tensor
) -> tuple[StateFeatureMoments, StateFeatureMoments]:
    """Collect moments of [m, x] against y, massive tokens apart."""
    sums: SplitSums[StateFeatureMoments] = SplitSums()
    site, device = mlp.site, mlp.device

    def add(batch: BoundaryBatch) -> None:
        m = features_of(batch, [mlp], device)
        x, y = (state.to(device, torch.float64) for state in (batch.x, batch.y))
        marked = massive[batch.token :][: len(x)].to(device)
        width, size = m.shape[1], x.shape[1]
        parts = sums.started(lambda: StateFeatureMoments.zeros(width, size, device))
        for moments, mask in zip(parts, (~batch.held_out, batch.held_out), strict=True):
            mask = mask.to(device)
            if mask.any():
                moments.add(m[mask], x[mask], y[mask], marked[mask])

    key = {"fold+ghost": site.path, "massive": tensor_sha256(massive)}
    runs.run(add, [site.path], parts=sums.parts, key=key)
    return sums.totals()
