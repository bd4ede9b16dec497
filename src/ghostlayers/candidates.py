"""Which cuts `--select auto` looks at, from the similarity matrix alone.

Legend: L decoder layers, S (L+1, L+1) mean cosine similarity of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .errors import PlanError
from .plan import PruningPlan
from .selectors import SelectionContext, get_selector
from .similarity import Similarity

LORP_CLUSTERS = (2, 3, 4)
# Contiguous blocks by similarity; `streamline` is the first of them.
BLOCKS = 4
# Sources that are no selector.
OWN_SOURCES = {"block", "swap"}


@dataclass(frozen=True)
class Candidate:
    """Layers that may be removed, and who proposes them.

    Attributes:
        removed: The layers, ascending.
        source: Such as ``lorp K=3``, ``streamline, block`` or ``swap``.
    """

    removed: tuple[int, ...]
    source: str

    @property
    def is_selected(self) -> bool:
        """Whether a selector proposes it: not only a block or a swap of ours."""
        return not set(self.source.split(", ")) <= OWN_SOURCES


def eigengap_clusters(similarity: np.ndarray) -> int:
    """Choose a number of clusters by the largest eigengap (von Luxburg, arXiv 0711.0189, § 8.3).

    The eigenvalues λ_1 ≤ λ_2 ≤ … are those of the normalised Laplacian I − D^(−1/2) A D^(−1/2) of
    A = (S + 1)/2, D its row sums. K maximises λ_(K+1) − λ_K over 2 ≤ K ≤ L/2: K = 1 would be no
    clustering, and layers that stand alone leave nothing to choose.

    Args:
        similarity: (L, L) float64, mean cosine of the inputs of layers 0..L-1.

    Returns:
        K; 2 for fewer than four layers. Ties go to the smaller one.
    """
    affinity = (similarity + 1.0) / 2.0
    scale = 1.0 / np.sqrt(np.maximum(affinity.sum(axis=1), 1e-300))
    values = np.linalg.eigvalsh(np.eye(len(affinity)) - scale[:, None] * affinity * scale)
    gaps = np.diff(values)[1 : max(len(affinity) // 2, 2)]  # gaps[0] is λ_3 − λ_2: K = 2
    return 2 + int(gaps.argmax()) if len(gaps) else 2


def starting_candidates(context: SelectionContext) -> list[Candidate]:
    """List what every selector removes, and the best contiguous blocks.

    Args:
        context: What a selector may look at; `num_clusters` leaves only that K of `lorp`.

    Returns:
        Different cuts, in a fixed order; a selector without an answer for this budget is left out.
    """
    gap = eigengap_clusters(context.similarity.inputs)
    found: dict[tuple[int, ...], list[str]] = {}

    def add(source: str, removed: Sequence[int]) -> None:
        sources = found.setdefault(tuple(removed), [])
        if source not in sources:
            sources.append(source)

    for name in ("streamline", "shortgpt"):
        for removed in _answer(name, context):
            add(name, removed)
    for clusters in (context.num_clusters,) if context.num_clusters else (*LORP_CLUSTERS, gap):
        for removed in _answer("lorp", replace(context, num_clusters=clusters)):
            add(f"lorp K={clusters}", removed)
    for block in best_blocks(context)[:BLOCKS]:
        add("block", block)
    return [Candidate(removed, ", ".join(sources)) for removed, sources in found.items()]


def _answer(name: str, context: SelectionContext) -> Iterator[Sequence[int]]:
    try:
        yield get_selector(name)(context)
    except PlanError:
        return  # documented: this selector has no answer for this budget


def best_blocks(context: SelectionContext) -> list[tuple[int, ...]]:
    """List the contiguous blocks of the budget's size, the largest S[s, s+k] first."""
    size, allowed = context.num_remove, set(context.allowed)
    blocks = [tuple(range(start, start + size)) for start in context.allowed]
    blocks = [block for block in blocks if allowed.issuperset(block)]
    return sorted(blocks, key=lambda block: (distance(context.similarity, block), block))


def distance(similarity: Similarity, removed: Sequence[int]) -> float:
    """Return Σ 1 − S[start, stop] over the boundaries of a cut: a proxy of its damage."""
    plan = PruningPlan(similarity.num_layers, tuple(removed))
    return sum(1.0 - float(similarity.matrix[b.start, b.stop]) for b in plan.boundaries)


def swaps(context: SelectionContext, removed: Sequence[int]) -> list[Candidate]:
    """List the cuts that keep one removed layer and remove a kept one, the least distance first.

    Args:
        context: What a selector may look at.
        removed: The present cut.

    Returns:
        k · (allowed − k) neighbours; ties go to the shallower layers.
    """
    gone = set(removed)
    neighbours = [
        tuple(sorted(gone - {back} | {layer}))
        for back in sorted(gone)
        for layer in context.allowed
        if layer not in gone
    ]
    ranked = sorted(neighbours, key=lambda cut: (distance(context.similarity, cut), cut))
    return [Candidate(cut, "swap") for cut in ranked]
