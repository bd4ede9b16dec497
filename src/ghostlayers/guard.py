"""The guard: an operator stays only if the pruned model's loss on held-out windows says so.

A lower error of the hidden state is no proof: removing one shallow layer of SmolLM2 and fitting an
operator lowers the error on other text too and raises perplexity there. What generalises from one
corpus to another is a gain that is a large part of the damage and well above its own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .decoder import decoder_layers
from .moments import held_out_windows
from .operators import OperatorFit
from .plan import Boundary, PruningPlan
from .steps import set_operator_
from .suffix import Suffix, SuffixScorer, first_state

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MIN_WINDOWS = 4
GUARD_WINDOWS = 8
# Share of the lost nats that the operators must win back, and standard errors of their mean gain.
MIN_RECOVERED = 0.25
MIN_ERRORS = 2.0


@dataclass(frozen=True)
class Gain:
    """Mean paired gain in loss of one model over another, in nats per token.

    Attributes:
        mean: Mean over windows of loss before − loss after; −∞ if the loss after is not finite.
        error: Its standard error; 0 for a single window.
    """

    mean: float
    error: float

    @property
    def is_sure(self) -> bool:
        """Whether it is above its noise."""
        return self.mean > MIN_ERRORS * self.error and self.mean > 0


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
        kept: Boundaries whose operator stays.
        boundaries: JSON values by boundary: what its own operator gains.
        record: JSON values of the whole: windows, losses, share recovered, or why it was skipped.
        warnings: One line each.
    """

    kept: tuple[Boundary, ...]
    boundaries: Mapping[Boundary, dict[str, Any]]
    record: dict[str, Any]
    warnings: tuple[str, ...] = ()


def guard_windows(ids: torch.Tensor) -> torch.Tensor:
    """Take up to `GUARD_WINDOWS` of the held-out windows, evenly spread; (n, T)."""
    held_out = held_out_windows(len(ids))
    step = max(1, len(held_out) // GUARD_WINDOWS)
    return ids[held_out[::step][:GUARD_WINDOWS]]


class _Trial:
    """The pruned model with operators fitted without the held-out windows, each on or off."""

    def __init__(self, suffix: Suffix, fits: Mapping[Boundary, OperatorFit]) -> None:
        self.tensors = {b: fit.fit_part for b, fit in fits.items()}
        self.suffix = suffix.with_operators(fits)
        layers, self.modules = decoder_layers(self.suffix.model), {}
        for boundary in fits:
            layer, side = suffix.plan.operator_site(boundary)
            self.modules[boundary] = getattr(layers[layer], f"ghost_{side}")

    def switch_(self, kept: Sequence[Boundary]) -> None:
        """Turn on the operators of some boundaries; the others do nothing."""
        for boundary, module in self.modules.items():
            part = self.tensors[boundary]
            off = {name: tensor.new_zeros(tensor.shape) for name, tensor in part.items()}
            set_operator_(module, part if boundary in kept else off)


def judge_operators(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    fits: Mapping[Boundary, OperatorFit],
    ids: torch.Tensor,
    *,
    batch_size: int = 1,
    progress: bool = True,
) -> Verdict:
    """Decide which operators stay.

    All operators stand in the pruned model at first. From the output side on each is left out once,
    and goes for good if its gain is not above two standard errors. What is left must win back a
    quarter of the nats that the cut loses, again by more than two standard errors; or all go.

    Args:
        dense: The dense model.
        pruned: The pruned model without operators; it is left as it is.
        plan: The plan.
        fits: Fits with `fit_part`.
        ids: (n, T) calibration windows that the fits are from.
        batch_size: Windows per forward pass.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The verdict. With fewer than `MIN_WINDOWS` windows every operator stays, with a warning.
    """
    if len(ids) < MIN_WINDOWS or not all(fit.fit_part for fit in fits.values()):
        line = (
            f"{len(ids)} calibration windows are too few to test the operators by their loss on "
            f"held-out windows: they are used untested. Use at least {MIN_WINDOWS} windows."
        )
        skipped = {"skipped": f"fewer than {MIN_WINDOWS} windows"}
        return Verdict(tuple(fits), {}, skipped, (line,))
    held_out = guard_windows(ids)

    scorer = SuffixScorer(
        dense, held_out, batch_size=batch_size, description="guard", progress=progress
    )
    lossless = scorer.dense_losses([first_state(plan)])
    bare = scorer.suffix(pruned, plan)
    trial, none = _Trial(bare, fits), scorer.losses(bare)

    def trial_losses(kept: Sequence[Boundary]) -> list[float]:
        trial.switch_(kept)
        return scorer.losses(trial.suffix) if kept else none

    tried = trial_losses(tuple(fits))
    kept, current, boundaries = _leave_out(tuple(fits), tried, trial_losses)
    damage, whole = gain(none, lossless), gain(none, current)
    share = _share(whole, damage)
    if share < MIN_RECOVERED or not whole.is_sure:
        kept = ()
    for boundary, entry in boundaries.items():
        entry["kept"] = boundary in kept
    record = {
        "windows": len(held_out),
        "loss_dense": _mean(lossless),
        "loss_none": _mean(none),
        "loss_all_operators": _mean(tried),
        "loss_chosen": _mean(current if kept else none),
        "recovered_share": share,
        "required_share": MIN_RECOVERED,
        "gain": whole.mean,
        "gain_standard_error": whole.error,
        "required_standard_errors": MIN_ERRORS,
    }
    warnings = _dropped(fits, kept, _share(gain(none, tried), damage))
    return Verdict(kept, boundaries, record, warnings)


def _share(won: Gain, lost: Gain) -> float:
    """Return which part of a loss is won back; 0 where nothing was lost."""
    if not math.isfinite(lost.mean):
        return 1.0 if won.mean > 0 else 0.0
    return won.mean / lost.mean if lost.mean > 0 else 0.0


def _leave_out(
    boundaries: tuple[Boundary, ...],
    current: list[float],
    losses: Callable[[Sequence[Boundary]], list[float]],
) -> tuple[tuple[Boundary, ...], list[float], dict[Boundary, dict[str, Any]]]:
    """Leave out each operator once, from the output side on; return what stays and its losses."""
    kept, gains = boundaries, {}
    for boundary in sorted(boundaries, reverse=True):
        rest = tuple(other for other in kept if other != boundary)
        without = losses(rest)
        own = gain(without, current)
        gains[boundary] = {"gain": own.mean, "gain_standard_error": own.error}
        if not own.is_sure:
            kept, current = rest, without
    return kept, current, gains


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf


def _dropped(
    fits: Mapping[Boundary, OperatorFit], kept: Sequence[Boundary], share: float
) -> tuple[str, ...]:
    gone = [str(boundary) for boundary in fits if boundary not in kept]
    if not gone:
        return ()
    return (
        f"no operator at {', '.join(gone)}: on held-out windows the gain is too small or too "
        f"uncertain (all operators together win back {100 * share:.0f} % of what the cut loses). "
        "`recover` ghost attaches operators without this test.",
    )
