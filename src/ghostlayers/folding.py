"""Fit the methods that change weights of the layer before a cut, one boundary at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .boundary_runs import BoundaryBatch, BoundaryRuns
from .decoder import decoder_layers
from .exact_sums import SplitSums
from .feature_moments import FeatureMoments, StateFeatureMoments
from .fingerprint import tensor_sha256
from .fit_ladder import fit_ladder
from .fold_plan import chosen_sites, map_width, moments_device
from .fold_sites import FoldSite, FoldSites
from .moments import RobustMoments, SplitMoments
from .offload import stored_tensor
from .operators import OperatorFit
from .operators.fold import JOINT_RIDGES, fit_fold, fold_record, rounded_weight, solve_fold
from .operators.fold_ghost import fit_fold_ghost
from .operators.ghost_robust import sink_record
from .plan import Boundary
from .token_classes import SinkRule

if TYPE_CHECKING:
    from .config import PruneConfig

TOKENS_PER_FEATURE = 4


def fit_fold_boundary(
    runs: BoundaryRuns, found: FoldSites, config: PruneConfig
) -> tuple[OperatorFit, ...]:
    """Refit the output maps of the layer before one boundary.

    The attention map is solved for jointly with the MLP map and kept alone; a second run with the
    changed attention map recomputes what enters the MLP map, which is refitted to what is left.
    A third run does so behind the attention map fitted without the held-out windows.

    Args:
        runs: Runs up to the boundary.
        found: The maps of the layer before it.
        config: `ridge`, `fold_maps` and `moments_device` are read.

    Returns:
        The fits from the most complex one on: both maps, the MLP map alone.
    """
    sites, layer = chosen_sites(found, config), decoder_layers(runs.dense)[runs.boundary.start - 1]
    device = moments_device(runs.dense, config)
    fit, held_out = _fold_moments(runs, sites, {}, device)
    sizes = [map_width(site, layer) for site in sites]
    mlp = sites[-1]
    own = slice(sum(sizes) - sizes[-1], None)
    before = _before(fit, held_out)
    warnings = _too_few(runs.boundary, fit.num_tokens + held_out.num_tokens, sum(sizes))
    alone = fit_fold(fit.part(own), held_out.part(own), ridge=config.ridge)
    joint = None
    if len(sites) == 2:
        joint = fit_fold(fit, held_out, ridge=config.ridge, grid=JOINT_RIDGES, sizes=sizes)
    total = fit.add_(held_out)
    weight = stored_tensor(layer, mlp.weight)
    simple = _fold_fit("fold-mlp", mlp, weight, total.part(own), alone, before, held_out.part(own))
    if joint is None:
        return (_with(simple, {}, {}, warnings),)
    attention = sites[0]
    d = solve_fold(total, joint[1], sizes)[: sizes[0]]
    part = None if joint[0] is None else joint[0][: sizes[0]]
    del fit, held_out, total
    old = stored_tensor(layer, attention.weight)
    changed = {attention.weight: rounded_weight(old, attention.stored(d))[0]}
    changed_part = {}
    again: tuple[Tensor | None, float, dict[float, float]] | None = None
    if part is not None:  # a run of its own: what the guard tests must not know held-out windows
        changed_part = {attention.weight: rounded_weight(old, attention.stored(part))[0]}
        fit, held_out = _fold_moments(runs, [mlp], changed_part, device)
        again = fit_fold(fit, held_out, ridge=config.ridge)
    fit, rest = _fold_moments(runs, [mlp], changed, device)
    if again is None:
        held_out, again = rest, fit_fold(fit, rest, ridge=config.ridge)
    total = fit.add_(rest)
    both = _fold_fit("fold", mlp, weight, total, again, before, held_out)
    both.diagnostics["attention"] = fold_record(joint[1], joint[2])
    return (_with(both, changed, changed_part, warnings), _with(simple, {}, {}, warnings))


def _fold_moments(
    runs: BoundaryRuns, sites: Sequence[FoldSite], changed: Mapping[str, Tensor], device: Any
) -> tuple[FeatureMoments, FeatureMoments]:
    """Collect moments of the maps' inputs against Δ, weights 1/max(‖x‖, ‖y‖)²."""
    sums: SplitSums[FeatureMoments] = SplitSums()

    def add(batch: BoundaryBatch) -> None:
        inputs = _features(batch, sites, device)
        x, y = (state.to(device, torch.float64) for state in (batch.x, batch.y))
        width, size = inputs.shape[1], x.shape[1]
        parts = sums.started(lambda: FeatureMoments.zeros(width, size, device))
        longest = torch.maximum(x.norm(dim=1), y.norm(dim=1))[:, None]
        scale = torch.where(longest > 0, 1.0 / longest, torch.zeros_like(longest))
        rows = inputs * scale, (y - x) * scale, y * scale
        for moments, mask in zip(parts, (~batch.held_out, batch.held_out), strict=True):
            mask = mask.to(device)
            if mask.all() and len(mask):
                moments.add(*rows)
            elif mask.any():
                moments.add(*(part[mask] for part in rows))

    paths = [site.path for site in sites]
    runs.run(add, paths, changed, parts=sums.parts, key={"fold": paths})
    return sums.totals()


