"""The guard: a repair stays only if the pruned model's loss on held-out windows says so.

A lower error of the hidden state is no proof: removing one shallow layer of SmolLM2 and fitting an
operator lowers the error on other text too and raises perplexity there. What generalises from one
corpus to another is a gain that is a large part of the damage and well above its own noise.

Held-out windows are of the calibration text, and few windows are of few documents: a repair can
learn their subject. So text that the dense model writes counts as much as they do, and what stays
must lower the loss there too.
"""

from __future__ import annotations

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
    on each boundary goes down its ladder (`guard_ladder`): of two ridges the one that gains more
    stays, and another simpler repair replaces the present one unless this gains more than one
    standard error over it (two over none). A gain is the mean of that on held-out windows and that
    on text which the dense model writes. What is left must win back a quarter of the nats that the
    cut loses on held-out windows, by more than two standard errors, and something on the written
    text; or all go.

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
    probes = [probe for probe in (scorer, scorer.written()) if probe is not None]
    lossless = [probe.dense_losses([start]) for probe in probes]
    trials = [_Trial(probe, probe.suffix(pruned, plan, start)) for probe in probes]

    def losses(choice: Choice) -> Losses:
        return [trial.losses(choice) for trial in trials]

    bare, tried = [trial.none for trial in trials], losses(first)
    damage = [gain(*pair) for pair in zip(bare, lossless, strict=True)]
    shares = (MIN_RECOVERED, MIN_WRITTEN)[: len(damage)]
    parts = zip(damage, shares, strict=True)
    wanted = [share * lost.mean if lost.mean > 0 else 0.0 for lost, share in parts]
    chosen, current, boundaries = go_down(ladders, first, bare, tried, losses, wanted)
    whole, share = _whole(bare[0], current[0], damage[0])
    if share < MIN_RECOVERED or not whole.is_sure:
        chosen = {}
    written = _on_written_text(probes[1:], bare[1:], current[1:], damage[1:], chosen)
    if not written.get("kept", True):
        chosen = {}
    for boundary, entry in boundaries.items():
        entry["kept"] = boundary in chosen
        entry["chosen"] = chosen[boundary].name if boundary in chosen else NO_OPERATOR
    record = {
        "windows": len(scorer.ids),
        "loss_dense": finite_mean(lossless[0]),
        "loss_none": finite_mean(bare[0]),
        "loss_all_operators": finite_mean(tried[0]),
        "loss_chosen": finite_mean(current[0] if chosen else bare[0]),
        "recovered_share": share,
        "gain": whole.mean,
        "gain_standard_error": whole.error,
        **REQUIRED,
        "written_text": written,
    }
    share = _whole(bare[0], tried[0], damage[0])[1]
    warnings = _dropped(ladders, chosen, share, written, int(ids.numel()))
    return Verdict(chosen, boundaries, record, warnings)


def _on_written_text(
    probes: Sequence[SuffixScorer],
    none: Losses,
    repaired: Losses,
    damage: Sequence[Gain],
    chosen: Mapping[Boundary, OperatorFit],
) -> dict[str, Any]:
    """Describe what repairs do to text that the dense model writes; JSON values."""
    if not probes:
        return {"skipped": "a weight of the model is offloaded"}
    if not chosen:
        return {"skipped": "no repair is left"}
    (probe,), (before,), (after,) = probes, none, repaired
    own, share = _whole(before, after, damage[0])
    return {
        "windows": len(probe.ids),
        "window": probe.ids.shape[1],
        "loss_none": finite_mean(before),
        "loss_chosen": finite_mean(after),
        "gain": own.mean,
        "gain_standard_error": own.error,
        "recovered_share": share,
        "required_share": MIN_WRITTEN,
        "kept": own.mean > 0 and share > MIN_WRITTEN,
    }


def _whole(none: Sequence[float], repaired: Sequence[float], damage: Gain) -> tuple[Gain, float]:
    """Return what repairs gain on one text, and which part of the damage that is."""
    own = gain(none, repaired)
    return own, share_won(own, damage)


def _untested(first: Mapping[Boundary, OperatorFit], num_windows: int) -> Verdict:
    line = (
        f"{num_windows} calibration windows are too few to test the operators by their loss on "
        f"held-out windows: they are used untested. Use at least {MIN_WINDOWS} windows."
    )
    return Verdict(first, {}, {"skipped": f"fewer than {MIN_WINDOWS} windows"}, (line,))


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
            f"no repair at {', '.join(gone)}: what was fitted on {tokens} calibration tokens wins "
            f"back {100 * written['recovered_share']:.1f} % of what the cut loses on text that the "
            f"dense model writes; it must win back {100 * MIN_WRITTEN:.0f} %. Use more windows of "
            "more documents; `recover` ghost attaches operators without this test.",
        )
    return (
        f"no repair at {', '.join(gone)}: on held-out windows the gain is too small or too "
        f"uncertain (all repairs together win back {100 * share:.0f} % of what the cut loses). "
        "`recover` ghost attaches operators without this test.",
    )
