"""What reads hidden states during a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .shared_parts import Parts
from .token_batches import TokenRows


class Accumulator(Protocol):
    """Something that reads hidden states batch by batch."""

    @property
    def states(self) -> Sequence[int]:
        """Indices of the hidden states it reads."""

    def update(self, states: Mapping[int, Tensor], rows: TokenRows) -> None:
        """Add one batch: `states[l]` is (N, C), the counted tokens of hidden state l."""


@runtime_checkable
class SharedAccumulator(Accumulator, Protocol):
    """One whose sums several processes put together, and that goes on after an interruption."""

    parts: Parts

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON values that say what it adds up."""

    def begin(self, token: int) -> None:
        """Start, or go on, at a counted token: the number of those before it in the sweep."""
