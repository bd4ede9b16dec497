"""Gains in loss, compared in pairs of windows, and what they must exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Standard errors that a mean gain must exceed before it counts.
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

    def exceeds(self, errors: float) -> bool:
        """Whether it is above so many of its standard errors, and above 0 unless these are < 0."""
        return self.mean > errors * self.error and (errors < 0 or self.mean > 0)

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


def balanced(gains: Sequence[Gain]) -> Gain:
    """Give gains on several texts equal weight; their errors are independent."""
    if any(own.mean == -math.inf for own in gains):
        return Gain(-math.inf, 0.0)
    mean = sum(own.mean for own in gains) / len(gains)
    return Gain(mean, math.hypot(*(own.error for own in gains)) / len(gains))


def share_won(won: Gain, lost: Gain) -> float:
    """Return which part of a loss is won back; 0 where nothing was lost."""
    if not math.isfinite(lost.mean):
        return 1.0 if won.mean > 0 else 0.0
    return won.mean / lost.mean if lost.mean > 0 else 0.0


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean, infinite if a value is not finite."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf
