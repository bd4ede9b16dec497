"""Layer-by-layer cosine similarity of hidden states, and the scores read off it.

Legend: N counted tokens, C hidden size, L decoder layers. Hidden states are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CalibrationError
from .sequence_cosines import sequence_cosines

if TYPE_CHECKING:
    import torch

    from .sweep import TokenRows

CHUNK_TOKENS = 64
# What a cosine is taken over.
CHANNELS, SEQUENCE = "channels", "sequence"


@dataclass(frozen=True)
class Similarity:
    """Mean cosine similarity between all hidden states of the dense model.

    Attributes:
        matrix: (L+1, L+1) float64; entry [i, j] is the mean over counted tokens of the cosine
            between hidden states i and j, taken over channels. State L is the raw output of the
            last layer, before the final norm.
        num_tokens: Number N of counted tokens.
    """

    matrix: np.ndarray
    num_tokens: int

    @property
    def num_layers(self) -> int:
        """Depth L."""
        return len(self.matrix) - 1

    @property
    def inputs(self) -> np.ndarray:
        """(L, L) float64: the matrix of the papers, over the inputs of layers 0..L-1."""
        return self.matrix[:-1, :-1]

    @property
    def block_influence(self) -> np.ndarray:
        """(L,) float64 in [0, 2]: BI_i = 1 − S[i, i+1] (ShortGPT, arXiv 2403.03853)."""
        return 1.0 - np.diagonal(self.matrix, offset=1)

    @property
    def rls(self) -> float:
        """Representation Locality Score: −log2 of the mean of S[i, j], i < j (LoRP).

        It is infinite when that mean is not positive: the states share no common direction.
        """
        rows, columns = np.triu_indices(self.num_layers, k=1)
        mean = float(self.inputs[rows, columns].mean()) if len(rows) else 1.0
        return float(-np.log2(mean)) if mean > 0 else float("inf")


@dataclass
class CosineSums:
    """Sums of cosines.

    Attributes:
        total: (L+1, L+1) float64.
        num_tokens: Number N of counted tokens.
    """

    total: torch.Tensor
    num_tokens: int = 0

    def add(self, total: torch.Tensor, num_tokens: int) -> None:
        """Add those of other tokens."""
        self.total += total
        self.num_tokens += num_tokens


class SimilarityAccumulator:
    """Sums cosine similarities over batches; no activation outlives its batch.

    Args:
        num_layers: Depth L of the model that is measured.
        over: `channels`, or `sequence`; see `sequence_cosines`.
    """

    def __init__(self, num_layers: int, over: str = CHANNELS) -> None:
        import torch

        from .exact_sums import Running
        from .shared_parts import Parts

        self.over = over
        self.states: Sequence[int] = range(num_layers + 1)
        shape = (num_layers + 1, num_layers + 1)
        self.parts = Parts()
        self.running: Any = self.parts.add(
            "cosines", Running(lambda: CosineSums(torch.zeros(shape, dtype=torch.float64)))
        )

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON values that say what it adds up."""
        return {"cosines": len(self.states), "over": self.over}

    def begin(self, token: int) -> None:
        """Start at a token; see `sweep.Accumulator`."""

    def update(self, states: Mapping[int, torch.Tensor], rows: TokenRows) -> None:
        """Add one batch.

        Args:
            states: Hidden states 0..L of the counted tokens, each (N, C) float32 or float64.
            rows: Where those tokens stand.
        """
        import torch

        if self.over == SEQUENCE:
            self.running.add(sequence_cosines(states, rows), len(rows.window))
            return
        count, size = states[0].shape
        shape = (len(self.states), min(CHUNK_TOKENS, count), size)
        unit = torch.empty(shape, dtype=states[0].dtype, device=states[0].device)
        total = torch.zeros(len(self.states), len(self.states), dtype=torch.float64)
        for first in range(0, count, CHUNK_TOKENS):
            chunk = unit[:, : min(CHUNK_TOKENS, count - first)]
            for index in self.states:
                part = states[index][first : first + CHUNK_TOKENS]
                chunk[index] = torch.nn.functional.normalize(part, dim=-1)
            flat = chunk.flatten(1)  # (L+1, n·C)
            total += (flat @ flat.T).double().cpu()
        self.running.add(total, count)

    def result(self) -> Similarity:
        """Return the mean over all tokens added so far.

        Raises:
            CalibrationError: If no token was counted.
        """
        sums: CosineSums = self.running.total
        if sums.num_tokens == 0:
            raise CalibrationError(
                "no calibration tokens: every position was masked out or no batch was given. "
                "Give at least one window of text."
            )
        mean = sums.total.numpy() / sums.num_tokens
        mean = np.clip((mean + mean.T) / 2.0, -1.0, 1.0)
        np.fill_diagonal(mean, 1.0)
        return Similarity(matrix=mean, num_tokens=sums.num_tokens)
