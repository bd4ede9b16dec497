"""From a budget to the layers that go, whatever kind of budget it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .budget_values import with_num_remove
from .ppl_budget import Found, search_num_remove
from .selection import Measured, Selection, choose_layers, measure, reads_similarity

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .budgets import SizeBudget
    from .config import PruneConfig


def choose_for_budget(
    model: PreTrainedModel,
    ids: torch.Tensor,
    config: PruneConfig,
    *,
    allowed: Sequence[int],
    measured: Measured | None = None,
    budget: SizeBudget | None = None,
    progress: bool = True,
) -> tuple[Selection, Found | None]:
    """Choose the layers that go, for any budget but `layers`, on one first sweep or none.

    Args:
        model: The dense model.
        ids: (n, T) int64 calibration windows.
        config: Settings.
        allowed: Layers that may go.
        measured: What a first sweep gave; None runs it if the selector reads it.
        budget: From `size_budget`, if it is a budget by size.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The selection; and the repaired model where finding the number of layers took one.

    Raises:
        PlanError: If the budget cannot be met.
        CalibrationError: If there are too few windows, or a state is not finite.
    """
    if measured is None and reads_similarity(config):
        measured = measure(model, ids, config, progress=progress)

    def choose(count: int) -> Selection:
        counted = with_num_remove(config, count)
        return choose_layers(
            model, ids, counted, allowed=allowed, measured=measured, progress=progress
        )

    if config.num_remove is not None:
        return choose(config.num_remove), None
    if budget is not None:
        return budget.choose(allowed, choose, config.select), None
    found = search_num_remove(model, config, ids, allowed, choose, progress=progress)
    return found.chosen, found
