"""Measure, select, recover: the whole job on a model in memory. Read this page first.

windows -> sweep 1 -> Similarity -> selector -> PruningPlan
windows -> sweep 2 (only up to the last boundary) -> moments -> operator
plan + operators -> a pruned model that shares the dense model's tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .calibration import Windows, resolve_window, sampled_windows, text_windows
from .config import PruneConfig
from .decoder import check_causal, decoder_layers, decoder_path, remove_layers_, share_tensors
from .errors import CalibrationError, UnsupportedModelError
from .modeling_ghostlayers import attach_operators_ as attach_zero_operators_
from .moments import MomentAccumulator, SplitMoments
from .operators import NO_OPERATOR, OperatorFit, get_operator
from .plan import Boundary, PruningPlan, check_num_remove, parse_layers, removable_layers
from .records import FORMAT_VERSION, versions
from .selectors import SelectionContext, get_selector
from .similarity import Similarity, SimilarityAccumulator
from .sweep import Batch, batches_of, split_batch, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PruneResult:
    """A pruned model and everything known about how it was made.

    Attributes:
        model: The pruned (and recovered) model. It shares the dense model's tensors.
        plan: What was removed.
        fits: Fitted operator of each boundary; empty without recovery.
        record: JSON values: the content of `ghostlayers.json`.
        tokenizer: The dense model's tokenizer, if one was given.
        warnings: What the user should know, one line each.
    """

    model: PreTrainedModel
    plan: PruningPlan
    fits: Mapping[Boundary, OperatorFit]
    record: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None
    warnings: tuple[str, ...] = field(default=())


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


def calibration_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: PruneConfig,
    *,
    progress: bool = True,
) -> Windows:
    """Make the calibration windows that a configuration asks for."""
    window = resolve_window(config.window, model.config)
    if config.calibration == "self":
        return sampled_windows(
            model,
            tokenizer,
            num_windows=config.num_windows,
            window=window,
            seed=config.seed,
            progress=progress,
        )
    return text_windows(
        tokenizer, config.calibration, num_windows=config.num_windows, window=window
    )


def resolve_plan(config: PruneConfig, num_layers: int) -> PruningPlan | None:
    """Check a configuration against a depth, before any weight is loaded.

    Returns:
        The plan if `layers` names it, or None if a selector has to choose.

    Raises:
        PlanError: If the layers or the budget do not fit the depth.
    """
    if config.layers is not None:
        return PruningPlan(num_layers, parse_layers(config.layers, num_layers))
    allowed = removable_layers(
        num_layers, protect_first=config.protect_first, protect_last=config.protect_last
    )
    check_num_remove(int(config.num_remove or 0), num_layers, allowed)
    return None


def prune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PruneConfig | None = None,
    *,
    windows: Windows | torch.Tensor | None = None,
    progress: bool = True,
    **settings: Any,
) -> PruneResult:
    """Remove layers from a causal LM and repair it. The model given in is left untouched.

    Args:
        model: The dense model; its modules and config are copied, its tensors shared.
        tokenizer: Its tokenizer; needed unless `windows` are given.
        config: Settings; or give them as keyword arguments of `PruneConfig`.
        windows: Calibration windows, (n, T) int64 ids; None makes those the settings ask for.
        progress: Show progress bars when standard error is a terminal.
        **settings: Fields of `PruneConfig`, such as ``num_remove=7, select="streamline"``.

    Returns:
        The pruned model with its plan, fits and record.

    Raises:
        PlanError: If the layers cannot be removed.
        UnsupportedModelError: If the model is no decoder-only LM with one list of layers.
        CalibrationError: If there is no text, or a hidden state is not finite.

    Example:
        >>> import ghostlayers as gl                                             # doctest: +SKIP
        >>> result = gl.prune(model, tokenizer, num_remove=7, calibration="c4")  # doctest: +SKIP
        >>> gl.save_pruned(result, "out")                                        # doctest: +SKIP
    """
    config = config or PruneConfig(**settings)
    depth = len(decoder_layers(model))
    plan = resolve_plan(config, depth)
    check_causal(model)
    if isinstance(windows, torch.Tensor):
        windows = Windows(windows, "windows given in", bos_per_window=False)
    if windows is None and (plan is None or config.recover != NO_OPERATOR):
        if tokenizer is None:
            raise CalibrationError("`tokenizer` is None. Give the model's tokenizer or `windows`.")
        windows = calibration_windows(model, tokenizer, config, progress=progress)
    batches = [] if windows is None else batches_of(windows.ids, config.batch_size)

    similarity = None
    if plan is None:
        similarity = measure_similarity(model, batches, progress=progress)
        plan = select_layers(
            similarity,
            selector=config.select,
            num_remove=int(config.num_remove or 0),
            num_clusters=config.num_clusters,
            allowed=removable_layers(
                depth, protect_first=config.protect_first, protect_last=config.protect_last
            ),
            seed=config.seed,
        )
    fits: dict[Boundary, OperatorFit] = {}
    if config.recover != NO_OPERATOR:
        moments = collect_moments(model, batches, plan.boundaries, progress=progress)
        for boundary in plan.boundaries:
            fits[boundary] = fit_operator(
                moments.pop(boundary),
                operator=config.recover,
                ridge=config.ridge,
                dtype=model.dtype,
            )
    pruned = remove_layers_(share_tensors(model), plan.removed)
    if fits:
        attach_operators_(pruned, plan, fits)
    return PruneResult(
        model=pruned,
        plan=plan,
        fits=fits,
        record=_record(config, plan, fits, windows, similarity),
        tokenizer=tokenizer,
        warnings=tuple(line for fit in fits.values() for line in fit.warnings),
    )


def _record(
    config: PruneConfig,
    plan: PruningPlan,
    fits: Mapping[Boundary, OperatorFit],
    windows: Windows | None,
    similarity: Similarity | None,
) -> dict[str, Any]:
    boundaries = []
    for boundary in plan.boundaries:
        layer, side = plan.operator_site(boundary)
        entry: dict[str, Any] = {
            "start": boundary.start,
            "stop": boundary.stop,
            "operator": NO_OPERATOR,
        }
        if boundary in fits:
            fit = fits[boundary]
            entry |= {"operator": fit.name, "layer": layer, "side": side, **fit.diagnostics}
            entry["warnings"] = list(fit.warnings)
        boundaries.append(entry)
    return {
        "format_version": FORMAT_VERSION,
        "num_layers": plan.num_layers,
        "removed": list(plan.removed),
        "kept": list(plan.kept),
        "boundaries": boundaries,
        "selector": "layers" if config.layers is not None else config.select,
        "recover": config.recover,
        "rls": None if similarity is None else similarity.rls,
        "calibration": None if windows is None else windows.record(),
        "seed": config.seed,
        "config": config.to_dict(),
        "versions": versions(),
    }