def _features(batch: BoundaryBatch, sites: Sequence[FoldSite], device: Any) -> Tensor:
    """Return the maps' inputs side by side, times their residual multipliers, float64."""
    inputs = [site.scale * batch.inputs[site.path].to(device, torch.float64) for site in sites]
    return inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)


def _before(fit: FeatureMoments, held_out: FeatureMoments) -> dict[str, float]:
    squares = fit.squares + held_out.squares, fit.state_squares + held_out.state_squares
    whole = (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0
    return {"error_before": whole, "held_out_error_before": held_out.relative_error()}


def _fold_fit(
    name: str,
    site: FoldSite,
    weight: Tensor,
    total: FeatureMoments,
    choice: tuple[Tensor | None, float, dict[float, float]],
    before: Mapping[str, float],
    held_out: FeatureMoments,
) -> OperatorFit:
    part, ridge, errors = choice
    new, kept = rounded_weight(weight, site.stored(solve_fold(total, ridge, [len(total.gram)])))
    weights_part, after_part = {}, None
    if part is not None:
        weights_part[site.weight], kept_part = rounded_weight(weight, site.stored(part))
        after_part = held_out.relative_error(site.stored(kept_part))
    diagnostics = {
        "num_tokens": total.num_tokens,
        "hidden_size": total.cross.shape[1],
        "features": len(total.gram),
        **before,
        "error_after": total.relative_error(site.stored(kept)),
        "held_out_tokens": held_out.num_tokens,
        "held_out_error_after": after_part,
        **fold_record(ridge, errors),
    }
    return OperatorFit(
        name=name,
        tensors={},
        diagnostics=diagnostics,
        weights={site.weight: new},
        weights_part=weights_part,
    )


def _with(
    fit: OperatorFit,
    weights: Mapping[str, Tensor],
    weights_part: Mapping[str, Tensor],
    warnings: tuple[str, ...],
) -> OperatorFit:
    """Add the changed attention map and warnings."""
    weights = {**weights, **fit.weights}
    part = {**weights_part, **fit.weights_part} if fit.weights_part else {}
    diagnostics = {**fit.diagnostics, "maps": list(weights)}
    return replace(
        fit, diagnostics=diagnostics, warnings=warnings, weights=weights, weights_part=part
    )


def _too_few(boundary: Boundary, tokens: int, features: int) -> tuple[str, ...]:
    need = TOKENS_PER_FEATURE * features
    if tokens >= need:
        return ()
    return (
        f"boundary {boundary}: {tokens} calibration tokens for {features} features; a refit of "
        f"weights needs about {need} ({TOKENS_PER_FEATURE} per feature). Use more windows.",
    )


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
    weight = stored_tensor(layer, site.weight)
    fit, held_out = _state_moments(runs, site, massive, moments_device(runs.dense, config))
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
    warnings = _too_few(boundary, tokens, len(fit.unit_sum))
    joint = fit_fold_ghost(
        fit,
        held_out,
        weight,
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


def _state_moments(
    runs: BoundaryRuns, site: FoldSite, massive: Tensor, device: torch.device
) -> tuple[StateFeatureMoments, StateFeatureMoments]:
    """Collect moments of [m, x] against y, massive tokens apart."""
    sums: SplitSums[StateFeatureMoments] = SplitSums()

    def add(batch: BoundaryBatch) -> None:
        m = _features(batch, [site], device)
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
