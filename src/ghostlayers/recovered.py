"""What was fitted at the boundaries, refined, judged and put into the pruned model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .guard import MIN_WINDOWS, Verdict, judge_repairs
from .guard_text import GuardScorer, guard_scorer
from .operators import GUARDED, OperatorFit
from .plan import Boundary, PruningPlan
from .refinement import Refined, refine_repairs
from .repairs import apply_repairs_

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .config import PruneConfig

Ladder = tuple[OperatorFit, ...]


@dataclass(frozen=True)
class Recovery:
    """Repairs of a pruned model.

    Attributes:
        ladders: Every repair that was fitted, by boundary, the most complex one first.
        verdict: What the guard decided; None if the first ones are used as they are.
        changed: Names of the pruned model's parameters that hold new values.
        notes: What the user should know beside the warnings of the fits.
        refinement: JSON values of the refinement; None if there was none.
    """

    ladders: Mapping[Boundary, Ladder] = field(default_factory=dict)
    verdict: Verdict | None = None
    changed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    refinement: dict[str, Any] | None = None

    @property
    def used(self) -> dict[Boundary, OperatorFit]:
        """The repairs that are in the model."""
        chosen = {boundary: ladder[0] for boundary, ladder in self.ladders.items()}
        if self.verdict is not None:
            chosen = {b: self.verdict.chosen[b] for b in chosen if b in self.verdict.chosen}
        return {b: replace(fit, fit_part={}, weights_part={}) for b, fit in chosen.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, one line each."""
        lines = () if self.verdict is None else self.verdict.warnings
        fits = [ladder[0] for ladder in self.ladders.values() if ladder[0].weights]
        own = [line for fit in (*fits, *self.used.values()) for line in fit.warnings]
        return (*self.notes, *lines, *dict.fromkeys(own))


def finish_(
    pruned: PreTrainedModel,
    model: PreTrainedModel,
    plan: PruningPlan,
    config: PruneConfig,
    ids: torch.Tensor,
    ladders: dict[Boundary, Ladder],
    *,
    warnings: tuple[str, ...] = (),
    scorer: GuardScorer | None = None,
    progress: bool = True,
) -> Recovery:
    """Refine and judge what was fitted, and put what stays into the pruned model, in place.

    Args:
        pruned: The pruned model, made by `share_tensors`; changed weights become new parameters.
        model: The dense model.
        plan: The plan.
        config: Settings of the recovery.
        ids: (n, T) calibration windows.
        ladders: The fits by boundary, the most complex one first.
        warnings: What the user should know before any of the fits.
        scorer: From `guard_scorer`, if several plans are judged on the same windows.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The fits and the guard's verdict.
    """
    if scorer is None and config.recover in GUARDED and len(ids) >= MIN_WINDOWS:
        # One for both: what the dense model writes is written once.
        scorer = guard_scorer(model, ids, batch_size=config.batch_size, progress=progress)
    refined = Refined(ladders, None)
    if config.refine_steps:
        refined = refine_repairs(
            model,
            pruned,
            plan,
            ladders,
            ids,
            steps=config.refine_steps,
            batch_size=config.batch_size,
            seed=config.seed,
            scorer=scorer,
            progress=progress,
        )
    verdict = None
    if config.recover in GUARDED:
        verdict = judge_repairs(
            model,
            pruned,
            plan,
            refined.ladders,
            ids,
            batch_size=config.batch_size,
            scorer=scorer,
            progress=progress,
        )
    notes = (*warnings, *refined.notes)
    recovery = Recovery(refined.ladders, verdict, notes=notes, refinement=refined.record)
    return replace(recovery, changed=apply_repairs_(pruned, plan, recovery.used))


__all__ = ["Ladder", "Recovery", "finish_"]
