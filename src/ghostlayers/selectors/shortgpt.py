"""ShortGPT (Men et al., arXiv 2403.03853): remove the layers that change their input least."""

from __future__ import annotations

from . import SelectionContext


def select_shortgpt(context: SelectionContext) -> list[int]:
    """Remove the k layers of lowest block influence, BI_i = 1 − S[i, i+1] (paper, equation 1).

    Returns:
        Removed layers, ascending. Ties go to the shallower layer.
    """
    influence = context.similarity.block_influence
    ranked = sorted(context.allowed, key=lambda layer: (float(influence[layer]), layer))
    return sorted(ranked[: context.num_remove])
