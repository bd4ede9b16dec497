"""Remove the layer that leaves the lowest loss, measure again, repeat; cheaper than naively.

Every round starts candidates from kept hidden states of the model pruned so far (see
`removal_losses`); states up to the layer that went last stay valid for the next round. Where the
vocabulary is large, `vocabulary_bound` spares most of them the whole head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from tqdm.auto import tqdm

from .decoder import decoder_layers, remove_layers_, share_tensors
from .errors import UnsupportedModelError
from .removal_losses import (
    MAX_STATES_BYTES,
    RemovalScorer,
    candidate_states,
    mean_loss,
    state_bytes,
)
from .suffix import SuffixScorer
from .vocabulary_bound import Bounded, VocabularyBound, vocabulary_bound

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
    first = SuffixScorer(model, ids, batch_size=batch_size, progress=False)
    bound = None
    if len(allowed) * state_bytes(model, ids) <= MAX_STATES_BYTES:
        bound = vocabulary_bound(first, candidate_states(model, ids, allowed))
    states, steps = first.states, list[GreedyStep]()
    total = sum(len(allowed) - step for step in range(num_remove))
    with tqdm(total=total, desc="greedy-ppl", disable=None if progress else True) as bar:
        chooser = _Chooser(bound, bar)
        while len(steps) < num_remove:
            left = [position for position, layer in enumerate(layers) if layer in allowed]
            scorer = RemovalScorer(current, ids, left, batch_size=batch_size, states=states)
            loss, best = chooser.best(scorer, left, layers)
            steps.append(GreedyStep(layers.pop(best), loss))
            states = {k: parts for k, parts in scorer.scorer.states.items() if k <= best}
            current = remove_layers_(share_tensors(current), [best])
    return steps


@dataclass(frozen=True)
class _Chooser:
    """Finds the best removal of a round; a layer's suffix is compared with the whole model once."""

    bound: VocabularyBound | None
    bar: tqdm
    trusted: set[int] = field(default_factory=set)

    def best(
        self, scorer: RemovalScorer, left: Sequence[int], layers: Sequence[int]
    ) -> tuple[float, int]:
        """Return the lowest loss and the position of the layer that goes."""
        candidates: list[tuple[float, int, Bounded | None]] = []
        refused: list[UnsupportedModelError] = []
        for position in left:
            try:
                suffix = scorer.suffix(position, trusted=layers[position] in self.trusted)
            except UnsupportedModelError as error:
                refused.append(error)
                continue
            if suffix.start:
                self.trusted.add(layers[position])
            if self.bound is None:
                candidates.append((scorer.loss(suffix), position, None))
            else:
                bounded = self.bound.lower(scorer.scorer, suffix)
                candidates.append((mean_loss(bounded.lower), position, bounded))
            self.bar.update()
        if not candidates:
            raise refused[0]
        best: tuple[float, int] | None = None
        for lower, position, parts in sorted(candidates, key=lambda item: item[:2]):
            found = lower
            if self.bound is not None and parts is not None:
                if best is not None and lower > best[0] + self.bound.margin:
                    break
                found = mean_loss(self.bound.exact(scorer.scorer, parts))
            best = min(best or (found, position), (found, position))
        assert best is not None
        return best
