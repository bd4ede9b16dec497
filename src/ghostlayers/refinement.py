"""Refine closed-form repairs by a few gradient steps on what the model says.

A closed form brings the hidden state behind a cut close to the dense one. What the model says
weighs the directions of that state unequally, and a map of few numbers has to choose between them.
Here the maps that a repair is made of, and nothing else, follow the Kullback-Leibler divergence
from the dense model, over the windows that the guard does not read and, where these are few, over
text that the dense model writes. Where the steps start, how long they are and whether they are
used is decided on the windows that the guard reads: those held out, and text that the dense model
writes, each with the same weight.

The steps are those of Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) on the elements of a map's
weight W (I + M for an operator), each in units of its own: the root mean square of its output
channel over that of its input channel, over tokens of length 1. Their length is rate·rms(W) in
these units: scaling any channel of a map's input or output changes nothing. How long steps may be
depends on the model all the same: a few steps of each rate are made, and those with the lowest
divergence go on. Where it has not fallen at their end, the next best do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import distributed
from .decoder import decoder_layers
from .guard import MIN_WINDOWS, first_changed_layer
from .guard_text import GuardScorer, guard_scorer
from .operators import REFINED, OperatorFit
from .plan import Boundary, PruningPlan
from .refinement_steps import Steps
from .refinement_student import Student
from .refinement_windows import RefinementWindows, windows_to_follow
from .repairs import is_tested
from .suffix import SuffixScorer
from .trained_maps import take_weights_of_first_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Lengths of a step at its peak, in root mean squares of the map's weight.
RATES = (7e-3, 2.3e-3, 0.8e-3)
# Steps after which they are compared.
TRIAL = 8
# What the divergence is taken on, in the record.
TEXTS = ("held_out", "guard_written")
# An operator has these where it tells massive tokens apart.
SINK_TENSORS = {"shift", "sink_direction"}
Ladders = dict[Boundary, tuple[OperatorFit, ...]]


@dataclass(frozen=True)
class Refined:
    """What a refinement came to.

    Attributes:
        ladders: The repairs, with the refined ones on top if they are better.
        record: JSON values: steps, windows, divergences before and after, or why it was skipped;
            None if it was not asked for.
        notes: What the user should know.
    """

    ladders: Ladders
    record: dict[str, Any] | None
    notes: tuple[str, ...] = ()


@dataclass
class Trial:
    """Steps of one rate.

    Attributes:
        rate: Length of a step at its peak.
        student: What the steps have made of the repairs.
        run: The steps.
        after: Mean divergence on each text of the guard after the last of them, inf if they met one
            that was not finite; empty before the first.
    """

    rate: float
    student: Student
    run: Steps
    after: list[float] = field(default_factory=list)

    def mean(self) -> float:
        """Return the mean over the texts."""
        return fmean(self.after)

    def make_(self, count: int, texts: Sequence[RefinementWindows]) -> None:
        """Make so many steps, unless an earlier one was not finite, and test what they made."""
        if not count or (self.after and not math.isfinite(self.mean())):
            return
        finite = self.run.make(count)
        self.after = self.student.mean_divergences(texts) if finite else [math.inf] * len(texts)


def refine_repairs(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    ladders: Ladders,
    ids: Tensor,
    *,
    steps: int,
    batch_size: int = 1,
    seed: int = 0,
    scorer: GuardScorer | None = None,
    progress: bool = True,
) -> Refined:
    """Refine the most complex repair of every boundary, all of them together.

    The steps start from the repair with the lowest divergence: from one with another ridge, or from
    a simpler one, where the maps that it leaves alone start as they are in the dense model. The
    divergence is the mean of that on held-out windows and that on text which the dense model
    writes.

    What the steps add to the repairs fitted without the held-out windows is added to those fitted
    on all windows as well: one run of steps serves both. Every process of a session makes all
    steps, which follow one another; the first one's result is that of all.

    Args:
        dense: The dense model; it is left as it is.
        pruned: The pruned model without repairs; it is left as it is.
        plan: The plan.
        ladders: Fits of every boundary, the most complex first.
        ids: (n, T) calibration windows that the fits are from.
        steps: Steps, each on one batch.
        batch_size: Windows per step.
        seed: Seed of the order of the windows.
        scorer: From `guard_scorer` of the same windows, if there is one: what the dense model
            writes is written once.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        The ladders: the refined repairs stand on top, or nothing changes if the divergence has not
        fallen.
    """
    first = {boundary: ladder[0] for boundary, ladder in ladders.items() if ladder}
    if not first:
        return Refined(ladders, None)
    reasons = distributed.gather_each(_obstacle(dense, first.values(), ids))
    if reason := next(filter(None, reasons), None):
        return Refined(ladders, {"steps": 0, "skipped": reason}, (f"not refined: {reason}.",))
    start = first_changed_layer(plan, ladders)
    read = (scorer or guard_scorer(dense, ids, batch_size=batch_size, progress=progress)).texts()
    with distributed.section(), distributed.alone():
        follow, given = windows_to_follow(
            dense, ids, steps * batch_size, batch_size, seed, progress
        )
        tests = [SuffixScorer(dense, t, batch_size=batch_size, progress=False) for t in read]
        train = RefinementWindows.of(follow, start, given)
        texts = [RefinementWindows.of(test, start) for test in tests]
        bare = tests[0].suffix(pruned, plan, start)
        starts = _starts(dense, first, ladders)
        found = [Student.of(bare, fits).mean_divergences(texts) for fits in starts]
    found = distributed.same(found)
    before = min(found, key=fmean)
    names = {boundary: fit.name for boundary, fit in first.items()}
    first = starts[found.index(before)]
    with distributed.section(), distributed.alone():
        units = Student.of(bare, first).channel_units(train)

        def begin(rate: float) -> Trial:
            student = Student.of(bare, first, units)
            maps = list(student.maps.values())
            return Trial(rate, student, Steps(student, train, maps, steps, rate, seed, progress))

        best = best_trial(begin, texts, fmean(before))
    student, after = best.student, best.after
    take_weights_of_first_(list(student.maps.values()))
    record = {
        "steps": steps,
        "rate": best.rate,
        "windows": given,
        "written_windows": len(follow.ids) - given,
        **{f"{name}_windows": len(part) for name, part in zip(TEXTS, read, strict=True)},
        **_divergences("before", before),
        **_divergences("after", after),
        "used": best.mean() < fmean(before),
    }
    record = distributed.same(record)
    if not record["used"]:
        return Refined(ladders, record)
    refined = {}
    for boundary, fit in student.fits(first).items():
        # Relative errors and what else describes the fit are those of the closed form.
        diagnostics = {**fit.diagnostics, "errors_of": fit.name}
        top = replace(fit, name=names[boundary] + REFINED, diagnostics=diagnostics)
        refined[boundary] = (top, *ladders[boundary])
    return Refined({**ladders, **refined}, record)


def best_trial(
    begin: Callable[[float], Trial], texts: Sequence[RefinementWindows], before: float
) -> Trial:
    """Try all rates for a few steps and end the best one; the next ones where it ends too high.

    Two trials at a time are kept.

    Args:
        begin: Begins one of a rate.
        texts: What tests them.
        before: What the divergence has to fall below.

    Returns:
        The first one that ends below, else the lowest of all at their ends.
    """
    tried = dict[float, float]()

    def begun(rate: float) -> Trial:
        trial = begin(rate)
        trial.make_(TRIAL, texts)
        if trial.run.left and math.isfinite(trial.mean()):
            tried[rate] = trial.mean()
        return trial

    best = min(map(begun, RATES), key=Trial.mean)
    best.make_(best.run.left, texts)
    for rate in sorted(tried, key=lambda rate: tried[rate]):
        if best.mean() < before:
            break
        if rate != best.rate:
            trial = begin(rate)
            trial.make_(trial.run.left, texts)
            best = min(best, trial, key=Trial.mean)
    return best


def _divergences(when: str, values: Iterable[float]) -> dict[str, float | None]:
    return {
        f"{name}_divergence_{when}": value if math.isfinite(value) else None
        for name, value in zip(TEXTS, values, strict=True)
    }


def _starts(
    dense: PreTrainedModel, first: Mapping[Boundary, OperatorFit], ladders: Ladders
) -> list[dict[Boundary, OperatorFit]]:
    """List where the steps may start: from any repair of a ladder that is of the first one's kind.

    Maps that the first one changes and another does not start there as they are in the dense model.
    """
    rungs = {
        boundary: [
            _with_maps_of(fit, rung, decoder_layers(dense)[boundary.start - 1])
            for rung in ladders[boundary]
            if rung.tensors.keys() >= fit.tensors.keys() - SINK_TENSORS
        ]
        for boundary, fit in first.items()
    }
    return [
        {boundary: own[min(number, len(own) - 1)] for boundary, own in rungs.items()}
        for number in range(max(map(len, rungs.values())))
    ]


def _with_maps_of(first: OperatorFit, rung: OperatorFit, layer: torch.nn.Module) -> OperatorFit:
    """Let a repair change the maps that another one changes; those of its own stay as they are."""
    present = {
        path: layer.get_parameter(path).detach()
        for path in first.weights
        if path not in rung.weights
    }
    if not present:
        return rung
    return replace(
        rung,
        diagnostics={**rung.diagnostics, "maps": list(first.weights)},
        warnings=tuple(dict.fromkeys((*rung.warnings, *first.warnings))),
        weights={**present, **rung.weights},
        weights_part={**present, **rung.weights_part},
        sites={**first.sites, **rung.sites},
    )


def _obstacle(dense: PreTrainedModel, fits: Iterable[OperatorFit], ids: Tensor) -> str | None:
    """Say why nothing can be refined, or return None."""
    if len(ids) < MIN_WINDOWS or not all(map(is_tested, fits)):
        return f"fewer than {MIN_WINDOWS} calibration windows leave none to test the result on"
    if any(parameter.is_meta for parameter in dense.parameters()):
        return "a weight of the model is offloaded"
    return None
