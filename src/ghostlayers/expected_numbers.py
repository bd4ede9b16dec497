"""Numbers that a configuration of `compare` expects, one for each cell. Imports no torch.

`expected.numbers` is a list of entries with these keys:

quantity    `accuracy` (mean over the tasks, percent), `perplexity`, `rls`, `speedup`, or
            `less_peak_memory` (percent)
model       left out: `model` of the file
select      selector; left out: any
num_remove  layers removed; left out: the dense model
text        text of a perplexity; left out: the mean over all texts
metric      of an accuracy; left out: `acc`
value       the number, or `{at_least: number}`; for removed layers `values`, by operator
differs     why what is measured here is another thing: then no difference is given
note        what a reader should know
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import unknown_name
from .json_shape import Maybe, shape_error
from .operators import NO_OPERATOR

QUANTITIES = ("accuracy", "perplexity", "rls", "speedup", "less_peak_memory")
SHAPE = {
    "quantity": str,
    "model": Maybe(str),
    "select": Maybe(str),
    "num_remove": Maybe(int),
    "text": Maybe(str),
    "metric": Maybe(str),
    "differs": Maybe(str),
    "note": Maybe(str),
}
KEYS = (*SHAPE, "value", "values")


@dataclass(frozen=True)
class ExpectedNumber:
    """One number; the fields are the keys of an entry.

    Attributes:
        value: The number, in the quantity's unit.
        at_least: Whether it is a lower bound.
        recover: Operator; `none` for the dense model.
    """

    quantity: str
    value: float
    at_least: bool = False
    model: str | None = None
    select: str | None = None
    num_remove: int | None = None
    recover: str = NO_OPERATOR
    text: str | None = None
    metric: str = "acc"
    differs: str | None = None
    note: str | None = None


def expected_faults(expected: Any, model: str | None = None) -> list[str]:
    """Say what is wrong with `expected.numbers`.

    Args:
        expected: JSON values; anything without `numbers` is taken as it is.
        model: Model of the entries that name none.

    Returns:
        One text for each fault.
    """
    if not isinstance(expected, Mapping) or "numbers" not in expected:
        return []
    entries = expected["numbers"]
    if not isinstance(entries, list):
        return [f"`expected.numbers` is {entries!r}; allowed: a list of mappings"]
    faults = []
    for index, entry in enumerate(entries):
        place = f"expected.numbers[{index}]"
        faults += [
            fault if fault.startswith("`") else f"`{place}` {fault}"
            for fault in _faults(entry, place, model)
        ]
    return faults


def _faults(entry: Any, place: str, model: str | None) -> list[str]:
    wrong = shape_error(entry, SHAPE, place)
    if wrong is not None:
        return [wrong]
    unknown = [name for name in entry if name not in KEYS]
    if unknown:
        return [f"has {str(unknown_name('key', unknown[0], KEYS)).rstrip('.')}"]
    if entry["quantity"] not in QUANTITIES:
        return [str(unknown_name("quantity", entry["quantity"], QUANTITIES)).rstrip(".")]
    if entry.get("model") is None and model is None:
        return ["names no `model`, and the file has none"]
    removes = entry.get("num_remove") is not None
    if removes != isinstance(entry.get("values"), Mapping) or removes == ("value" in entry):
        return ["needs `values` by operator with `num_remove`, `value` without"]
    values = entry["values"] if removes else {"value": entry["value"]}
    if not values:
        return ["has no `values`"]
    faults = (shape_error(_bound(value)[0], float, place) for value in values.values())
    return [fault for fault in faults if fault is not None]


def _bound(value: Any) -> tuple[Any, bool]:
    """Return the number of `{at_least: number}` or of a number, and whether it is a bound."""
    if isinstance(value, Mapping) and set(value) == {"at_least"}:
        return value["at_least"], True
    return value, False


def with_model(expected: Any, model: str | None) -> Any:
    """Return checked expectations in which every number names its model."""
    if not isinstance(expected, Mapping) or "numbers" not in expected:
        return expected
    numbers = [{**entry, "model": entry.get("model") or model} for entry in expected["numbers"]]
    return {**expected, "numbers": numbers}


def expected_numbers(expected: Any) -> list[ExpectedNumber]:
    """List the numbers of checked expectations, in their order."""
    if not isinstance(expected, Mapping):
        return []
    found = []
    for entry in expected.get("numbers", ()):
        common = {key: entry[key] for key in SHAPE if entry.get(key) is not None}
        values = entry.get("values") or {NO_OPERATOR: entry.get("value")}
        for operator, given in values.items():
            value, at_least = _bound(given)
            found.append(ExpectedNumber(value=value, at_least=at_least, recover=operator, **common))
    return found


__all__ = ["ExpectedNumber", "expected_faults", "expected_numbers", "with_model"]
