"""A sweep of which this process runs a part, and which goes on where it stopped.

Every process runs consecutive whole batches of the ones that a single process would run, so that
each batch computes the same bits; the sums of all are put together at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import distributed
from .errors import CalibrationError
from .fingerprint import fingerprint, tensor_sha256
from .records import versions
from .resume import SavedSweep
from .shared_parts import Parts
from .token_batches import Batch, split_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SweepPart:
    """The batches that are left to this process.

    Attributes:
        batches: What to run.
        first_window: Number of the first window, counted over the whole sweep.
        first_token: Number of counted tokens before it.
        idle: Whether nothing is left, or nothing of it counts: the first batch that counts is run
            all the same, and none of its tokens counts, so that every process knows all shapes.
    """

    batches: Sequence[Batch]
    first_window: int
    first_token: int
    idle: bool = False


def part_of_sweep(batches: Sequence[Batch], done: int = 0) -> SweepPart:
    """Return this process' part of a sweep, of which some batches are done.

    Raises:
        CalibrationError: If no token of any batch counts.
    """
    tokens = [_counted_tokens(batch) for batch in batches]
    if not any(tokens):
        raise CalibrationError(
            "no calibration tokens: every position was masked out or no batch was given. "
            "Give at least one window of text."
        )
    own = distributed.share_of(len(batches))
    first = own.start + done
    windows = sum(split_batch(batch)[0].shape[0] for batch in batches[:first])
    idle = not any(tokens[first : own.stop])
    counting = next(index for index, count in enumerate(tokens) if count)
    left = batches[counting : counting + 1] if idle else batches[first : own.stop]
    return SweepPart(left, windows, sum(tokens[:first]), idle=idle)


def _counted_tokens(batch: Batch) -> int:
    ids, mask = split_batch(batch)
    return ids.numel() if mask is None else int(mask.bool().sum())


def run_sweep(
    batches: Iterable[Batch],
    parts: Parts,
    passes: Callable[[Iterable[Batch], SweepPart], Iterator[int]],
    *,
    bar: Callable[[Iterable[Batch]], Iterable[Batch]],
    begin: Callable[[int], None],
    key: Callable[[], Mapping[str, Any]],
) -> None:
    """Run this process' part of a sweep and put the parts of all together.

    Args:
        batches: All batches.
        parts: What the sweep adds up.
        passes: Runs the model over the batches it is given, and yields how many of them are added
            up whenever one is.
        bar: Shows a progress bar over batches.
        begin: Called with the number of counted tokens before the first batch.
        key: Says of which model and accumulators the sums are.

    Raises:
        CalibrationError: If there is no batch.
    """
    every = list(batches)
    with distributed.section():
        saved = SavedSweep(lambda: {**key(), "batches": _batches_sha256(every)})
        done, tensors = saved.load()
        parts.load(tensors)
        part = part_of_sweep(every, done)
        begin(part.first_token)
        for count in passes(bar(part.batches), part):
            if saved.due() and not part.idle:
                saved.save(done + count, parts.tensors())
    parts.combine()


def _batches_sha256(batches: Sequence[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in split_batch(batch):
            digest.update(b"-" if tensor is None else tensor_sha256(tensor).encode())
    return digest.hexdigest()


def model_key(*models: PreTrainedModel) -> dict[str, Any]:
    """Return JSON values that tell models apart: class, dtype, config, a sample of all weights."""
    found: list[dict[str, Any]] = [
        {"class": type(model).__name__, "dtype": str(model.dtype), **fingerprint(model)}
        for model in models
    ]
    return {"models": found, "versions": versions()}
