"""Parts of a study that a report shows. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST_RATIO = 1e6


@dataclass(frozen=True)
class CutErrors:
    """Held-out errors of every contiguous cut [start, stop), before and after a linear repair.

    Attributes:
        calibration: Label of the text it was measured on.
        before: (L+1) rows of L+1 relative errors, None where there is no such cut.
        after: The same after the repair.
        tokens: Tokens of the fit; None where the input does not say.
        held_out_tokens: Tokens that were measured; None where the input does not say.
    """

    calibration: str
    before: Sequence[Sequence[float | None]]
    after: Sequence[Sequence[float | None]]
    tokens: int | None = None
    held_out_tokens: int | None = None

    @property
    def num_layers(self) -> int:
        """Depth L."""
        return len(self.before) - 1

    def cuts(self) -> Iterator[tuple[int, int, float, float, float]]:
        """Yield start, stop, error before, error after, and the share that is left (0 of 0)."""
        for start, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            for stop, (lost, left) in enumerate(zip(before, after, strict=True)):
                if lost is not None and left is not None:
                    yield start, stop, lost, left, min(left / lost, LARGEST_RATIO) if lost else 0.0

    @property
    def ratio(self) -> list[list[float | None]]:
        """(L+1) rows of L+1 shares of the error that the repair leaves."""
        found: list[list[float | None]] = [[None] * len(self.before) for _ in self.before]
        for start, stop, _, _, ratio in self.cuts():
            found[start][stop] = ratio
        return found


@dataclass(frozen=True)
class Expectation:
    """What one configuration expects, beside what was measured.

    Attributes:
        title: What the configuration reproduces.
        notes: How far the two can be compared, one line each.
        header: Of the table.
        rows: One for each number and each cell that it is about.
        rest: What else the configuration says, JSON values; None for nothing.
    """

    title: str
    notes: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    rest: Any = None


def best_cuts(errors: CutErrors) -> dict[int, int]:
    """Return, by number of removed layers, the first layer of the cut of least error after."""
    found: dict[int, tuple[float, int]] = {}
    for start, stop, _, after, _ in errors.cuts():
        size = stop - start
        if size not in found or after < found[size][0]:
            found[size] = (after, start)
    return {size: start for size, (_, start) in found.items()}


__all__ = ["LARGEST_RATIO", "CutErrors", "Expectation", "best_cuts"]
