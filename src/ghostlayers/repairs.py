"""Put what was fitted at the boundaries into a pruned model: new weights, operators, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .changed_weights import change_weights_, layers_prefix
from .operators import RIDGED, OperatorFit
from .plan import Boundary, PruningPlan
from .steps import attach_operators_

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def without_held_out(fit: OperatorFit) -> OperatorFit:
    """Return the same fit as it came out without the held-out windows; for the guard."""
    return replace(fit, tensors=fit.fit_part, weights=fit.weights_part)


def is_tested(fit: OperatorFit) -> bool:
    """Whether the same fit without the held-out windows is there."""
    return bool(fit.fit_part or fit.weights_part)


def with_parts_of(
    ladder: Sequence[OperatorFit], others: Sequence[OperatorFit]
) -> tuple[OperatorFit, ...]:
    """Take what was fitted without the held-out windows from other fits of the same names.

    Fits of which the guard may choose the ridge are paired by that as well. How massive tokens are
    told apart belongs to the threshold in a fit's `spec`: it stays. A fit without counterpart keeps
    its own.
    """
    by_key = {_key(fit): fit for fit in others}

    def joined(fit: OperatorFit) -> OperatorFit:
        other = by_key.get(_key(fit))
        if other is None or set(other.fit_part) != set(fit.fit_part):
            return fit
        own = {k: v for k, v in fit.fit_part.items() if k == "sink_direction"}
        return replace(fit, fit_part={**other.fit_part, **own}, weights_part=other.weights_part)

    return tuple(map(joined, ladder))


def _key(fit: OperatorFit) -> tuple[str, float | None]:
    return fit.name, fit.diagnostics["ridge"] if fit.name in RIDGED else None


def apply_repairs_(
    pruned: PreTrainedModel, plan: PruningPlan, fits: Mapping[Boundary, OperatorFit]
) -> frozenset[str]:
    """Repair a pruned model in place.

    Args:
        pruned: The pruned model, or a prefix of it that holds the layers in question; made by
            `share_tensors`.
        plan: The plan by which it was pruned.
        fits: One fit per repaired boundary.

    Returns:
        Names of the parameters that hold new values.
    """
    prefix = layers_prefix(pruned)
    values = {
        f"{prefix}{plan.kept.index(boundary.start - 1)}.{path}": weight
        for boundary, fit in fits.items()
        for path, weight in fit.weights.items()
    }
    changed = change_weights_(pruned, values) if values else frozenset()
    attached = {boundary: fit for boundary, fit in fits.items() if fit.tensors}
    if attached:
        attach_operators_(pruned, plan, attached)
    return changed


def with_change(fit: OperatorFit, name: str, change: Tensor) -> OperatorFit:
    """Return a fit with a change added to a weight (stored layout) or a tensor (transposed).

    The change is one of the repair fitted without the held-out windows. Where a norm stands behind
    a map, the repair fitted on all windows may have another gain there, by a factor of a hundred in
    a channel that hardly adds to what the norm divides by: it gets what has the same effect.
    """

    def added(old: Mapping[str, Tensor], change: Tensor) -> dict[str, Tensor]:
        if name not in old:
            return dict(old)
        value = old[name].float() + change.to(old[name].device)
        return {**old, name: value.to(old[name].dtype)}

    if name in fit.weights:
        whole = _behind_other_gain(fit, name, change)
        weights, part = added(fit.weights, whole), added(fit.weights_part, change)
        return replace(fit, weights=weights, weights_part=part)
    tensors, part = added(fit.tensors, change.T), added(fit.fit_part, change.T)
    return replace(fit, tensors=tensors, fit_part=part)


def _behind_other_gain(fit: OperatorFit, name: str, change: Tensor) -> Tensor:
    site = fit.sites.get(name)
    norm = None if site is None else site.norm
    if site is None or norm is None or norm.weight not in fit.weights_part:
        return change
    device = change.device  # need not have float64
    part, whole = (
        norm.offset + w[norm.weight].to(device, torch.float32)
        for w in (fit.weights_part, fit.weights)
    )
    ratio = torch.where(part == whole, 1.0, part / whole)
    same: Tensor = site.stored(site.stored(change) * ratio).contiguous()
    return same
