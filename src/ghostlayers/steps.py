"""The steps of a run, one function each; `pipeline.prune` puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .decoder import decoder_layers, decoder_path, remove_layers_, share_tensors
from .errors import CalibrationError, UnsupportedModelError
from .modeling_ghostlayers import attach_operators_ as attach_zero_operators_
from .moments import MomentAccumulator, SplitMoments
from .operators import OperatorFit, get_operator
from .plan import Boundary, PruningPlan, check_num_remove, removable_layers
from .selectors import SelectionContext, get_selector
from .similarity import Similarity, SimilarityAccumulator
from .sweep import Batch, split_batch, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure_similarity(
    model: PreTrainedModel, batches: Iterable[Batch], *, progress: bool = True
) -> Similarity:
    """Run the first sweep: mean cosine similarity between all hidden states.

    Args:
        model: The dense model.
        batches: (B, T) int64 ids, or mappings with `input_ids` and `attention_mask`.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        S over states 0..L, (L+1, L+1) float64.

    Raises:
        CalibrationError: If no token is counted or a state is not finite.
    """
    accumulator = SimilarityAccumulator(len(decoder_layers(model)))
    sweep(model, batches, [accumulator], description="similarity", progress=progress)
    return accumulator.result()


def select_layers(
    similarity: Similarity,
    *,
    selector: str = "lorp",
    num_remove: int,
    num_clusters: int | None = None,
    allowed: Sequence[int] | None = None,
    seed: int = 0,
) -> PruningPlan:
    """Choose the layers to remove.

    Args:
        similarity: From `measure_similarity`.
        selector: Name of the method.
        num_remove: Budget k.
        num_clusters: Clusters of `lorp`; None applies its policy.
        allowed: Layers that may go; None protects the first and the last layer.
        seed: Seed of the clustering.

    Returns:
        The plan.

    Raises:
        PlanError: If the budget is below 1 or above the number of allowed layers.
    """
    depth = similarity.num_layers
    allowed = removable_layers(depth) if allowed is None else tuple(allowed)
    check_num_remove(num_remove, depth, allowed)
    context = SelectionContext(similarity, num_remove, tuple(allowed), num_clusters, seed)
    return PruningPlan(depth, tuple(get_selector(selector)(context)))


def collect_moments(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    boundaries: Sequence[Boundary],
    *,
    progress: bool = True,
) -> dict[Boundary, SplitMoments]:
    """Run the second sweep: float64 second moments at the boundaries of one or more plans.

    Layers behind the last boundary are not run where the architecture allows to leave them out.

    Args:
        model: The dense model.
        batches: As for `measure_similarity`; a sequence, since its length decides the split.
        boundaries: Boundaries to measure.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Moments by boundary: XᵀX and XᵀΔ are (C, C) float64.

    Raises:
        CalibrationError: If no token is counted or a state is not finite.
    """
    ids = [split_batch(batch)[0] for batch in batches]
    if not ids:
        raise CalibrationError("no calibration tokens: no batch was given.")
    accumulator = MomentAccumulator(
        boundaries,
        num_windows=sum(part.shape[0] for part in ids),
        window=max(part.shape[1] for part in ids),
    )
    depth, last = len(decoder_layers(model)), max(boundary.stop for boundary in boundaries)
    prefix = model
    if last < depth:
        try:
            prefix = remove_layers_(share_tensors(model), range(last, depth))
        except UnsupportedModelError:
            prefix = model  # its config cannot say so: run the layers behind the cut as well
    sweep(prefix, batches, [accumulator], description="moments", progress=progress)
    return accumulator.result()


def fit_operator(
    moments: SplitMoments,
    *,
    operator: str = "ghost",
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> OperatorFit:
    """Fit one operator from a boundary's moments.

    Args:
        moments: From `collect_moments`.
        operator: Name of the method.
        ridge: Relative ridge.
        dtype: Dtype in which the operator will be stored; the errors are those after rounding.

    Returns:
        The fit.
    """
    return get_operator(operator)(moments, ridge=ridge, dtype=dtype)


def attach_operators_(
    model: PreTrainedModel, plan: PruningPlan, fits: Mapping[Boundary, OperatorFit]
) -> PreTrainedModel:
    """Put fitted operators into a pruned model, in place; its class becomes a Ghost class.

    Args:
        model: The pruned model.
        plan: The plan by which it was pruned.
        fits: One fit per boundary.

    Returns:
        The same model.
    """
    specs = []
    for boundary in fits:
        layer, side = plan.operator_site(boundary)
        specs.append({"layer": layer, "side": side})
    modules = attach_zero_operators_(model, specs, decoder_path=decoder_path(model))
    with torch.no_grad():
        for module, fit in zip(modules, fits.values(), strict=True):
            module.map.weight.copy_(fit.tensors["m"].T)  # nn.Linear stores the transpose
    return model
