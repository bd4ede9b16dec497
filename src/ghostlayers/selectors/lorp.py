"""LoRP (arXiv 2605.27786): spectral clustering of layers, guided by representation locality."""

from __future__ import annotations

import numpy as np

from . import SelectionContext


def num_clusters_for(rls: float) -> int:
    """Apply the paper's policy: 2 clusters if RLS ≥ 1.0, 3 if 0.7 ≤ RLS < 1.0, else 4."""
    if rls >= 1.0:
        return 2
    return 3 if rls >= 0.7 else 4


def cluster_layers(similarity: np.ndarray, num_clusters: int, seed: int = 0) -> list[list[int]]:
    """Cluster layers by the similarity of their input states.

    Spectral clustering (scikit-learn, k-means labels) of the affinity A = (S + 1) / 2.

    Args:
        similarity: (L, L) float64, mean cosine of the inputs of layers 0..L-1.
        num_clusters: Number of clusters K, at most L.
        seed: Seed of the eigensolver's start and of k-means.

    Returns:
        Clusters as ascending lists of layers, ordered by first layer.
    """
    if num_clusters == 1:
        return [list(range(len(similarity)))]
    from sklearn.cluster import SpectralClustering

    labels = SpectralClustering(
        n_clusters=min(num_clusters, len(similarity)),
        affinity="precomputed",
        assign_labels="kmeans",
        random_state=seed,
    ).fit_predict((similarity + 1.0) / 2.0)
    clusters = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    return sorted(clusters)


def _mean_pairwise(similarity: np.ndarray, members: list[int]) -> float:
    """Return the mean S over pairs of members; −∞ for fewer than two members."""
    if len(members) < 2:
        return -np.inf
    block = similarity[np.ix_(members, members)]
    rows, columns = np.triu_indices(len(members), k=1)
    return float(block[rows, columns].mean())


def select_lorp(context: SelectionContext) -> list[int]:
    """Remove layers cluster by cluster (LoRP's two-stage allocation).

    A layer's redundancy is its mean S to the other members of its whole cluster; protected layers
    count as members. Stage 1 takes the most redundant candidate of each cluster, in order of first
    layer. Stage 2 repeats, until k layers are chosen: the cluster whose still unpruned members have
    the highest mean pairwise S gives its next candidate; if no cluster has two unpruned members,
    the first by depth that still has a candidate gives it. Ties go to the shallower side.

    Returns:
        Removed layers, ascending.
    """
    similarity = context.similarity.inputs
    count = context.num_clusters or num_clusters_for(context.similarity.rls)
    clusters = cluster_layers(similarity, count, context.seed)
    allowed = set(context.allowed)

    def redundancy(layer: int, members: list[int]) -> float:
        others = [other for other in members if other != layer]
        return float(similarity[layer, others].mean()) if others else -np.inf

    queues = [
        sorted(
            (layer for layer in members if layer in allowed),
            key=lambda layer: (-redundancy(layer, members), layer),
        )
        for members in clusters
    ]
    removed: list[int] = []
    for queue in queues:
        if queue and len(removed) < context.num_remove:
            removed.append(queue.pop(0))
    while len(removed) < context.num_remove:
        open_clusters = [index for index, queue in enumerate(queues) if queue]
        scores = {
            index: _mean_pairwise(
                similarity, [layer for layer in clusters[index] if layer not in removed]
            )
            for index in open_clusters
        }
        best = max(open_clusters, key=lambda index: (scores[index], -index))
        removed.append(queues[best].pop(0))
    return sorted(removed)
