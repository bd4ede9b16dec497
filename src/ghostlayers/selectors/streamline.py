"""LLM-Streamline (Chen et al., arXiv 2403.19135): remove one contiguous block."""

from __future__ import annotations

from ..errors import PlanError
from . import SelectionContext


def select_streamline(context: SelectionContext) -> list[int]:
    """Remove the block [s, s+k) whose input and output are most alike: the largest S[s, s+k].

    The published code takes the cosine over the sequence dimension by a default argument; the
    paper and this function take it over channels.

    Returns:
        Removed layers, ascending. Ties go to the shallower block.

    Raises:
        PlanError: If protected layers leave no run of `num_remove` layers.
    """
    size, allowed = context.num_remove, set(context.allowed)
    scores = {
        start: float(context.similarity.matrix[start, start + size])
        for start in context.allowed
        if all(layer in allowed for layer in range(start, start + size))
    }
    if not scores:
        raise PlanError(
            f"streamline: no {size} neighbouring layers may all be removed (allowed: "
            f"{list(context.allowed)}). Lower `num_remove` or choose another selector."
        )
    best = max(scores, key=lambda start: (scores[start], -start))
    return list(range(best, best + size))
