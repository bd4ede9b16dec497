"""The gradient steps of a refinement: Adam with a warm-up and a cosine down to 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .refinement_windows import RefinementWindows
from .trained_maps import TrainedMap, recording, take_gradients_

# Steps up to the peak.
WARMUP = 4


class Follower(Protocol):
    """A model whose divergence from the dense one reaches some maps."""

    def divergence(self, windows: RefinementWindows, index: int) -> tuple[Tensor, int]:
        """Return Σ D over the positions of a batch, in nats, and their number."""


class Steps:
    """A run of steps, each on one batch of windows; it stops where a divergence is not finite.

    Args:
        student: The model that follows.
        windows: Batches with what the dense model says.
        maps: What the steps change.
        steps: Steps of the whole run.
        rate: Length of a step at its peak, in root mean squares of a map's weight in its units.
        seed: Seed of the order of the batches.
        progress: Show a progress bar when standard error is a terminal.

    Attributes:
        left: Steps that were not made yet.
    """

    def __init__(
        self,
        student: Follower,
        windows: RefinementWindows,
        maps: Sequence[TrainedMap],
        steps: int,
        rate: float,
        seed: int,
        progress: bool,
    ) -> None:
        self.left = steps
        self._student, self._windows, self._maps = student, windows, maps
        groups = [{"params": [trained.moved], "lr": rate * trained.scale} for trained in maps]
        self._optimizer = torch.optim.Adam(groups)
        decay = partial(_decay, steps=steps)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, decay)
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self._off = None if progress else True

    def make(self, count: int) -> bool:
        """Make up to so many of the steps that are left; say if all divergences were finite."""
        bar = tqdm(total=min(count, self.left), desc="refining", disable=self._off, unit="step")
        with bar, recording(self._maps):
            for _ in range(min(count, self.left)):
                total, positions = self._student.divergence(self._windows, self._next())
                if not math.isfinite(float(total.detach())):
                    return False
                take_gradients_(total, self._maps, positions)
                self._optimizer.step()
                self._schedule.step()
                for trained in self._maps:
                    trained.write_()
                self.left -= 1
                bar.update()
        return True

    def _next(self) -> int:
        if not self._order:
            shuffled = torch.randperm(len(self._windows.order), generator=self._generator).tolist()
            self._order = [self._windows.order[index] for index in shuffled]
        return self._order.pop()


def _decay(step: int, *, steps: int) -> float:
    """Return the step length over its peak: linear warm-up, then a cosine down to nearly 0."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * step / steps))


__all__ = ["Steps"]
