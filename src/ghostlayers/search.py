"""`--select auto`: the cut whose repaired model has the lowest loss on held-out windows.

A few windows rank cuts that are nearly alike by chance, and the lowest of many is often low by
chance. So the best cut of a selector is taken unless another one is better by more than the noise.

Candidates are what the selectors remove, and swaps of one layer around the best of them. Each is
repaired in closed form without the held-out windows, and scored on these by `suffix`. What it
costs, in passes over the search windows (at most 32, of which 24 fit and 8 score): one sweep for
the moments of the first candidates and one per round of swaps, and two suffix passes over a
quarter of the windows for each candidate. At most about 10 + ROUNDS · SWAPS candidates: below 6
sweeps for the moments and 17 passes of the part of the model behind the first removed layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from . import distributed
from .candidates import Candidate, starting_candidates, swaps
from .config import PruneConfig
from .decoder import text_config
from .errors import CalibrationError, UnsupportedModelError
from .guard_gain import finite_mean
from .guard_text import guard_windows
from .moments import HELD_OUT_EVERY
from .operators import LINEARPATCH, NO_OPERATOR, ROBUST, OperatorFit
from .plan import Boundary, PruningPlan
from .scored_cut import Scored, choose
from .selectors import AUTO_MIN_WINDOWS, SelectionContext
from .steps import collect_moments, cut, fit_operator, fit_sink_rules
from .suffix import SuffixScorer, first_state
from .sweep import batches_of
from .token_classes import SinkRule, rule_sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEARCH_WINDOWS = 32
ROUNDS = 4
SWAPS = 6
# Moments of as many boundaries as fit in this are collected in one sweep.
MAX_MOMENTS_BYTES = 4 * 2**30
RULE_WINDOWS = 8
# Operators that can stand at any boundary by themselves; any other is scored as ROBUST_OPERATOR.
BOUNDARY_OPERATORS = ("ghost", "ghost-robust", "ghost-norm", *LINEARPATCH)
ROBUST_OPERATOR = "ghost-robust"


def scoring_operator(recover: str) -> str:
    """Return the operator with which candidates are repaired for scoring."""
    return recover if recover in (*BOUNDARY_OPERATORS, NO_OPERATOR) else ROBUST_OPERATOR


def needs_massive(config: PruneConfig) -> bool:
    """Say whether the search wants to know the massive tokens."""
    return scoring_operator(config.recover) in ROBUST


def search_windows(num_windows: int) -> list[int]:
    """List up to `SEARCH_WINDOWS` windows: groups of four, evenly spread.

    The last window of each group is held out, as in the whole calibration.
    """
    if num_windows <= SEARCH_WINDOWS:
        return list(range(num_windows))
    groups, wanted = num_windows // HELD_OUT_EVERY, SEARCH_WINDOWS // HELD_OUT_EVERY
    firsts = [HELD_OUT_EVERY * (index * groups // wanted) for index in range(wanted)]
    return [first + step for first in firsts for step in range(HELD_OUT_EVERY)]


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plan: The cut taken.
        record: JSON values: how it was searched, and every candidate, the lowest loss first.
    """

    plan: PruningPlan
    record: dict[str, Any]


