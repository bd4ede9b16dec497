"""From a pruned model to a recovered one: fit a repair at every boundary, keep what helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .boundary_runs import RULE_WINDOWS, BoundaryRuns, repaired_student
from .fit_ladder import fit_ladder, ridges_of
from .fold_plan import FoldPlan, moments_device, plan_folds
from .folding import fit_fold_boundary
from .guard import MIN_WINDOWS
from .joint_folding import fit_fold_ghost_boundary
from .moments import SplitMoments
from .norm_moments import moments_of_operator
from .operators import FOLDING, GUARDED, NO_OPERATOR, REPLACING, ROBUST, OperatorFit
from .plan import Boundary, PruningPlan
from .recovered import Ladder, Recovery, finish_
from .repairs import is_tested, with_parts_of, without_held_out
from .replacing import fit_replaceme_boundary
from .steps import (
    collect_moments,
    find_massive_tokens,
    fit_sink_rules,
)
from .sweep import batches_of
from .token_classes import SinkRule, rule_sample

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .config import PruneConfig
    from .guard_text import GuardScorer


def prepare_recovery(model: PreTrainedModel, plan: PruningPlan, config: PruneConfig) -> FoldPlan:
    """Check, before any calibration, that the plan can be repaired as asked.

    Raises:
        UnsupportedModelError: If a boundary has no map to fold into.
        CalibrationError: If the moments do not fit into memory.
        GhostlayersError: If `moments_device` cannot be used.
    """
    if config.recover == NO_OPERATOR:
        return FoldPlan({})
    moments_device(model, config)
    return plan_folds(model, plan, config) if config.recover in FOLDING else FoldPlan({})


def recover_(
    pruned: PreTrainedModel,
    model: PreTrainedModel,
    plan: PruningPlan,
    config: PruneConfig,
    ids: torch.Tensor,
    massive: torch.Tensor | None = None,
    *,
    folds: FoldPlan | None = None,
    scorer: GuardScorer | None = None,
    progress: bool = True,
) -> Recovery:
    """Repair a pruned model in place.

    Args:
        pruned: The pruned model, made by `share_tensors`; changed weights become new parameters.
        model: The dense model.
        plan: The plan.
        config: Settings of the recovery.
        ids: (n, T) calibration windows.
        massive: (n·T,) bool from `NormAccumulator`, if a sweep measured the norms already.
        folds: From `prepare_recovery`, if that was called already.
        scorer: From `guard_scorer`, if several plans are judged on the same windows.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The fits and the guard's verdict.
    """
    if config.recover == NO_OPERATOR:
        return Recovery()
    folds = prepare_recovery(model, plan, config) if folds is None else folds
    robust = config.recover in ROBUST
    if robust and massive is None:
        batches = batches_of(ids, config.batch_size)
        massive = find_massive_tokens(model, batches, progress=progress)
    fitter = _Fitter(
        pruned, model, plan, config, ids, massive if robust else None, folds, progress=progress
    )
    ladders = fitter.ladders()
    return finish_(
        pruned,
        model,
        plan,
        config,
        ids,
        ladders,
        warnings=folds.warnings,
        scorer=scorer,
        progress=progress,
    )


@dataclass(frozen=True)
class _Fitter:
    """Fits the repairs of a plan, one boundary after the other or all at once."""

    pruned: PreTrainedModel
    model: PreTrainedModel
    plan: PruningPlan
    config: PruneConfig
    ids: torch.Tensor
    massive: torch.Tensor | None
    folds: FoldPlan
    progress: bool = True

    def ladders(self) -> dict[Boundary, Ladder]:
        """Fit every boundary; the same states serve all of them unless `fit` is sequential.

        What the guard tests must not have seen the held-out windows, not even through the repairs
        before it: a second student, with repairs fitted without them, gives the states for that.
        """
        boundaries = self.plan.boundaries
        sequential = self.config.fit == "sequential"
        if self.config.recover not in FOLDING and not sequential:
            return self._on_dense_states(boundaries)
        found: dict[Boundary, Ladder] = {}
        for boundary in boundaries:
            repairs = {done: ladder[0] for done, ladder in found.items()} if sequential else {}
            ladder = self._fit(self._runs(boundary, repairs))
            if self._tests(repairs):
                repairs = {done: without_held_out(fit) for done, fit in repairs.items()}
                tested = self._fit(self._runs(boundary, repairs), ridges_of(ladder))
                ladder = with_parts_of(ladder, tested)
            found[boundary] = ladder
        return found

    def _tests(self, repairs: Mapping[Boundary, OperatorFit]) -> bool:
        """Whether what is fitted behind these repairs will be tested on held-out windows."""
        tested = self.config.recover in GUARDED or self.config.max_ppl_ratio is not None
        tested = tested and len(self.ids) >= MIN_WINDOWS
        return bool(repairs) and tested and all(map(is_tested, repairs.values()))

    def _runs(self, boundary: Boundary, repairs: Mapping[Boundary, OperatorFit]) -> BoundaryRuns:
        student = None
        if repairs:
            student = repaired_student(self.pruned, self.plan, boundary, repairs)
        return BoundaryRuns(
            self.model, boundary, self.ids, self.config.batch_size, student, self.progress
        )

    def _fit(self, runs: BoundaryRuns, ridges: Sequence[float] = ()) -> Ladder:
        boundary = runs.boundary
        if boundary in self.folds.sites:
            sites = self.folds.sites[boundary]
            if self.config.recover in REPLACING:
                return fit_replaceme_boundary(runs, sites.mlp, self.config)
            if self.config.recover == "fold":
                return fit_fold_boundary(runs, sites, self.config)
            assert self.massive is not None
            return fit_fold_ghost_boundary(runs, sites, self.config, self.massive, ridges)
        if runs.student is None:
            return self._on_dense_states([boundary])[boundary]
        zeros = moments_of_operator(self.config.recover, self.model.config)
        split = runs.split_moments(massive=self.massive, device=self._device(), zeros=zeros)
        rule = None
        if self.massive is not None:
            rule = runs.sink_rule(split, self.massive)
        return self._operator(split, rule, ridges)

    def _on_dense_states(self, boundaries: Sequence[Boundary]) -> dict[Boundary, Ladder]:
        batches = batches_of(self.ids, self.config.batch_size)
        moments = collect_moments(
            self.model,
            batches,
            boundaries,
            operator=self.config.recover,
            massive=self.massive,
            device=self._device(),
            progress=self.progress,
        )
        rules: dict[Boundary, SinkRule] = {}
        if self.massive is not None:
            ids, sample = rule_sample(self.ids, self.massive, RULE_WINDOWS)
            batches = batches_of(ids, self.config.batch_size)
            rules = fit_sink_rules(self.model, batches, moments, sample, progress=self.progress)
        return {b: self._operator(moments.pop(b), rules.get(b)) for b in boundaries}

    def _operator(
        self, moments: SplitMoments, rule: SinkRule | None, ridges: Sequence[float] = ()
    ) -> Ladder:
        """Fit the attached operator alone: where nothing is folded, or where that is refused."""
        folding = self.config.recover in FOLDING
        return fit_ladder(
            moments,
            operator="ghost-robust" if folding else self.config.recover,
            ridge=0.0 if folding else self.config.ridge,
            dtype=self.model.dtype,
            sinks=rule,
            rank=self.config.rank,
            ridges=ridges,
        )

    def _device(self) -> torch.device | None:
        auto = self.config.moments_device == "auto"
        return None if auto else moments_device(self.model, self.config)
