"""From checked settings to a repaired model: the middle of `pipeline.prune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .budget_choice import choose_for_budget
from .recovered import Recovery
from .recovery import prepare_recovery, recover_
from .selection import Measured, Selection
from .steps import checked_cut, cut

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .budgets import SizeBudget
    from .config import PruneConfig
    from .fold_plan import FoldPlan
    from .plan import PruningPlan


@dataclass
class PruningRun:
    """One pruning run between the checks of its settings and its result.

    Attributes:
        model: The dense model; it is left as it is.
        config: Settings.
        allowed: Layers that a selector may remove.
        measured: What a first sweep gave, if there was one already.
        progress: Show progress bars when standard error is a terminal.
        given: What `cut_` made.
        finite: Whether the logits of what it made are finite.
    """

    model: PreTrainedModel
    config: PruneConfig
    allowed: Sequence[int]
    measured: Measured | None = None
    progress: bool = True
    given: tuple[Selection, PreTrainedModel, FoldPlan] | None = None
    finite: bool = True

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of a model that no sweep has read."""
        if self.finite:
            return ()
        dtype = str(self.model.dtype).removeprefix("torch.")
        return (
            f"the logits of the pruned model are not finite in {dtype}: check the weights of the "
            "layers that stay",
        )

    def cut_(self, plan: PruningPlan) -> None:
        """Cut by a plan that is known before any calibration, so that a refusal comes early."""
        massive = None if self.measured is None else self.measured.massive
        pruned, self.finite = checked_cut(self.model, plan)
        folds = prepare_recovery(self.model, plan, self.config)
        self.given = Selection(plan, massive=massive), pruned, folds

    def repaired(
        self, ids: torch.Tensor, budget: SizeBudget | None
    ) -> tuple[Selection, PreTrainedModel, Recovery, Sequence[dict[str, Any]]]:
        """Choose the layers if they are not given, and repair the pruned model.

        Args:
            ids: (n, T) int64 calibration windows; n may be 0 if nothing reads them.
            budget: From `size_budget`, if it is a budget by size.

        Returns:
            The layers, the repaired model, its repairs, and what a budget by perplexity tried.
        """
        model, config, folds = self.model, self.config, None
        if self.given is not None:
            chosen, pruned, folds = self.given
        else:
            chosen, found = choose_for_budget(
                model,
                ids,
                config,
                allowed=self.allowed,
                measured=self.measured,
                budget=budget,
                progress=self.progress,
            )
            if found is not None:
                return chosen, found.pruned, found.recovery, found.probes
            pruned = cut(model, chosen.plan)
        recovery = recover_(
            pruned,
            model,
            chosen.plan,
            config,
            ids,
            chosen.massive,
            folds=folds,
            progress=self.progress,
        )
        return chosen, pruned, recovery, ()
