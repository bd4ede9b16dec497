"""A cut that `--select auto` has scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import t as student_t  # type: ignore[import-untyped]

from .candidates import Candidate
from .guard_gain import Gain, finite_mean, gain

# Probability of taking another cut than a selector's by chance alone.
LEVEL = 0.05


@dataclass(frozen=True)
class Scored:
    """A candidate with its losses on the held-out windows, in nats per token.

    Attributes:
        candidate: The cut.
        none: Loss of each window without repair.
        repaired: Loss of each window with an operator at every boundary.
    """

    candidate: Candidate
    none: tuple[float, ...]
    repaired: tuple[float, ...]

    @property
    def loss_none(self) -> float:
        """Mean loss without repair; infinite if it is not finite."""
        return finite_mean(self.none)

    @property
    def losses(self) -> tuple[float, ...]:
        """Those with the lower mean: a repair that does harm would not be used."""
        return min(self.none, self.repaired, key=finite_mean)

    @property
    def loss(self) -> float:
        """Their mean; infinite if it is not finite."""
        return finite_mean(self.losses)

    def gain_over(self, other: Scored) -> Gain:
        """Compare it with another cut in pairs of windows; positive if it is the better one."""
        return gain(other.losses, self.losses)

    def to_dict(self, selected: Scored) -> dict[str, Any]:
        """Return JSON values, with the gain over the best cut of a selector."""
        over = self.gain_over(selected)
        return {
            "layers": list(self.candidate.removed),
            "source": self.candidate.source,
            "loss": self.loss,
            "perplexity": math.exp(self.loss) if self.loss < 700 else math.inf,
            "loss_none": self.loss_none,
            "gain": over.mean if math.isfinite(over.mean) else None,
            "gain_standard_error": over.error,
        }


@dataclass(frozen=True)
class Choice:
    """Which of several scored cuts is taken.

    Attributes:
        selected: The best cut of a selector; the best of all where no selector has an answer.
        taken: That one, or the best of those that are better by more than chance.
        errors: Standard errors of the paired difference that this asks for; infinite where there is
            one window.
    """

    selected: Scored
    taken: Scored
    errors: float


def choose(ranked: Sequence[Scored]) -> Choice:
    """Choose the cut to take.

    Of k cuts that are not a selector's one has to be better than the best selector's by a gain
    that, were they all alike, would come by chance at probability `LEVEL` at most: the quantile of
    Student's t for `LEVEL` / k (Bonferroni) and the number of windows less 1.

    Args:
        ranked: Scored cuts, the lowest loss first.
    """
    selected = next((item for item in ranked if item.candidate.is_selected), ranked[0])
    rivals, freedom = [r for r in ranked if not r.candidate.is_selected], len(selected.losses) - 1
    errors = float(student_t.isf(LEVEL / len(rivals), freedom)) if rivals and freedom else math.inf

    def is_better(item: Scored) -> bool:
        over = item.gain_over(selected)
        return over.mean == math.inf or over.exceeds(errors)

    taken = next(item for item in ranked if item is selected or is_better(item))
    return Choice(selected, taken, errors)
