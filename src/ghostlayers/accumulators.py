"""What reads hidden states during a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .shared_parts import Parts


@dataclass(frozen=True)
class TokenRows:
    """Where the counted tokens of a batch stand.

    Attributes:
        window: (N,) int64, number of the calibration window, counted over the whole sweep.
        position: (N,) int64, position in its window; the first counted token has position 0.
    """

    window: Tensor
    position: Tensor


def token_rows(ids: Tensor, mask: Tensor | None, first_window: int) -> tuple[TokenRows, Tensor]:
    """Locate the counted tokens of a batch.

    Returns:
        The rows, and their indices (N,) into the flattened (B·T) batch.
    """
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    flat = counted.flatten().nonzero().squeeze(1)
    window = (flat // ids.shape[1]) + first_window
    position = (counted.long().cumsum(dim=1) - 1).flatten()[flat]
    return TokenRows(window=window, position=position), flat


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
