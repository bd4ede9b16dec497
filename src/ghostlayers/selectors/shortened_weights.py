"""Shortened LLaMA (Kim et al., arXiv 2402.02834): Taylor+ and Magnitude+."""

from __future__ import annotations

from . import Choice, ModelContext


def select_shortened_taylor(context: ModelContext) -> Choice:
    """Remove the k layers of lowest Σ_weights |Σ_batches θ·∂loss/∂θ| (paper, section 3.1).

    The "+" protection (first four, last two layers) is in `context.allowed` already. The published
    code divides the loss by the tokens of each batch and counts norm weights; here the loss is the
    mean over all windows and weights are matrices, as in the paper's formula.

    Returns:
        The choice, with the scores. Ties go to the shallower layer.

    Raises:
        UnsupportedModelError: If weights are low-bit, or offloaded where layers cannot run one by
            one.
        CalibrationError: If a score is not finite.
    """
    from ..weight_scores import taylor_scores

    ids = context.score_ids
    scores = taylor_scores(
        context.model,
        ids,
        context.allowed,
        batch_size=context.config.batch_size,
        progress=context.progress,
    )
    return lowest(context, scores, {"windows": ids.shape[0], "window": ids.shape[1]})


def select_shortened_magnitude(context: ModelContext) -> Choice:
    """Remove the k layers of lowest Σ_weights |θ| (paper, section 3.1); no calibration is read.

    Returns:
        The choice, with the scores. Ties go to the shallower layer.

    Raises:
        UnsupportedModelError: If weights are low-bit.
        CalibrationError: If a score is not finite.
    """
    from ..weight_scores import magnitude_scores

    return lowest(context, magnitude_scores(context.model, context.allowed), {})


def lowest(context: ModelContext, scores: dict[int, float], record: dict[str, int]) -> Choice:
    """Choose the k layers of lowest score."""
    ranked = sorted(scores, key=lambda layer: (scores[layer], layer))
    listed = [{"layer": layer, "score": score} for layer, score in scores.items()]
    plus = {"plus": context.config.plus}
    return Choice(tuple(sorted(ranked[: context.num_remove])), {**record, **plus, "scores": listed})
