"""From a pruned model to a recovered one: fit an operator at every boundary, keep what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .guard import Verdict, judge_operators
from .operators import NO_OPERATOR, ROBUST, OperatorFit
from .plan import Boundary, PruningPlan
from .steps import (
    attach_operators_,
    collect_moments,
    find_massive_tokens,
    fit_operator,
    fit_sink_rules,
)
from .sweep import batches_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .config import PruneConfig

# The thresholds that tell massive tokens from others are placed on about this many windows.
RULE_WINDOWS = 32


@dataclass(frozen=True)
class Recovery:
    """Operators of a pruned model.

    Attributes:
        fits: Every operator that was fitted, by boundary.
        verdict: What the guard decided; None if the operators are used as they are.
    """

    fits: Mapping[Boundary, OperatorFit] = field(default_factory=dict)
    verdict: Verdict | None = None

    @property
    def used(self) -> dict[Boundary, OperatorFit]:
        """The operators that are in the model."""
        return {
            boundary: replace(fit, fit_part={})
            for boundary, fit in self.fits.items()
            if self.verdict is None or boundary in self.verdict.kept
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, one line each."""
        lines = () if self.verdict is None else self.verdict.warnings
        return (*lines, *(line for fit in self.used.values() for line in fit.warnings))


def recover_(
    pruned: PreTrainedModel,
    model: PreTrainedModel,
    plan: PruningPlan,
    config: PruneConfig,
    ids: torch.Tensor,
    massive: torch.Tensor | None = None,
    *,
    progress: bool = True,
) -> Recovery:
    """Repair a pruned model in place.

    Args:
        pruned: The pruned model; operators are attached to it.
        model: The dense model.
        plan: The plan.
        config: Settings; `recover`, `ridge` and `batch_size` are read.
        ids: (n, T) calibration windows.
        massive: (n·T,) bool from `NormAccumulator`, if a sweep measured the norms already.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The fits and the guard's verdict.
    """
    if config.recover == NO_OPERATOR:
        return Recovery()
    robust = config.recover in ROBUST
    batches = batches_of(ids, config.batch_size)
    if robust and massive is None:
        massive = find_massive_tokens(model, batches, progress=progress)
    fits = _fit(model, plan, config, ids, massive if robust else None, progress=progress)
    verdict = None
    if robust:
        verdict = judge_operators(
            model, pruned, plan, fits, ids, batch_size=config.batch_size, progress=progress
        )
    recovery = Recovery(fits, verdict)
    if recovery.used:
        attach_operators_(pruned, plan, recovery.used)
    return recovery


def _fit(
    model: PreTrainedModel,
    plan: PruningPlan,
    config: PruneConfig,
    ids: torch.Tensor,
    massive: torch.Tensor | None,
    *,
    progress: bool,
) -> dict[Boundary, OperatorFit]:
    """Fit the operator of every boundary; `massive` marks the tokens for robust ones."""
    batches = batches_of(ids, config.batch_size)
    moments = collect_moments(model, batches, plan.boundaries, massive=massive, progress=progress)
    rules = {}
    if massive is not None:
        some = slice(None, None, max(1, len(ids) // RULE_WINDOWS))
        sample = massive.view(len(ids), -1)[some].flatten()
        batches = batches_of(ids[some], config.batch_size)
        rules = fit_sink_rules(model, batches, moments, sample, progress=progress)
    return {
        boundary: fit_operator(
            moments.pop(boundary),
            operator=config.recover,
            ridge=config.ridge,
            dtype=model.dtype,
            sinks=rules.get(boundary),
        )
        for boundary in plan.boundaries
    }
