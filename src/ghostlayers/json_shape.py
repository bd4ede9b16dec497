"""Checks that a JSON value has the keys and types that a reader relies on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 2**63
NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    object: "a value",
}


@dataclass(frozen=True)
class Maybe:
    """A value that may be null or absent."""

    shape: Any


@dataclass(frozen=True)
class Values:
    """A mapping of any keys to values of one shape."""

    shape: Any


def shape_error(value: Any, shape: Any, place: str = "") -> str | None:
    """Say where a value differs from a shape.

    Args:
        value: A JSON value.
        shape: A type (`str`, `int`, `float`, `bool`; `float` takes any finite number); a list of
            one shape; a mapping of required keys to shapes, further keys are free; `Maybe`;
            `Values`.
        place: Where the value stands, for the message.

    Returns:
        What is wrong first, such as "`rls` is 'x', not a number"; None if nothing is.
    """
    if isinstance(shape, Maybe):
        return None if value is None else shape_error(value, shape.shape, place)
    if isinstance(shape, type):
        return None if _is(value, shape) else _wrong(value, NAMES[shape], place)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _wrong(value, "a list", place)
        pairs = [(f"{place}[{index}]", item, shape[0]) for index, item in enumerate(value)]
    elif not isinstance(value, Mapping):
        return _wrong(value, "an object", place)
    elif isinstance(shape, Values):
        pairs = [(_join(place, key), item, shape.shape) for key, item in value.items()]
    else:
        pairs = [(_join(place, key), value.get(key), part) for key, part in shape.items()]
    return next(filter(None, (shape_error(item, part, where) for where, item, part in pairs)), None)


def _is(value: Any, kind: type) -> bool:
    if kind is object:
        return True
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if isinstance(value, int) and abs(value) > LARGEST:
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _join(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _wrong(value: Any, wanted: str, place: str) -> str:
    found = repr(value)
    shown = found if len(found) <= 60 else found[:57] + "..."
    return f"`{place or 'the file'}` is {shown}, not {wanted}"


__all__ = ["Maybe", "Values", "shape_error"]
