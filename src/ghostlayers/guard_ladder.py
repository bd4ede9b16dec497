"""Go down the ladders of repairs: which of them stands at each boundary.

A ladder lists the repairs of one boundary, the most complex one first; below the last stands
nothing at all. Repairs of the same name differ in their ridge alone, the heaviest one last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .guard_gain import MIN_ERRORS, Gain, balanced, gain
from .operators import NO_OPERATOR, OperatorFit
from .plan import Boundary

# Standard errors by which a more complex repair must beat the next simpler one. A heavier ridge
# makes nothing simpler: it has to be better itself.
MIN_ERRORS_SIMPLER = 1.0
MIN_ERRORS_RIDGE = -1.0

Ladders = Mapping[Boundary, Sequence[OperatorFit]]
Choice = Mapping[Boundary, OperatorFit]
# Losses by window, one list for each text.
Losses = Sequence[Sequence[float]]


def mean_gain(before: Losses, after: Losses) -> Gain:
    """Compare losses in pairs of windows; each text has the same weight."""
    return balanced([gain(*pair) for pair in zip(before, after, strict=True)])


def reaches(wanted: Sequence[float], none: Losses, after: Losses) -> bool:
    """Whether the gain over no repair is above its noise and the wanted nats, on each text."""
    gains = [gain(*pair) for pair in zip(none, after, strict=True)]
    return all(own.is_sure and own.mean > least for own, least in zip(gains, wanted, strict=True))


def go_down(
    ladders: Ladders,
    first: Choice,
    none: Losses,
    current: Losses,
    losses: Callable[[Choice], Losses],
    wanted: Sequence[float],
) -> tuple[dict[Boundary, OperatorFit], Losses, dict[Boundary, dict[str, Any]]]:
    """Replace repairs by simpler ones, from the output side on.

    What reaches the wanted gain on every text stays against a simpler repair that does not, and
    the other way round.

    Args:
        ladders: By boundary, the most complex repair first.
        first: The most complex repair of every boundary.
        none: Losses without any repair.
        current: Losses with the first ones.
        losses: Gives the losses with other repairs.
        wanted: Gain over no repair that all repairs together need, in nats, for each text.

    Returns:
        What stays, its losses, and JSON values by boundary of what was tried.
    """
    chosen, entries = dict(first), {}
    for boundary in sorted(chosen, reverse=True):
        candidate, tried, beaten = chosen[boundary].name, [], set[str]()
        for simpler in (*ladders[boundary][1:], None):
            if simpler is not None and simpler.name in beaten:
                continue  # a heavier ridge of what lost to another method
            present = chosen[boundary]
            rest = {other: fit for other, fit in chosen.items() if other != boundary}
            choice = rest if simpler is None else {**rest, boundary: simpler}
            without = losses(choice)
            own, required = mean_gain(without, current), _required(present, simpler)
            useful, other = (reaches(wanted, none, each) for each in (current, without))
            stays = own.exceeds(required) and (useful or not other)
            stays = stays or (simpler is not None and useful and not other)
            tried.append(
                {
                    "operator": present.name,
                    "ridge": present.diagnostics.get("ridge"),
                    "against": NO_OPERATOR if simpler is None else simpler.name,
                    "against_ridge": simpler and simpler.diagnostics.get("ridge"),
                    "gain": own.mean,
                    "gain_standard_error": own.error,
                    "required_standard_errors": required,
                    "kept": stays,
                }
            )
            if not stays:
                chosen, current = choice, without
            elif simpler is not None and simpler.name != present.name and useful:
                beaten.add(simpler.name)
        last = {key: tried[-1][key] for key in ("gain", "gain_standard_error")}
        entries[boundary] = {"candidate": candidate, **last, "tried": tried}
    return chosen, current, entries


def _required(present: OperatorFit, simpler: OperatorFit | None) -> float:
    if simpler is None:
        return MIN_ERRORS
    return MIN_ERRORS_RIDGE if simpler.name == present.name else MIN_ERRORS_SIMPLER
