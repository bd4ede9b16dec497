"""Greedy removal by perplexity: remove the best layer, measure again, repeat."""

from __future__ import annotations

import math
from typing import Any

from .. import distributed
from . import Choice, ModelContext


def select_greedy_ppl(context: ModelContext) -> Choice:
    """Remove k layers one after the other, each time the one that leaves the lowest perplexity.

    The greedy variant of `shortened-ppl`. The states of the model so far are run once per round,
    and only above the layer that went last; see `greedy_removal`.

    Returns:
        The choice, with the order of removal. Ties go to the shallower layer.

    Raises:
        UnsupportedModelError: If the architecture can lose none of the layers left.
    """
    from ..greedy_removal import remove_greedily

    ids = context.score_ids
    with distributed.alone():  # every process does all of it: few tokens, one step after another
        steps = remove_greedily(
            context.model,
            ids,
            context.allowed,
            context.num_remove,
            batch_size=context.config.batch_size,
            progress=context.progress,
        )
    record: dict[str, Any] = {
        "windows": ids.shape[0],
        "window": ids.shape[1],
        "order": [
            {
                "layer": step.layer,
                "loss": step.loss,
                "perplexity": math.exp(step.loss) if step.loss < 700 else math.inf,
            }
            for step in steps
        ],
    }
    return Choice(tuple(sorted(step.layer for step in steps)), record)
