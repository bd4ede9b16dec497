"""Running sums that do not depend on the order of their terms, to be saved and put together.

A sum is kept as two float64 numbers, its rounded value and what rounding lost (Dekker 1971; error
2^-104 per term), so the rounded value of 3 processes, of an interrupted run and of an
uninterrupted one are the same bits. A plain float64 sum differs in its last bits with the order,
and an operator behind a Gram matrix of condition 1e10 then in its sixth digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import distributed
from .errors import CalibrationError
from .shared_parts import Parts

# Numbers that are added at once on a CPU: temporary tensors stay in the cache.
CHUNK = 2**15
# Numbers that travel at once between processes.
MESSAGE = 2**24
# Metadata of a dataclass field that is no sum: all sets of tokens share it.
SHARED = "shared"
MomentsT = TypeVar("MomentsT", bound=Any)


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return fl(a + b) and the exact rest (Knuth), of floats or of float64 tensors."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def add_(high: Tensor, low: Tensor, term: Tensor, term_low: Tensor | None = None) -> None:
    """Add a term to a running sum in place.

    Args:
        high: The sum, float64 and contiguous.
        low: What it lacks, like `high`.
        term: Like `high`.
        term_low: What the term lacks.
    """
    terms = [term] if term_low is None else [term, term_low]
    chunk = CHUNK if high.device.type == "cpu" else MESSAGE
    for parts in zip(*(t.view(-1).split(chunk) for t in (high, low, *terms)), strict=True):
        sums, rest, more = parts[0], parts[1], parts[2]
        total, lost = two_sum(sums, more)
        rest.add_(lost)
        if term_low is not None:
            rest.add_(parts[3])
        total, lost = two_sum(total, rest)
        sums.copy_(total)
        rest.copy_(lost)


def _add_floats(pair: tuple[float, float], term: float, low: float = 0.0) -> tuple[float, float]:
    total, lost = two_sum(pair[0], term)
    total, lost = two_sum(total, pair[1] + lost + low)
    return total, lost


def add_up_(high: Tensor, low: Tensor) -> None:
    """Sum a running sum over all processes, in place, in the order of their numbers."""
    if distributed.size() == 1:
        return
    for sums, rest in zip(high.view(-1).split(MESSAGE), low.view(-1).split(MESSAGE), strict=True):
        own = sums.clone(), rest.clone()
        sums.zero_()
        rest.zero_()
        for source in range(distributed.size()):
            sent = own if source == distributed.rank() else tuple(map(torch.empty_like, own))
            add_(sums, rest, *(distributed.broadcast_(part, source) for part in sent))


class Running(Generic[MomentsT]):
    """A running sum of moments: any dataclass of tensors and numbers that add up.

    Float fields and float64 tensors are summed exactly, integers are counts, lists are rows of
    tokens in their order, dataclasses and dicts of them are entered; fields with `SHARED` metadata
    are left alone.

    Args:
        zeros: Makes empty moments.
    """

    def __init__(self, zeros: Callable[[], MomentsT]) -> None:
        self.zeros = zeros
        self.total: MomentsT = zeros()
        self.low: dict[str, Any] = {
            path: torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
            for path, _, _, value in _fields(self.total)
            if isinstance(value, Tensor | float)
        }

    def add(self, *rows: Any) -> None:
        """Add the tokens of one batch, as the moments' own `add` takes them."""
        batch = self.zeros()
        batch.add(*rows)
        self._add(batch, {})

    def merge(self, other: Running[MomentsT]) -> None:
        """Add another sum, the tokens of which come behind these."""
        self._add(other.total, other.low)

    def _add(self, more: MomentsT, low: Mapping[str, Any]) -> None:
        terms = {path: value for path, _, _, value in _fields(more)}
        for path, holder, name, value in _fields(self.total):
            term = terms[path]
            if isinstance(value, Tensor):
                add_(value, self.low[path], term, low.get(path))
            elif isinstance(value, float):
                pair = _add_floats((value, self.low[path]), term, low.get(path, 0.0))
                setattr(holder, name, pair[0])
                self.low[path] = pair[1]
            else:  # a count, or rows of tokens
                setattr(holder, name, value + term)

    def tensors(self) -> dict[str, Tensor]:
        """Return all there is to save, by name."""
        found: dict[str, Tensor] = {}
        for path, _, _, value in _fields(self.total):
            if isinstance(value, list):
                for index, column in enumerate(zip(*value, strict=True)):
                    found[f"{path}#{index}"] = torch.cat(column)
                continue
            found[path] = torch.as_tensor(value, dtype=_dtype(value))
            if path in self.low:
                found[f"{path}~"] = torch.as_tensor(self.low[path], dtype=torch.float64)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` returned."""
        for path, holder, name, value in list(_fields(self.total)):
            if isinstance(value, Tensor):
                value.copy_(tensors[path])
                self.low[path].copy_(tensors[f"{path}~"])
            elif isinstance(value, list):
                columns = [tensors[key] for key in sorted(tensors) if key.startswith(f"{path}#")]
                if columns:
                    device = next(iter(self.low.values())).device
                    value[:] = [tuple(column.to(device) for column in columns)]
            else:
                setattr(holder, name, tensors[path].item())
                if path in self.low:
                    self.low[path] = tensors[f"{path}~"].item()

    def combine(self) -> None:
        """Sum over all processes."""
        if distributed.size() == 1:
            return
        for path, holder, name, value in list(_fields(self.total)):
            if isinstance(value, Tensor):
                add_up_(value, self.low[path])
            elif isinstance(value, list):
                device = next(iter(self.low.values())).device
                own = [tuple(part.cpu() for part in row) for row in value]
                rows = distributed.gather(own)
                value[:] = [tuple(part.to(device) for part in row) for row in rows]
            elif isinstance(value, float):
                pair = (0.0, 0.0)
                for other in distributed.gather_each((value, self.low[path])):
                    pair = _add_floats(pair, *other)
                setattr(holder, name, pair[0])
                self.low[path] = pair[1]
            else:
                setattr(holder, name, sum(distributed.gather_each(value)))


class SplitSums(Generic[MomentsT]):
    """Running sums of a fitting and a held-out part; they are made when the first batch comes."""

    def __init__(self) -> None:
        self.parts = Parts()
        self._sums: tuple[Running[MomentsT], ...] = ()

    def started(self, zeros: Callable[[], MomentsT]) -> tuple[Running[MomentsT], ...]:
        """Return both sums; the first call makes them."""
        if not self._sums:
            names = ("fit", "held out")
            self._sums = tuple(self.parts.add(name, Running(zeros)) for name in names)
        return self._sums

    def totals(self) -> tuple[MomentsT, MomentsT]:
        """Return the moments of both parts.

        Raises:
            CalibrationError: If no token was counted.
        """
        if not self._sums:
            raise CalibrationError("no calibration tokens: give at least one window of text.")
        fit, held_out = self._sums
        return fit.total, held_out.total


def _fields(
    moments: Any, head: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield path, holder, name and value of every field that adds up, each once."""
    seen = set() if seen is None else seen
    if id(moments) in seen:  # two parts share it
        return
    seen.add(id(moments))
    for item in fields(moments):
        value = getattr(moments, item.name)
        if item.metadata.get(SHARED):
            continue
        if is_dataclass(value):
            yield from _fields(value, f"{head}{item.name}.", seen)
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from _fields(part, f"{head}{item.name}.{key}.", seen)
        else:
            yield f"{head}{item.name}", moments, item.name, value


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, Tensor):
        return value.dtype
    return torch.float64 if isinstance(value, float) else torch.int64
