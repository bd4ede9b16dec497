"""The guard: a repair stays only if the pruned model's loss on held-out windows says so.

A lower error of the hidden state is no proof: removing one shallow layer of SmolLM2 and fitting an
operator lowers the error on other text too and raises perplexity there. What generalises from one
corpus to another is a gain that is a large part of the damage and well above its own noise.

The candidates of a boundary form a ladder, the most complex one first. Below the last stands
nothing at all.

Held-out windows are of the calibration text, and few windows are of few documents: a repair can
learn their subject. So what stays must also lower the loss on text that the dense model writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .decoder import share_tensors
from .guard_text import GuardScorer, guard_scorer
from .operators import NO_OPERATOR, OperatorFit
from .plan import Boundary, PruningPlan
from .repairs import apply_repairs_, is_tested, without_held_out
from .suffix import Suffix, SuffixScorer, first_state

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MIN_WINDOWS = 4
# Share of the lost nats that the operators must win back, and standard errors of their mean gain.
MIN_RECOVERED = 0.25
MIN_ERRORS = 2.0
# Standard errors by which a more complex repair must beat the next simpler one.
MIN_ERRORS_SIMPLER = 1.0
REQUIRED = {
    "required_share": MIN_RECOVERED,
    "required_standard_errors": MIN_ERRORS,
    "required_standard_errors_over_simpler": MIN_ERRORS_SIMPLER,
}
Ladders = Mapping[Boundary, Sequence[OperatorFit]]


@dataclass(frozen=True)
class Gain:
    """Mean paired gain in loss of one model over another, in nats per token.

    Attributes:
        mean: Mean over windows of loss before − loss after; −∞ if the loss after is not finite.
        error: Its standard error; 0 for a single window.
    """

    mean: float
    error: float

    def exceeds(self, errors: float) -> bool:
        """Whether it is above so many of its standard errors."""
        return self.mean > errors * self.error and self.mean > 0

    @property
    def is_sure(self) -> bool:
        """Whether it is above its noise."""
        return self.exceeds(MIN_ERRORS)


def gain(before: Sequence[float], after: Sequence[float]) -> Gain:
    """Compare window losses in pairs; a loss that is not finite counts as infinitely bad."""
    if not all(map(math.isfinite, after)):
        return Gain(-math.inf, 0.0)
    if not all(map(math.isfinite, before)):
        return Gain(math.inf, 0.0)
    steps = [a - b for a, b in zip(before, after, strict=True)]
    mean = math.fsum(steps) / len(steps)
    squares = math.fsum((step - mean) ** 2 for step in steps)
    return Gain(mean, math.sqrt(squares / max(len(steps) - 1, 1) / len(steps)))


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
    on each boundary goes down its ladder: the simpler repair replaces the present one unless this
    gains more than one standard error over it (two over none). What is left must win back a quarter
    of the nats that the cut loses, again by more than two standard errors, and something on text
    that the dense model writes; or all go.

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
    lossless = scorer.dense_losses([start])
    trial = _Trial(scorer, scorer.suffix(pruned, plan, start))
    none, tried = trial.none, trial.losses(first)
    chosen, current, boundaries = _go_down(ladders, first, tried, trial.losses)
    damage, whole = gain(none, lossless), gain(none, current)
    share = _share(whole, damage)
    if share < MIN_RECOVERED or not whole.is_sure:
        chosen = {}
    written = _on_written_text(scorer, pruned, plan, start, chosen)
    if not written.get("kept", True):
        chosen = {}
    for boundary, entry in boundaries.items():
        entry["kept"] = boundary in chosen
        entry["chosen"] = chosen[boundary].name if boundary in chosen else NO_OPERATOR
    record = {
        "windows": len(scorer.ids),
        "loss_dense": _mean(lossless),
        "loss_none": _mean(none),
        "loss_all_operators": _mean(tried),
        "loss_chosen": _mean(current if chosen else none),
        "recovered_share": share,
        "gain": whole.mean,
        "gain_standard_error": whole.error,
        **REQUIRED,
        "written_text": written,
    }
    share = _share(gain(none, tried), damage)
    warnings = _dropped(ladders, chosen, share, written, int(ids.numel()))
    return Verdict(chosen, boundaries, record, warnings)


def _on_written_text(
    scorer: GuardScorer,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    start: int,
    chosen: Mapping[Boundary, OperatorFit],
) -> dict[str, Any]:
    """Compare repairs with none on text that the dense model writes; JSON values."""
    if not chosen:
        return {"skipped": "no repair is left"}
    probe = scorer.written()
    if probe is None:
        return {"skipped": "a weight of the model is offloaded"}
    trial = _Trial(probe, probe.suffix(pruned, plan, start))
    repaired = trial.losses(chosen)
    own = gain(trial.none, repaired)
    return {
        "windows": len(probe.ids),
        "window": probe.ids.shape[1],
        "loss_none": _mean(trial.none),
        "loss_chosen": _mean(repaired),
        "gain": own.mean,
        "gain_standard_error": own.error,
        "kept": own.mean > 0,
    }


def _untested(first: Mapping[Boundary, OperatorFit], num_windows: int) -> Verdict:
    line = (
        f"{num_windows} calibration windows are too few to test the operators by their loss on "
        f"held-out windows: they are used untested. Use at least {MIN_WINDOWS} windows."
    )
    return Verdict(first, {}, {"skipped": f"fewer than {MIN_WINDOWS} windows"}, (line,))


def _share(won: Gain, lost: Gain) -> float:
    """Return which part of a loss is won back; 0 where nothing was lost."""
    if not math.isfinite(lost.mean):
        return 1.0 if won.mean > 0 else 0.0
    return won.mean / lost.mean if lost.mean > 0 else 0.0


def _go_down(
    ladders: Ladders,
    first: Mapping[Boundary, OperatorFit],
    current: list[float],
    losses: Callable[[Mapping[Boundary, OperatorFit]], list[float]],
) -> tuple[dict[Boundary, OperatorFit], list[float], dict[Boundary, dict[str, Any]]]:
    """Replace repairs by simpler ones; return what stays, its losses and what was tried."""
    chosen, entries = dict(first), {}
    for boundary in sorted(chosen, reverse=True):
        candidate, tried = chosen[boundary].name, []
        for simpler in (*ladders[boundary][1:], None):
            rest = {other: fit for other, fit in chosen.items() if other != boundary}
            choice = rest if simpler is None else {**rest, boundary: simpler}
            without = losses(choice)
            own = gain(without, current)
            required = MIN_ERRORS if simpler is None else MIN_ERRORS_SIMPLER
            stays = own.exceeds(required)
            tried.append(
                {
                    "operator": chosen[boundary].name,
                    "against": NO_OPERATOR if simpler is None else simpler.name,
                    "gain": own.mean,
                    "gain_standard_error": own.error,
                    "required_standard_errors": required,
                    "kept": stays,
                }
            )
            if not stays:
                chosen, current = choice, without
        last = {key: tried[-1][key] for key in ("gain", "gain_standard_error")}
        entries[boundary] = {"candidate": candidate, **last, "tried": tried}
    return chosen, current, entries


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf


def _dropped(
    ladders: Ladders,
    chosen: Mapping[Boundary, OperatorFit],
    share: float,
    written: Mapping[str, Any],
    tokens: int,
) -> tuple[str, ...]:
    gone = [str(boundary) for boundary in ladders if boundary not in chosen]
    if not gone:
        return ()
    if not written.get("kept", True):
        return (
            f"no repair at {', '.join(gone)}: what was fitted on {tokens} calibration tokens helps "
            "on that text alone, not on text that the dense model writes. Use more windows of more "
            "documents; `recover` ghost attaches operators without this test.",
        )
    return (
        f"no repair at {', '.join(gone)}: on held-out windows the gain is too small or too "
        f"uncertain (all repairs together win back {100 * share:.0f} % of what the cut loses). "
        "`recover` ghost attaches operators without this test.",
    )
