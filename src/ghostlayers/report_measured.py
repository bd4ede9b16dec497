"""What a comparison measured of an expected number. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .compare_lines import CutLine
from .compare_results import CompareResults
from .expected_numbers import ExpectedNumber
from .operators import NO_OPERATOR

REFUSED = "refused"


@dataclass(frozen=True)
class Found:
    """A measurement that an expected number is about.

    Attributes:
        value: The number; None if it was refused or has none.
        high: End of a range of several; None for one number.
        error: Its standard error.
        selector: Selector of the cut; empty without.
        calibration: Name and windows of the calibration; None for the dense model.
        reason: Why it is not compared; empty if it is.
    """

    value: float | None
    high: float | None = None
    error: float | None = None
    selector: str = ""
    calibration: tuple[str, int] | None = None
    reason: str = ""


def measurements(results: CompareResults, number: ExpectedNumber) -> Iterator[Found]:
    """Yield every measurement that a number is about."""
    if number.quantity == "rls":
        for line in results.calibrations:
            yield Found(line.rls, calibration=(line.name, line.num_windows))
    elif number.num_remove is None:
        if results.dense is not None:
            yield from filter(None, [_measure(results, number, results.dense, None)])
    else:
        for cut in results.cuts:
            if cut.num_remove == number.num_remove and number.select in (None, cut.selector):
                yield from _of_cut(results, number, cut)


def _of_cut(results: CompareResults, number: ExpectedNumber, cut: CutLine) -> Iterator[Found]:
    if cut.refused is not None:
        yield _refused(cut)
        return
    for cell in results.cells_of(cut):
        fit = cell.operator == NO_OPERATOR or cell.fit == "dense"
        if cell.operator == number.recover and fit:
            if cell.refused is not None:
                yield _refused(cut)
            else:
                yield from filter(None, [_measure(results, number, cell, cut)])


def _refused(cut: CutLine) -> Found:
    place = cut.calibration, cut.num_windows
    return Found(None, selector=cut.selector, calibration=place, reason=REFUSED)


def _measure(
    results: CompareResults, number: ExpectedNumber, line: Any, cut: CutLine | None
) -> Found | None:
    """Return what a line says of a quantity; None if it was not measured."""
    place: dict[str, Any] = {}
    if cut is not None:
        place = {"selector": cut.selector, "calibration": (cut.calibration, cut.num_windows)}
    if number.quantity == "perplexity":
        return _perplexity(results, number, line, place)
    if number.quantity == "accuracy":
        average = ((line.tasks or {}).get("average") or {}).get(number.metric)
        if not average:
            return None
        left_out = ", ".join(line.tasks.get("not_run") or ())
        reason = f"the mean lacks tasks that were not run ({left_out})" if left_out else ""
        error = average.get("stderr")
        percent = None if error is None else 100 * error
        return Found(100 * average["value"], error=percent, reason=reason, **place)
    values = list(_timed(results, number.quantity, line))
    return Found(min(values), max(values), **place) if values else None


def _perplexity(
    results: CompareResults, number: ExpectedNumber, line: Any, place: Mapping[str, Any]
) -> Found | None:
    planned = (results.run.planned if results.run else None) or {}
    texts = [number.text] if number.text else planned.get("texts") or list(line.perplexity)
    entries = [line.perplexity.get(text) for text in texts]
    if not entries or None in entries:
        return None
    values = [entry.get("perplexity") for entry in entries]
    if None in values:
        return Found(None, reason="not finite", **place)
    errors = [entry.get("standard_error") for entry in entries]
    error = None if None in errors else math.hypot(*errors) / len(errors)
    return Found(math.fsum(values) / len(values), error=error, **place)


def _timed(results: CompareResults, quantity: str, line: Any) -> Iterator[float]:
    """Yield a ratio for each batch size and length (and phase)."""
    rows = (line.speed or {}).get("rows") or []
    if quantity == "speedup":
        for row in rows:
            ratios = (row[phase].get("speedup") for phase in ("prefill", "decode"))
            yield from (ratio for ratio in ratios if ratio is not None)
        return
    dense = (results.dense.speed if results.dense else None) or {}
    for row, other in zip(rows, dense.get("rows") or [], strict=False):
        before, after = other.get("peak_memory_bytes"), row.get("peak_memory_bytes")
        if before and after is not None:
            yield 100 * (1 - after / before)


__all__ = ["Found", "measurements"]
