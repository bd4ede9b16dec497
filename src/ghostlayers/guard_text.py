"""What the guard reads: held-out windows of the calibration text, and text of the dense model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import distributed
from .moments import held_out_windows
from .sampling import written_ids
from .suffix import SuffixScorer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GUARD_WINDOWS = 8
# Windows that the dense model writes, and up to how many tokens each has.
WRITTEN_WINDOWS = 16
WRITTEN_TOKENS = 128
# A seed that nobody else gives: no repair may have seen what tests it.
WRITTEN_SEED = 0x67756172


def guard_numbers(num_windows: int) -> list[int]:
    """List up to `GUARD_WINDOWS` of the held-out windows, evenly spread."""
    held_out = held_out_windows(num_windows)
    step = max(1, len(held_out) // GUARD_WINDOWS)
    return held_out[::step][:GUARD_WINDOWS]


def guard_windows(ids: torch.Tensor) -> torch.Tensor:
    """Take the windows of `guard_numbers`; (n, T)."""
    return ids[guard_numbers(len(ids))]


class GuardScorer(SuffixScorer):
    """Scores models on the held-out windows of (n, T) calibration windows, and on written text.

    Args:
        dense: The dense model.
        ids: (n, T) int64 calibration windows.
        batch_size: Windows per forward pass.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        ids: torch.Tensor,
        *,
        batch_size: int = 1,
        progress: bool = True,
    ) -> None:
        settings: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
        super().__init__(dense, guard_windows(ids), description="guard", **settings)
        self._calibration = ids
        self._settings = settings
        self._written: SuffixScorer | None = None

    def written(self) -> SuffixScorer | None:
        """Return what scores models on windows that the dense model writes, once for all calls.

        None if a weight is offloaded: each token would have to read all of them.
        """
        weights = self.model.parameters()
        if distributed.everyone(not any(weight.is_meta for weight in weights)):
            self._written = self._written or self._write()
            return self._written
        return None

    def texts(self) -> list[torch.Tensor]:
        """Return the windows that it reads: held-out ones, then those that the model writes."""
        written = self.written()
        return [self.ids] if written is None else [self.ids, written.ids]

    def _write(self) -> SuffixScorer:
        ids = written_ids(
            self.model,
            self._calibration,
            num_windows=WRITTEN_WINDOWS,
            window=min(self._calibration.shape[1], WRITTEN_TOKENS),
            seed=WRITTEN_SEED,
            progress=self.progress,
        )
        return SuffixScorer(self.model, ids, description="guard", **self._settings)

    def forget(self) -> None:
        """Free the kept hidden states."""
        for scorer in filter(None, (self, self._written)):
            scorer.states.clear()


def guard_scorer(
    dense: PreTrainedModel, ids: torch.Tensor, *, batch_size: int = 1, progress: bool = True
) -> GuardScorer:
    """Return what scores models for the guard; see `GuardScorer`."""
    return GuardScorer(dense, ids, batch_size=batch_size, progress=progress)
