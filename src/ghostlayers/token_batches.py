"""Batches of token ids, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decoder import check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = Tensor | Mapping[str, Tensor]


def split_batch(batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return `input_ids` (B, T) and the attention mask (B, T) or None."""
    if isinstance(batch, Tensor):
        return batch, None
    return batch["input_ids"], batch.get("attention_mask")


def batches_of(windows: Tensor, batch_size: int) -> list[Tensor]:
    """Cut (n, T) windows into batches of at most `batch_size` windows."""
    return list(windows.split(batch_size)) if len(windows) else []


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


@dataclass(frozen=True)
class CountedBatch:
    """A batch with counted tokens.

    Attributes:
        ids: (B, T) int64.
        mask: (B, T), or None.
        rows: Where its N counted tokens stand.
        flat: (N,) int64, their indices into the flattened (B·T) batch.
        number: Its number among the batches, from 1 on, those without counted tokens included.
    """

    ids: Tensor
    mask: Tensor | None
    rows: TokenRows
    flat: Tensor
    number: int


def counted_batches(
    model: PreTrainedModel, batches: Iterable[Batch], first_window: int = 0, *, idle: bool = False
) -> Iterator[CountedBatch]:
    """Locate the counted tokens of batches; those without any are left out.

    Args:
        model: The model that will read them.
        batches: The batches.
        first_window: Number of the first window, counted over the whole sweep.
        idle: No token counts, and every batch is yielded; see `shared_sweep.SweepPart`.

    Raises:
        CalibrationError: If an id is not in the model's vocabulary.
    """
    for number, batch in enumerate(batches, start=1):
        ids, mask = split_batch(batch)
        check_ids(model, ids)
        rows, flat = token_rows(ids, mask, first_window)
        first_window += ids.shape[0]
        if idle:
            rows, flat = TokenRows(rows.window[:0], rows.position[:0]), flat[:0]
        elif not len(flat):
            continue
        yield CountedBatch(ids, mask, rows, flat, number)
