"""Remove the layer that leaves the lowest loss, measure again, repeat; cheaper than naively.

Every round starts candidates from kept hidden states of the model pruned so far (see
`removal_losses`); states up to the layer that went last stay valid for the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from tqdm.auto import tqdm

from .decoder import decoder_layers, remove_layers_, share_tensors
from .errors import UnsupportedModelError
from .removal_losses import RemovalScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GreedyStep:
    """One round: the layer of the dense model that went, and the loss without it, in nats."""

    layer: int
    loss: float


def remove_greedily(
    model: PreTrainedModel,
    ids: Tensor,
    allowed: Sequence[int],
    num_remove: int,
    *,
    batch_size: int = 1,
    progress: bool = True,
) -> list[GreedyStep]:
    """Choose layers one after the other.

    Args:
        model: The dense model; left as it is.
        ids: (n, T) int64 windows.
        allowed: Layers that may go.
        num_remove: Number of layers to remove.
        batch_size: Windows per forward pass.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        The steps in order. Ties go to the shallower layer.

    Raises:
        UnsupportedModelError: If the architecture can lose none of the layers left.
    """
    current, layers = model, list(range(len(decoder_layers(model))))
    states: dict[int, list[Tensor] | None] = {}
    trusted: set[int] = set()
    steps: list[GreedyStep] = []
    total = sum(len(allowed) - step for step in range(num_remove))
    with tqdm(total=total, desc="greedy-ppl", disable=None if progress else True) as bar:
        while len(steps) < num_remove:
            left = [position for position, layer in enumerate(layers) if layer in allowed]
            scorer = RemovalScorer(current, ids, left, batch_size=batch_size, states=states)
            best = _best(scorer, left, layers, trusted, bar)
            steps.append(GreedyStep(layers.pop(best[1]), best[0]))
            states = {k: parts for k, parts in scorer.scorer.states.items() if k <= best[1]}
            current = remove_layers_(share_tensors(current), [best[1]])
    return steps


def _best(
    scorer: RemovalScorer,
    left: Sequence[int],
    layers: Sequence[int],
    trusted: set[int],
    bar: tqdm,
) -> tuple[float, int]:
    """Return the lowest loss and the position of the layer that goes."""
    losses: list[tuple[float, int]] = []
    refused: list[UnsupportedModelError] = []
    for position in left:
        try:
            suffix = scorer.suffix(position, trusted=layers[position] in trusted)
        except UnsupportedModelError as error:
            refused.append(error)
            continue
        if suffix.start:
            trusted.add(layers[position])
        losses.append((scorer.loss(suffix), position))
        bar.update()
    if not losses:
        raise refused[0]
    return min(losses)
