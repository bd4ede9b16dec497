"""The guard: a repair stays only if the pruned model's loss on held-out windows says so.

A lower error of the hidden state is no proof: removing one shallow layer of SmolLM2 and fitting an
operator lowers the error on other text too and raises perplexity there. What generalises from one
corpus to another is a gain that is a large part of the damage and well above its own noise.

Held-out windows are of the calibration text, and few windows are of few documents: a repair can
learn their subject. So text that the dense model writes counts as much as they do, and what stays
must win back a part of what the cut loses there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .decoder import share_tensors
from .guard_gain import MIN_ERRORS, Gain, finite_mean, gain, share_won
from .guard_ladder import MIN_ERRORS_SIMPLER, Choice, Ladders, Losses, go_down
from .guard_text import GuardScorer, guard_scorer
from .operators import NO_OPERATOR, OperatorFit
from .plan import Boundary, PruningPlan
from .repairs import apply_repairs_, is_tested, without_held_out
from .suffix import Suffix, SuffixScorer, first_state

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MIN_WINDOWS = 4
# Share of the lost nats that the operators must win back, on held-out windows and on written text.
MIN_RECOVERED = 0.25
MIN_WRITTEN = 0.1
REQUIRED = {
    "required_share": MIN_RECOVERED,
    "required_standard_errors": MIN_ERRORS,
    "required_standard_errors_over_simpler": MIN_ERRORS_SIMPLER,
}


@dataclass(frozen=True)
class Verdict:
    """What the guard decided.

    Attributes:
        chosen: The repair of each boundary that has one.
        boundaries: JSON values by boundary: what was tried against what, and what it gains.
        record: JSON values of the whole: windows, losses, share recovered, or why it was skipped.
        warnings: One line each.
    """

    chosen: Mapping[Boundary, OperatorFit]
    boundaries: Mapping[Boundary, dict[str, Any]]
    record: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Boundary, ...]:
        """Boundaries with a repair."""
        return tuple(self.chosen)


def first_changed_layer(plan: PruningPlan, ladders: Ladders) -> int:
    """Return the first layer of the dense model that a cut or one of its repairs changes."""
    folded = [
        boundary.start - 1
        for boundary, ladder in ladders.items()
        if any(fit.weights for fit in ladder)
    ]
    return min([first_state(plan), *folded])


class _Trial:
    """The pruned model with repairs fitted without the held-out windows, one choice at a time."""

    def __init__(self, scorer: SuffixScorer, bare: Suffix) -> None:
        self.scorer, self.bare = scorer, bare
        self.none = scorer.losses(bare)

    def losses(self, choice: Mapping[Boundary, OperatorFit]) -> list[float]:
        """Return the losses with a choice of repairs; the other boundaries have none."""
        if not choice:
            return self.none
        model = share_tensors(self.bare.model)
        parts = {boundary: without_held_out(fit) for boundary, fit in choice.items()}
        apply_repairs_(model, self.bare.plan, parts)
        return self.scorer.losses(replace(self.bare, model=model))


def judge_repairs(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    ladders: Ladders,
    ids: torch.Tensor,
    *,
    batch_size: int = 1,
    scorer: GuardScorer | None = None,
    progress: bool = True,
) -> Verdict:
    """Decide which repairs stay.

    The most complex repair of every boundary is in the pruned model at first. From the output side
    on each boundary goes down its ladder (`guard_ladder`): a heavier ridge replaces the present one
    if it gains more than one standard error over it, and another simpler repair unless the present
    one gains more than one standard error over that (two over none). A gain is the mean of that on
    held-out windows and that on text which the dense model writes. What is left must win back a
    quarter of the nats that the cut loses on held-out windows and a tenth on the written text, each
    by more than two standard errors; or all go.

    Args:
        dense: The dense model.
        pruned: The pruned model without repairs; it is left as it is.
        plan: The plan.
        ladders: Fits of every boundary, the most complex first, each also fitted without the
            held-out windows.
        ids: (n, T) calibration windows that the fits are from.
        batch_size: Windows per forward pass.
        scorer: From `guard_scorer`, if several plans are judged on the same windows.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The verdict. With fewer than `MIN_WINDOWS` windows the first repair of every boundary stays,
        with a warning.
    """
    first = {boundary: ladder[0] for boundary, ladder in ladders.items() if ladder}
    fits = [fit for ladder in ladders.values() for fit in ladder]
    if len(ids) < MIN_WINDOWS or not all(map(is_tested, fits)):
        return _untested(first, len(ids))
    scorer = scorer or guard_scorer(dense, ids, batch_size=batch_size, progress=progress)
    start = first_changed_layer(plan, ladders)
    lossless = [scorer.dense_losses([start])]
    probe, why = _written(scorer, lossless[0])
    probes = [scorer] if probe is None else [scorer, probe]
    lossless += [other.dense_losses([start]) for other in probes[1:]]
    trials = [_Trial(probe, probe.suffix(pruned, plan, start)) for probe in probes]

    def losses(choice: Choice) -> Losses:
        return [trial.losses(choice) for trial in trials]

    bare, tried = [trial.none for trial in trials], losses(first)
    damage = [gain(*pair) for pair in zip(bare, lossless, strict=True)]
    required = zip(damage, (MIN_RECOVERED, MIN_WRITTEN), strict=False)
    wanted = [_part(lost, share) for lost, share in required]
    chosen, current, boundaries = go_down(ladders, first, bare, tried, losses, wanted)
    tests = [
        _Test(*found)
        for found in zip(probes, lossless, bare, tried, current, damage, wanted, strict=True)
    ]
    enough = tests[0].share >= MIN_RECOVERED and tests[0].gain.is_sure
    refused = bool(chosen) and enough and not all(test.passed for test in tests[1:])
    if refused or not enough:
        chosen = {}
    for boundary, entry in boundaries.items():
        entry["kept"] = boundary in chosen
        entry["chosen"] = chosen[boundary].name if boundary in chosen else NO_OPERATOR
    written = tests[1].record() if probe is not None else {"skipped": why}
    if probe is not None:
        written |= {"required_share": MIN_WRITTEN, "kept": tests[1].passed}
    record = {**tests[0].record(), **REQUIRED, "written_text": written}
    record["loss_chosen"] = finite_mean(current[0] if chosen else bare[0])
    lines = _dropped(ladders, chosen, tests, refused=refused, tokens=int(ids.numel()))
    return Verdict(chosen, boundaries, record, lines)


def _written(scorer: GuardScorer, lossless: Sequence[float]) -> tuple[SuffixScorer | None, str]:
    """Return what scores text that the dense model writes, or None and why there is none."""
    if not math.isfinite(finite_mean(lossless)):
        return None, "the loss of the dense model is not finite"
    return scorer.written(), "a weight of the model is offloaded"


def _part(lost: Gain, share: float) -> float:
    """Return a share of what a cut loses, in nats; 0 where that is nothing or without bound."""
    return share * lost.mean if 0 < lost.mean < math.inf else 0.0


@dataclass(frozen=True)
class _Test:
    """What all repairs, and those that are left of them, come to on one text."""

    scorer: SuffixScorer
    lossless: Sequence[float]
    none: Sequence[float]
    tried: Sequence[float]
    left: Sequence[float]
    damage: Gain
    wanted: float

    @property
    def gain(self) -> Gain:
        return gain(self.none, self.left)

    @property
    def share(self) -> float:
        return share_won(self.gain, self.damage)

    @property
    def tried_share(self) -> float:
        return share_won(gain(self.none, self.tried), self.damage)

    @property
    def passed(self) -> bool:
        return self.gain.is_sure and self.gain.mean > self.wanted

    def record(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "windows": len(self.scorer.ids),
            "window": self.scorer.ids.shape[1],
            "loss_dense": finite_mean(self.lossless),
            "loss_none": finite_mean(self.none),
            "loss_all_operators": finite_mean(self.tried),
            "loss_chosen": finite_mean(self.left),
            "recovered_share": self.share,
            "gain": self.gain.mean,
            "gain_standard_error": self.gain.error,
        }


def _untested(first: Mapping[Boundary, OperatorFit], num_windows: int) -> Verdict:
    line = (
        f"{num_windows} calibration windows are too few to test the operators by their loss on "
        f"held-out windows: they are used untested. Use at least {MIN_WINDOWS} windows."
    )
    return Verdict(first, {}, {"skipped": f"fewer than {MIN_WINDOWS} windows"}, (line,))


def _dropped(
    ladders: Ladders,
    chosen: Mapping[Boundary, OperatorFit],
    tests: Sequence[_Test],
    *,
    refused: bool,
    tokens: int,
) -> tuple[str, ...]:
    gone = [str(boundary) for boundary in ladders if boundary not in chosen]
    if not gone:
        return ()
    lead = f"no repair at {', '.join(gone)}:"
    tail = "`recover` ghost attaches operators without this test."
    if refused:
        return (
            f"{lead} what was fitted on {tokens} calibration tokens wins back "
            f"{100 * tests[1].share:.1f} % of what the cut loses on text that the dense model "
            f"writes; it must win back {100 * MIN_WRITTEN:.0f} %, above its noise. Use more "
            f"windows of more documents; {tail}",
        )
    shares = f"{100 * tests[0].tried_share:.0f} % of what the cut loses on held-out windows"
    if len(tests) > 1:
        shares += f", {100 * tests[1].tried_share:.0f} % on text that the dense model writes"
    return (
        f"{lead} the gain is too small or too uncertain (all repairs win back {shares}). {tail}",
    )