class _Judge:
    """Repairs and scores candidates; measures each boundary and each lower part once.

    What is kept between rounds: the operators fitted (C · C numbers of the model's dtype for each
    boundary) and the dense states at the starts of cuts (see `suffix`).

    Args:
        model: The dense model.
        ids: (n, T) int64, the search windows.
        config: Settings; `recover`, `ridge` and `batch_size` are read.
        massive: (n·T,) bool, the massive tokens of these windows, if the operator asks for them.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        config: PruneConfig,
        massive: torch.Tensor | None,
        *,
        progress: bool,
    ) -> None:
        self.model, self.ids, self.config, self.massive = model, ids, config, massive
        self.progress = progress
        self.operator = scoring_operator(config.recover)
        self.scorer = SuffixScorer(
            model, guard_windows(ids), batch_size=config.batch_size, progress=False
        )
        self.fits: dict[Boundary, OperatorFit] = {}
        self.refused: dict[tuple[int, ...], UnsupportedModelError] = {}

    def score(self, candidates: Sequence[Candidate], depth: int, what: str) -> list[Scored]:
        """Score candidates; those that the architecture refuses are left out and noted."""
        cuts = []
        for candidate in candidates:
            plan = PruningPlan(depth, candidate.removed)
            try:
                cuts.append((candidate, plan, cut(self.model, plan)))
            except UnsupportedModelError as error:
                self.refused[candidate.removed] = error
        if self.operator != NO_OPERATOR:
            self._fit({boundary for _, plan, _ in cuts for boundary in plan.boundaries})
        self.scorer.keep(first_state(plan) for _, plan, _ in cuts)
        scored = []
        off = None if self.progress else True
        for candidate, plan, pruned in tqdm(cuts, desc=what, disable=off, unit="cut"):
            suffix = self.scorer.suffix(pruned, plan)
            none = repaired = tuple(self.scorer.losses(suffix))
            if self.operator != NO_OPERATOR:
                fits = {boundary: self.fits[boundary] for boundary in plan.boundaries}
                repaired = tuple(self.scorer.losses(suffix.with_operators(fits)))
            scored.append(Scored(candidate, none, repaired))
        return scored

    def record(self) -> dict[str, Any]:
        """Return JSON values: with what it was judged, and what the architecture refused."""
        refused = [
            {"layers": list(removed), "reason": str(error)}
            for removed, error in self.refused.items()
        ]
        return {
            "operator": self.operator,
            "windows": len(self.ids),
            "held_out_windows": len(self.scorer.ids),
            "window": self.ids.shape[1],
            "refused": refused,
        }

    def _fit(self, boundaries: set[Boundary]) -> None:
        """Fit the operators of new boundaries, without the held-out windows."""
        missing = sorted(boundaries - set(self.fits))
        size = text_config(self.model.config).hidden_size
        count = max(1, MAX_MOMENTS_BYTES // (8 * 8 * size**2))
        batches = batches_of(self.ids, self.config.batch_size)
        for first in range(0, len(missing), count):
            group = missing[first : first + count]
            moments = collect_moments(
                self.model,
                batches,
                group,
                operator=self.operator,
                massive=self.massive,
                progress=self.progress,
            )
            rules = self._sink_rules(moments)
            for boundary in group:
                fit = fit_operator(
                    moments.pop(boundary),
                    operator=self.operator,
                    ridge=self.config.ridge if self.operator == self.config.recover else 0.0,
                    dtype=self.model.dtype,
                    sinks=rules.get(boundary),
                    rank=self.config.rank,
                    by_rank=False,
                )
                part = {name: tensor.cpu() for name, tensor in fit.fit_part.items()}
                self.fits[boundary] = OperatorFit(fit.name, part, {}, spec=fit.spec)

    def _sink_rules(self, moments: dict[Boundary, Any]) -> dict[Boundary, SinkRule]:
        if self.massive is None:
            return {}
        ids, sample = rule_sample(self.ids, self.massive, RULE_WINDOWS)
        batches = batches_of(ids, self.config.batch_size)
        return fit_sink_rules(self.model, batches, moments, sample, progress=self.progress)


def search_layers(
    model: PreTrainedModel,
    ids: torch.Tensor,
    context: SelectionContext,
    config: PruneConfig,
    *,
    massive: torch.Tensor | None = None,
    progress: bool = True,
) -> SearchResult:
    """Find the layers to remove by the loss of the repaired model on held-out windows.

    The best cut of a selector is taken, or of those that are better there by more than chance the
    best one (`choose`).

    Args:
        model: The dense model; it is left as it is.
        ids: (n, T) int64 calibration windows.
        context: Similarities, budget and allowed layers.
        config: Settings; `recover`, `ridge` and `batch_size` are read.
        massive: (n·T,) bool, the massive tokens; needed if `needs_massive`.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The cut taken, and every candidate with its losses.

    Raises:
        CalibrationError: If there are fewer than `AUTO_MIN_WINDOWS` windows.
        UnsupportedModelError: If the architecture refuses every candidate.
    """
    if len(ids) < AUTO_MIN_WINDOWS:
        raise CalibrationError(
            f"`select` auto compares cuts on held-out windows and there are {len(ids)} calibration "
            f"windows. Use at least {AUTO_MIN_WINDOWS}, or another selector."
        )
    chosen = search_windows(len(ids))
    if massive is not None:
        massive = massive.view(len(ids), -1)[chosen].flatten()
    judge = _Judge(model, ids[chosen], config, massive, progress=progress)
    depth = context.similarity.num_layers
    start = distributed.same(starting_candidates(context))
    lossless = judge.scorer.dense_losses(
        {first_state(PruningPlan(depth, candidate.removed)) for candidate in start}
    )
    scored = judge.score(start, depth, "auto: selectors")
    if not scored:
        raise next(iter(judge.refused.values()))
    rounds = _swap_rounds(judge, context, scored)
    ranked = sorted(scored, key=lambda item: item.loss)  # stable: ties go to the earlier one
    choice = choose(ranked)
    record = {
        **judge.record(),
        "rounds": rounds,
        "loss_dense": finite_mean(lossless),
        "taken": list(choice.taken.candidate.removed),
        "required_standard_errors": choice.errors if math.isfinite(choice.errors) else None,
        "candidates": [item.to_dict(choice.selected) for item in ranked],
    }
    return SearchResult(PruningPlan(depth, choice.taken.candidate.removed), record)


def _swap_rounds(judge: _Judge, context: SelectionContext, scored: list[Scored]) -> int:
    """Swap layers around the best cut while that helps; add to `scored`, return the rounds."""
    best = min(scored, key=lambda item: item.loss)
    seen = {item.candidate.removed for item in scored} | set(judge.refused)
    for number in range(1, ROUNDS + 1):
        near = [swap for swap in swaps(context, best.candidate.removed) if swap.removed not in seen]
        near = near[:SWAPS]
        if not near:
            return number - 1
        seen |= {swap.removed for swap in near}
        scored += judge.score(near, context.similarity.num_layers, f"auto: swaps {number}")
        leader = min(scored, key=lambda item: item.loss)
        if leader is best:
            return number
        best = leader
    return ROUNDS
