"""Put what was fitted at the boundaries into a pruned model: new weights, operators, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .changed_weights import change_weights_, layers_prefix
from .operators import OperatorFit
from .plan import Boundary, PruningPlan
from .steps import attach_operators_

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def without_held_out(fit: OperatorFit) -> OperatorFit:
    """Return the same fit as it came out without the held-out windows; for the guard."""
    return replace(fit, tensors=fit.fit_part, weights=fit.weights_part)


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
