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
from .feature_moments import FeatureMoments
from .fold_maps import Change, FoldMap, change_map
from .fold_plan import chosen_sites, moments_device
from .fold_sites import FoldSites
from .operators import OperatorFit
from .operators.fold import JOINT_RIDGES, fit_fold, fold_record, solve_fold
from .plan import Boundary

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
    maps = [FoldMap(layer, site, device) for site in sites]
    mlp, sizes = maps[-1], [own.width for own in maps]
    fit, held_out = _fold_moments(runs, maps, {}, device)
    part_of_mlp = slice(sum(sizes) - sizes[-1], None)
    before = _before(fit, held_out)
    warnings = too_few(runs.boundary, fit.num_tokens + held_out.num_tokens, sum(sizes))
    alone = fit_fold(fit.part(part_of_mlp), held_out.part(part_of_mlp), ridge=config.ridge)
    joint = None
    if len(maps) == 2:
        joint = fit_fold(fit, held_out, ridge=config.ridge, grid=JOINT_RIDGES, sizes=sizes)
    total = fit.add_(held_out)
    moments = total.part(part_of_mlp), held_out.part(part_of_mlp)
    part = None
    if alone[0] is not None:
        part = Change(alone[0], moments[0].gram, moments[1].gram, is_part=True)
    simple = _fold_fit("fold-mlp", runs, mlp, *moments, alone, part, before)
    shared: dict[str, Any] = {"warnings": warnings, "sites": {s.weight: s for s in sites}}
    simple = replace(simple, **shared)
    if joint is None:
        return (simple,)
    attention = maps[0]
    gram = total.gram[: sizes[0], : sizes[0]]
    changes = [Change(solve_fold(total, joint[1], sizes)[: sizes[0]], gram)]
    if joint[0] is not None:
        changes.append(
            Change(joint[0][: sizes[0]], gram, held_out.gram[: sizes[0], : sizes[0]], is_part=True)
        )
    changed, *rest = (each.weights for each in change_map(runs, attention, changes, {}))
    del fit, held_out, total, moments, gram, changes, part
    again: tuple[Tensor | None, float, dict[float, float]] | None = None
    changed_part, part = rest[0] if rest else {}, None
    if rest:  # a run of its own: what the guard tests must not know held-out windows
        fit, held_out = _fold_moments(runs, [mlp], changed_part, device)
        again = fit_fold(fit, held_out, ridge=config.ridge)
        part = None if again[0] is None else Change(again[0], fit.gram, is_part=True)
    fit, other = _fold_moments(runs, [mlp], changed, device)
    if again is None:
        held_out, again = other, fit_fold(fit, other, ridge=config.ridge)
    total = fit.add_(other)
    both = _fold_fit("fold", runs, mlp, total, held_out, again, part, before, changed, changed_part)
    both.diagnostics["attention"] = fold_record(joint[1], joint[2])
    return (replace(both, **shared), simple)


def _fold_moments(
    runs: BoundaryRuns, maps: Sequence[FoldMap], changed: Mapping[str, Tensor], device: Any
) -> tuple[FeatureMoments, FeatureMoments]:
    """Collect moments of the maps' features against Δ, weights 1/max(‖x‖, ‖y‖)²."""
    sums: SplitSums[FeatureMoments] = SplitSums()

    def add(batch: BoundaryBatch) -> None:
        x, y = (state.to(device, torch.float64) for state in (batch.x, batch.y))
        inputs = features_of(batch, maps, device) if maps else x[:, :0]
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

    paths = [own.site.path for own in maps]
    runs.run(add, paths, changed, parts=sums.parts, key={"fold": paths})
    return sums.totals()


def features_of(batch: BoundaryBatch, maps: Sequence[FoldMap], device: Any) -> Tensor:
    """Return the maps' features side by side, float64."""
    inputs = [own.features(batch.inputs[own.site.path].to(device, torch.float64)) for own in maps]
    return inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)


def _before(fit: FeatureMoments, held_out: FeatureMoments) -> dict[str, float]:
    whole = _whole_error(fit, held_out)
    return {"error_before": whole, "held_out_error_before": held_out.relative_error()}


def _whole_error(fit: FeatureMoments, held_out: FeatureMoments) -> float:
    squares = fit.squares + held_out.squares, fit.state_squares + held_out.state_squares
    return (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0


def _fold_fit(
    name: str,
    runs: BoundaryRuns,
    own: FoldMap,
    total: FeatureMoments,
    held_out: FeatureMoments,
    choice: tuple[Tensor | None, float, dict[float, float]],
    part: Change | None,
    before: Mapping[str, float],
    others: Mapping[str, Tensor] | None = None,
    others_part: Mapping[str, Tensor] | None = None,
) -> OperatorFit:
    """Turn a change of the MLP map into a fit, beside changes of other maps (by path).

    Args:
        name: Name of the fit.
        runs: Runs up to the boundary.
        own: The map.
        total: Moments of all windows, behind `others`.
        held_out: Moments of the held-out windows, behind `others_part`.
        choice: From `fit_fold`.
        part: The change fitted without the held-out windows.
        before: Errors before.
        others: Changed weights of other maps.
        others_part: The same without the held-out windows.
    """
    others, others_part = others or {}, others_part or {}
    _, ridge, errors = choice
    d = solve_fold(total, ridge, [len(total.gram)])
    changes = [Change(d, total.gram), *([] if part is None else [part])]
    if others:  # each behind other maps of its own
        pairs = zip(changes, (others, others_part), strict=False)
        new, *rest = (change_map(runs, own, [change], maps)[0] for change, maps in pairs)
    else:
        new, *rest = change_map(runs, own, changes, {})
    weights, weights_part = {**others, **new.weights}, dict[str, Tensor]()
    after, after_part = total.relative_error(new.kept), None
    for new_part in rest:
        weights_part = {**others_part, **new_part.weights}
        after_part = held_out.relative_error(new_part.kept)
    if not own.is_linear:  # the moments hold what the norm divides by as it was
        after = _whole_error(*_fold_moments(runs, [], weights, own.device))
        if weights_part:
            measured = _fold_moments(runs, [], weights_part, own.device)[1]
            after_part = measured.relative_error()
    diagnostics = {
        "num_tokens": total.num_tokens,
        "hidden_size": total.cross.shape[1],
        "features": len(total.gram),
        **before,
        "error_after": after,
        "held_out_tokens": held_out.num_tokens,
        "held_out_error_after": after_part,
        **fold_record(ridge, errors),
        "maps": list(weights),
    }
    return OperatorFit(
        name=name, tensors={}, diagnostics=diagnostics, weights=weights, weights_part=weights_part
    )


def too_few(boundary: Boundary, tokens: int, features: int) -> tuple[str, ...]:
    """Return a warning if there are too few tokens for a fit of so many features."""
    need = TOKENS_PER_FEATURE * features
    if tokens >= need:
        return ()
    return (
        f"boundary {boundary}: {tokens} calibration tokens for {features} features; a refit of "
        f"weights needs about {need} ({TOKENS_PER_FEATURE} per feature). Use more windows.",
    )
