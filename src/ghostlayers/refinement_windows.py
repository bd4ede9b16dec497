"""The windows of a refinement: those that its steps read, and those that test them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decoder import input_embeddings
from .guard_text import guard_numbers
from .model_checks import evaluating
from .sampling import written_ids
from .suffix import SuffixScorer
from .sweep import batches_of
from .teacher_logits import top_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOP_K = 50
# How often the steps read a calibration window before the dense model writes as many more.
PASSES = 2


@dataclass(frozen=True)
class RefinementWindows:
    """Windows with what the dense model says on them.

    Attributes:
        ids: (B, T) batches.
        log_probs: (B, T, K) each, float16.
        tokens: (B, T, K) each, int32.
        states: (B, T, C) each, what enters the first layer that runs; None if all of them run.
        order: Numbers of the batches of one round of steps, before they are shuffled.
    """

    ids: list[Tensor]
    log_probs: list[Tensor]
    tokens: list[Tensor]
    states: list[Tensor] | None
    order: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, scorer: SuffixScorer, start: int, given: int | None = None) -> RefinementWindows:
        """Run the dense model once; the windows from number `given` on are written by it."""
        model, size = scorer.model, scorer.batch_size
        top_k = min(TOP_K, len(input_embeddings(model)))
        with evaluating(model), scorer.keeping(model, [start]):
            teacher = top_of(model, scorer.ids, top_k, size)
        parts = (batches_of(part, size) for part in (scorer.ids, *teacher))
        ids, log_probs, tokens = parts
        order = list(range(len(ids)))
        if given is not None and given < len(scorer.ids):
            order += order[: math.ceil(given / size)] * (PASSES - 1)
        return cls(ids, log_probs, tokens, scorer.states.get(start), order)


def windows_to_follow(
    dense: PreTrainedModel, ids: Tensor, count: int, batch_size: int, seed: int, progress: bool
) -> tuple[SuffixScorer, int]:
    """Return what runs the windows to follow, and how many of them are given.

    Of `count` windows to follow, the given ones serve for `PASSES` each. What is then missing, up
    to as many again, the dense model writes: a map that reads a few windows often learns them.
    """
    tested = set(guard_numbers(len(ids)))
    chosen = _spread([window for window in range(len(ids)) if window not in tested], count)
    follow, given = ids[chosen], PASSES * len(chosen)
    if missing := max(0, min(count - given, given)):
        window = ids.shape[1]
        more = written_ids(
            dense, follow, num_windows=missing, window=window, seed=seed, progress=progress
        )
        follow = torch.cat([follow, more.to(follow)])
    return SuffixScorer(dense, follow, batch_size=batch_size, progress=False), len(chosen)


def _spread(windows: list[int], count: int) -> list[int]:
    """Take up to `count` of the windows, evenly spread."""
    count = min(count, len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]
