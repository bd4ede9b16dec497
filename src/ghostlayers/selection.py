"""The first sweep, and the layers that go: by a selector, or by a search over repaired models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import distributed
from .decoder import decoder_layers
from .model_selection import choose_by_model
from .operators import ROBUST
from .plan import PruningPlan
from .search import needs_massive, search_layers
from .selectors import AUTO, SELECTORS, SelectionContext
from .similarity import Similarity
from .steps import measure_similarity, select_layers
from .sweep import batches_of
from .token_classes import NormAccumulator

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .config import PruneConfig


@dataclass(frozen=True)
class Selection:
    """The layers that go, and what was measured on the way.

    Attributes:
        plan: The layers.
        similarity: Of the dense model; None if nothing read it.
        massive: (N,) bool, the massive tokens in the order of the sweep, if an operator asks.
        search: JSON values of the search; None with another selector.
        selection: JSON values of a selector that runs the model; None with another one.
        weights: New weights of kept layers, by dense layer and path inside it.
        warnings: What the user should know, one line each.
    """

    plan: PruningPlan
    similarity: Similarity | None = None
    massive: torch.Tensor | None = None
    search: dict[str, Any] | None = None
    selection: dict[str, Any] | None = None
    weights: Mapping[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What the first sweep gives.

    Attributes:
        similarity: Of the dense model.
        massive: (N,) bool, the massive tokens in the order of the sweep, if they were looked for.
    """

    similarity: Similarity
    massive: torch.Tensor | None = None


def reads_similarity(config: PruneConfig) -> bool:
    """Say whether the selector reads the first sweep."""
    return config.select in (*SELECTORS, AUTO)


def wants_massive(config: PruneConfig) -> bool:
    """Say whether a run asks for the massive tokens."""
    return config.recover in ROBUST or (config.select == AUTO and needs_massive(config))


def measure(
    model: PreTrainedModel, ids: torch.Tensor, config: PruneConfig, *, progress: bool = True
) -> Measured:
    """Run the first sweep.

    Raises:
        CalibrationError: If a state is not finite.
    """
    norms = [NormAccumulator(len(decoder_layers(model)))] if wants_massive(config) else []
    batches = batches_of(ids, config.batch_size)
    similarity = measure_similarity(
        model, batches, also=norms, over=config.cosine_over, progress=progress
    )
    return Measured(similarity, norms[0].massive() if norms else None)


def choose_layers(
    model: PreTrainedModel,
    ids: torch.Tensor,
    config: PruneConfig,
    *,
    allowed: Sequence[int],
    measured: Measured | None = None,
    progress: bool = True,
) -> Selection:
    """Choose the layers to remove; run the first sweep if the selector reads it.

    Args:
        model: The dense model.
        ids: (n, T) int64 calibration windows.
        config: Settings; `num_remove` says how many go.
        allowed: Layers that may go.
        measured: From `measure`, or from a file; None runs the first sweep.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        The selection.

    Raises:
        PlanError: If the selector has no answer for this budget.
        CalibrationError: If there are too few windows for a search, or a state is not finite.
    """
    if not reads_similarity(config):
        similarity = None if measured is None else measured.similarity
        choice, similarity = choose_by_model(
            model, ids, config, allowed=allowed, similarity=similarity, progress=progress
        )
        return Selection(
            PruningPlan(len(decoder_layers(model)), distributed.same(choice.removed)),
            similarity,
            None if measured is None else measured.massive,
            selection=choice.record,
            weights=choice.weights,
            warnings=choice.warnings,
        )
    if measured is None:
        measured = measure(model, ids, config, progress=progress)
    similarity, budget = measured.similarity, int(config.num_remove or 0)
    massive = measured.massive if wants_massive(config) else None
    if config.select != AUTO:
        plan = select_layers(
            similarity,
            selector=config.select,
            num_remove=budget,
            num_clusters=config.num_clusters,
            allowed=allowed,
            seed=config.seed,
        )
        plan = PruningPlan(plan.num_layers, distributed.same(plan.removed))
        return Selection(plan, similarity, massive)
    context = SelectionContext(similarity, budget, tuple(allowed), config.num_clusters, config.seed)
    found = search_layers(model, ids, context, config, massive=massive, progress=progress)
    return Selection(found.plan, similarity, massive, found.record)
