"""The parts of an accumulator that are saved, and put together over processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from . import distributed


class Part(Protocol):
    """A part of an accumulator that can be saved and put together over processes."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all there is to save, by name."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` returned."""

    def combine(self) -> None:
        """Put the parts of all processes together, on each of them."""


class Parts:
    """The parts of an accumulator, some of which are made when the first batch comes."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self._loaded: dict[str, Tensor] = {}

    def add(self, name: str, part: Any) -> Any:
        """Register a part, which gets what was loaded under its name; return it."""
        self.items[name] = part
        head = f"{name}/"
        own = {key[len(head) :]: t for key, t in self._loaded.items() if key.startswith(head)}
        if own:
            part.load(own)
            self._loaded = {k: t for k, t in self._loaded.items() if not k.startswith(head)}
        return part

    def tensors(self) -> dict[str, Tensor]:
        """Return all there is to save, by name."""
        found = dict(self._loaded)
        for name, part in self.items.items():
            found |= {f"{name}/{key}": tensor for key, tensor in part.tensors().items()}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` returned; parts that come later get theirs then."""
        self._loaded = dict(tensors)
        for name, part in list(self.items.items()):
            self.add(name, part)

    def combine(self) -> None:
        """Put the parts of all processes together."""
        for part in self.items.values():
            part.combine()


class Rows:
    """Rows of tokens in the order of the sweep, batch by batch.

    Args:
        dim: Along which dimension they are put together.
    """

    def __init__(self, dim: int = 0) -> None:
        self.dim = dim
        self.batches: list[Tensor] = []

    def append(self, rows: Tensor) -> None:
        """Add the rows of one batch."""
        self.batches.append(rows)

    def merge(self, other: Rows) -> None:
        """Add the rows of a sweep behind this one."""
        self.batches += other.batches

    def joined(self) -> Tensor:
        """Return all rows; there must have been a batch."""
        return torch.cat(self.batches, dim=self.dim)

    def tensors(self) -> dict[str, Tensor]:
        """Return all there is to save, by name."""
        return {"rows": self.joined()} if self.batches else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` returned."""
        self.batches = [tensors["rows"]]

    def combine(self) -> None:
        """Put the rows of all processes together, in the order of the windows."""
        if distributed.size() == 1:
            return
        own = self.joined().contiguous()
        shapes = distributed.gather_each(tuple(own.shape))
        self.batches = [
            distributed.broadcast_(
                own if source == distributed.rank() else own.new_empty(shape), source
            )
            for source, shape in enumerate(shapes)
        ]
