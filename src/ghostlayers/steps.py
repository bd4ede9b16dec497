"""The steps of a run, one function each; `pipeline.prune` puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .decoder import decoder_layers, decoder_path, remove_layers_, share_tensors
from .errors import CalibrationError, UnsupportedModelError
from .model_checks import check_cache
from .modeling_ghostlayers import attach_operators_ as attach_zero_operators_
from .moments import MomentAccumulator, RobustMoments, SplitMoments
from .norm_moments import moments_of_operator
from .operators import RANKED, OperatorFit, get_operator
from .plan import Boundary, PruningPlan, check_num_remove, removable_layers
from .selectors import SelectionContext, get_selector
from .similarity import Similarity, SimilarityAccumulator
from .sweep import Accumulator, Batch, split_batch, sweep
from .token_classes import (
    NormAccumulator,
    ScoreAccumulator,
    SinkRule,
    cosines,
    place_threshold,
    sink_direction,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Linear maps of a `GhostOperator` by the names of a fit's tensors.
MAPS = {"m": "map.weight", "down": "down.weight", "up": "up.weight"}


def measure_similarity(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    also: Sequence[Accumulator] = (),
    over: str = "channels",
    progress: bool = True,
) -> Similarity:
    """Run the first sweep: mean cosine similarity between all hidden states.

    Args:
        model: The dense model.
        batches: (B, T) int64 ids, or mappings with `input_ids` and `attention_mask`.
        also: Accumulators to feed in the same sweep.
        over: What a cosine is taken over; see `PruneConfig.cosine_over`.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        S over states 0..L, (L+1, L+1) float64.

    Raises:
        CalibrationError: If no token is counted or a state is not finite.
    """
    accumulator = SimilarityAccumulator(len(decoder_layers(model)), over)
    sweep(model, batches, [accumulator, *also], description="similarity", progress=progress)
    return accumulator.result()


def find_massive_tokens(
    model: PreTrainedModel, batches: Iterable[Batch], *, progress: bool = True
) -> torch.Tensor:
    """Find the tokens that are massive in any hidden state, in one sweep of their norms.

    Returns:
        (N,) bool over the counted tokens, in the order of the sweep.
    """
    accumulator = NormAccumulator(len(decoder_layers(model)))
    sweep(model, batches, [accumulator], description="token norms", progress=progress)
    return accumulator.massive()


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
    operator: str = "ghost",
    massive: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> dict[Boundary, SplitMoments[Any]]:
    """Run the second sweep: float64 second moments at the boundaries of one or more plans.

    Layers behind the last boundary are not run where the architecture allows to leave them out.

    Args:
        model: The dense model.
        batches: As for `measure_similarity`; a sequence, since its length decides the split.
        boundaries: Boundaries to measure.
        operator: Method that will be fitted from them.
        massive: From `find_massive_tokens`; the moments are then robust ones.
        device: Where to keep the moments; None keeps them where the states are.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Moments by boundary: XᵀX and XᵀΔ are (C, C) float64. With `linearpatch-*`
        sums of |XH| and |YH| as well.

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
        device=device,
        massive=massive,
        zeros=moments_of_operator(operator, model.config),
    )
    prefix = prefix_model(model, max(boundary.stop for boundary in boundaries))
    sweep(prefix, batches, [accumulator], description="moments", progress=progress)
    return accumulator.result()


def cut(model: PreTrainedModel, plan: PruningPlan) -> PreTrainedModel:
    """Return the pruned model; it shares the dense model's tensors.

    Raises:
        UnsupportedModelError: If the config cannot describe it, a reload would change it, or its
            cache does not work.
    """
    return checked_cut(model, plan)[0]


def checked_cut(model: PreTrainedModel, plan: PruningPlan) -> tuple[PreTrainedModel, bool]:
    """Return what `cut` does, and whether the logits of a few tokens are finite."""
    pruned = remove_layers_(share_tensors(model), plan.removed)
    return pruned, check_cache(pruned, what=f"the model without layers {list(plan.removed)}")


def prefix_model(model: PreTrainedModel, last: int) -> PreTrainedModel:
    """Return the model without the layers from `last` ≥ 1 on, if its config can say so."""
    depth = len(decoder_layers(model))
    if last == depth:
        return model
    try:
        return remove_layers_(share_tensors(model), range(last, depth))
    except UnsupportedModelError:
        return model  # run the layers behind the cut as well


def fit_sink_rules(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    moments: Mapping[Boundary, SplitMoments[RobustMoments]],
    massive: torch.Tensor,
    *,
    progress: bool = True,
) -> dict[Boundary, SinkRule]:
    """Find, at each boundary, the direction that tells massive tokens from ordinary ones.

    Args:
        model: The dense model.
        batches: A sample of those that the moments are from: where the thresholds are placed.
        moments: Robust moments by boundary.
        massive: (N,) bool of the tokens in `batches`.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        A rule for every boundary that has massive tokens; none where there are none.
    """
    directions, units = {}, {}
    for boundary, split in moments.items():
        total = split.total
        x, _ = total.massive_states()
        if len(x) and total.ordinary.num_tokens:
            unit = x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
            ordinary = total.ordinary
            direction = sink_direction(ordinary.gram, total.unit_sum, ordinary.num_tokens, unit)
            directions[boundary], units[boundary] = direction.to(model.dtype), unit
    if not directions:
        return {}
    accumulator = ScoreAccumulator(directions, massive)
    prefix = prefix_model(model, max(1, max(boundary.start for boundary in directions)))
    sweep(prefix, batches, [accumulator], description="sink rule", progress=progress)
    return {
        boundary: place_threshold(
            direction,
            accumulator.scores(boundary),
            cosines(units[boundary], direction).cpu(),
            moments[boundary].total.ordinary.num_tokens,
        )
        for boundary, direction in directions.items()
    }


def fit_operator(
    moments: SplitMoments[Any],
    *,
    operator: str = "ghost",
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
    sinks: SinkRule | None = None,
    rank: int | None = None,
    by_rank: bool = True,
) -> OperatorFit:
    """Fit one operator from a boundary's moments.

    Args:
        moments: From `collect_moments`.
        operator: Name of the method.
        ridge: Relative ridge.
        dtype: Dtype in which the operator will be stored; the errors are those after rounding.
        sinks: From `fit_sink_rules`; read by robust operators.
        rank: Rank of the map, for the operators in `RANKED`; None is full rank.
        by_rank: Whether these report their error at other ranks: one more eigenproblem.

    Returns:
        The fit.
    """
    given: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
    if operator in RANKED:
        given |= {"rank": rank, "by_rank": by_rank}
    return get_operator(operator)(moments, ridge=ridge, dtype=dtype, **given)


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
    for boundary, fit in fits.items():
        layer, side = plan.operator_site(boundary)
        specs.append({"layer": layer, "side": side, **fit.spec})
    modules = attach_zero_operators_(model, specs, decoder_path=decoder_path(model))
    for module, fit in zip(modules, fits.values(), strict=True):
        set_operator_(module, fit.tensors)
    return model


@torch.no_grad()
def set_operator_(operator: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a fit's tensors into a `GhostOperator`."""
    parameters = dict(operator.named_parameters())
    for name, tensor in tensors.items():
        if name in MAPS:  # nn.Linear stores the transpose
            parameters[MAPS[name]].copy_(tensor.T)
        else:
            parameters[name].copy_(tensor)
