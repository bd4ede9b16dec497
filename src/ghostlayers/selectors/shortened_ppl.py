"""Shortened LLaMA (Kim et al., arXiv 2402.02834): perplexity without each single layer."""

from __future__ import annotations

import math

from . import Choice, ModelContext


def select_shortened_ppl(context: ModelContext) -> Choice:
    """Remove the k layers whose single removal leaves the lowest perplexity (paper, section 3.1).

    Same numbers as the published code, which runs the whole model for each layer; here a candidate
    starts from the hidden state in front of the layer that goes.

    Returns:
        The choice, with the perplexities. Ties go to the shallower layer; a layer that the
        architecture cannot lose alone is no candidate.

    Raises:
        UnsupportedModelError: If the architecture leaves fewer than k candidates.
    """
    from tqdm.auto import tqdm

    from ..errors import UnsupportedModelError
    from ..removal_losses import RemovalScorer

    ids, batch_size = context.score_ids, context.config.batch_size
    scorer = RemovalScorer(context.model, ids, context.allowed, batch_size=batch_size)
    losses: dict[int, float] = {}
    refused: dict[int, UnsupportedModelError] = {}
    off = None if context.progress else True
    for layer in tqdm(context.allowed, desc="shortened-ppl", disable=off, unit="layer"):
        try:
            losses[layer] = scorer.loss(scorer.suffix(layer))
        except UnsupportedModelError as error:
            refused[layer] = error
    if len(losses) < context.num_remove:
        raise next(iter(refused.values()))
    ranked = sorted(losses, key=lambda layer: (losses[layer], layer))
    record = {
        "windows": ids.shape[0],
        "window": ids.shape[1],
        "scores": [
            {"layer": layer, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
            for layer, loss in losses.items()
        ],
        "refused": [{"layer": k, "reason": str(error)} for k, error in refused.items()],
    }
    return Choice(tuple(sorted(ranked[: context.num_remove])), record)
