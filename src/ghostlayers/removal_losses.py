"""Loss of a model without one of its layers, for every layer: the states below are run once.

State l enters layer l. Without layer l the states up to l are what they were, so a candidate starts
from state l and runs the layers above. States are kept in main memory; where all of them would take
more than `MAX_STATES_BYTES`, only every second, third, ... is, and a candidate starts from the
nearest one below.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .decoder import decoder_layers, remove_layers_, share_tensors, text_config
from .errors import UnsupportedModelError
from .plan import PruningPlan
from .suffix import Suffix, SuffixScorer, first_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_STATES_BYTES = 2 * 2**30


def state_bytes(model: PreTrainedModel, ids: Tensor) -> int:
    """Return the size of one hidden state of all (n, T) windows."""
    size: int = text_config(model.config).hidden_size
    return ids.numel() * size * model.dtype.itemsize


def candidate_states(model: PreTrainedModel, ids: Tensor, candidates: Sequence[int]) -> list[int]:
    """List the states to keep for removing one of some layers (positions in the model)."""
    depth = len(decoder_layers(model))
    plans = [PruningPlan(depth, (layer,)) for layer in candidates]
    return kept_states(model, ids, {first_state(plan) for plan in plans})


def kept_states(
    model: PreTrainedModel, ids: Tensor, wanted: Collection[int], limit: int = MAX_STATES_BYTES
) -> list[int]:
    """List hidden states to keep so that they fit into a limit.

    Args:
        model: The model.
        ids: (n, T) windows.
        wanted: States that are wanted.
        limit: Bytes of main memory.

    Returns:
        All wanted states, or every second, third, ... of them, the lowest first; at least one.
    """
    states = sorted(state for state in wanted if state > 0)
    step = max(1, math.ceil(len(states) * state_bytes(model, ids) / limit))
    return states[::step]


def start_at(states: Sequence[int], state: int) -> int:
    """Return the highest kept state that is not above a given one; 0 if there is none."""
    return max((kept for kept in states if kept <= state), default=0)


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean; infinite if one loss is not finite."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf


class RemovalScorer:
    """Losses of a model without one of its layers.

    Args:
        model: The model, dense or pruned; left as it is.
        ids: (n, T) int64 windows.
        candidates: Layers, as positions in this model, that may be asked for.
        batch_size: Windows per forward pass.
        states: States of this model that are known already, as in `SuffixScorer.states`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        candidates: Sequence[int],
        *,
        batch_size: int = 1,
        states: dict[int, list[Tensor] | None] | None = None,
    ) -> None:
        self.model = model
        self.depth = len(decoder_layers(model))
        self.scorer = SuffixScorer(model, ids, batch_size=batch_size, progress=False)
        self.scorer.states = dict(states or {})
        self.states = candidate_states(model, ids, candidates)
        self.scorer.keep(self.states)

    def suffix(self, layer: int, *, trusted: bool = False) -> Suffix:
        """Build the part of the model without a layer that has to run.

        Args:
            layer: The layer that goes.
            trusted: Leave out the comparison with the whole model.

        Raises:
            UnsupportedModelError: If the architecture cannot lose this layer.
        """
        plan = PruningPlan(self.depth, (layer,))
        start = start_at(self.states, first_state(plan))
        if not trusted or not start or self.scorer.states.get(start) is None:
            pruned = remove_layers_(share_tensors(self.model), plan.removed)
            return self.scorer.suffix(pruned, plan, start)
        lacking = PruningPlan(self.depth, tuple({*range(start), layer}))
        try:
            model = remove_layers_(share_tensors(self.model), lacking.removed)
        except UnsupportedModelError:
            return self.suffix(layer)
        return Suffix(model, lacking, start)

    def loss(self, suffix: Suffix) -> float:
        """Mean cross-entropy in nats; infinite if it is not finite."""
        return mean_loss(self.scorer.losses(suffix))
