"""Cosines over the sequence instead of over channels: for comparison with published code only.

Layer-selection code of LinearPatch and of Ghosted Layers takes the cosine of two (B, T, C) states
along the default dimension of its library call, T, where the papers define it over C. Layers chosen
by it can differ from those of the paper's own formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .sweep import TokenRows

CHUNK_CHANNELS = 64


def sequence_cosines(states: Mapping[int, torch.Tensor], rows: TokenRows) -> torch.Tensor:
    """Sum cosines between states, each of one channel over the tokens of one window.

    Args:
        states: Hidden states 0..L of the counted tokens of whole windows, each (N, C).
        rows: Where those tokens stand.

    Returns:
        (L+1, L+1) float64: the mean over channels, times the counted tokens of the window, summed
        over windows. A channel that is zero throughout a window has cosine 0.
    """
    import torch

    size = states[0].shape[1]
    total = torch.zeros(len(states), len(states), dtype=torch.float64)
    _, lengths = torch.unique_consecutive(rows.window, return_counts=True)
    first = 0
    for length in lengths.tolist():
        for channel in range(0, size, CHUNK_CHANNELS):
            part = torch.stack(
                [
                    states[index][first : first + length, channel : channel + CHUNK_CHANNELS]
                    for index in range(len(states))
                ]
            )
            flat = torch.nn.functional.normalize(part, dim=1).flatten(1)  # (L+1, T·c)
            total += (flat @ flat.T).double().cpu() * (length / size)
        first += length
    return total
