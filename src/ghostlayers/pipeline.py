"""Measure, select, recover: the whole job on a model in memory. Read this page first.

windows -> sweep 1 -> Similarity -> selector (or search) -> PruningPlan
windows -> sweep 2 (only up to the last boundary) -> moments -> repairs -> guard
plan + repairs -> a pruned model that shares the dense model's tensors, but for changed weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .budgets import budget_record, size_budget
from .calibration import (
    Windows,
    resolve_window,
    sampled_windows,
    shared_windows,
    text_windows,
)
from .config import PruneConfig
from .decoder import num_decoder_layers, remove_layers_, text_config
from .errors import CalibrationError, PlanError, configured
from .fingerprint import config_sha256, shared_fingerprint
from .layer_fields import protected_layers
from .layerwise import runs_layerwise
from .model_checks import check_attachable, check_cache, check_causal, check_reloadable
from .model_selection import change_layers_, check_model_selector, needs_windows
from .model_sizes import structure
from .operators import ATTACHING, NO_OPERATOR, OperatorFit, check_size
from .plan import (
    Boundary,
    PruningPlan,
    check_num_remove,
    format_layers,
    parse_layers,
    removable_layers,
)
from .pruning_run import PruningRun
from .quantized import check_quantized, is_quantized
from .recovered import Recovery
from .run_record import result_record
from .scores import CALIBRATION_SETTINGS, Scores, windows_of_run
from .selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .loading import ModelSource


@dataclass(frozen=True)
class PruneResult:
    """A pruned model and everything known about how it was made.

    Attributes:
        model: The pruned (and recovered) model. It shares the dense model's tensors, but for those
            that `changed` names.
        plan: What was removed.
        fits: Repair of each boundary that has one; empty without recovery.
        record: JSON values: the content of `ghostlayers.json`.
        tokenizer: The dense model's tokenizer, if one was given.
        warnings: What the user should know, one line each.
        changed: Parameters of `model` that hold new values; the writer takes them from the model,
            not from the source's files.
    """

    model: PreTrainedModel
    plan: PruningPlan
    fits: Mapping[Boundary, OperatorFit]
    record: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None
    warnings: tuple[str, ...] = field(default=())
    changed: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        repairs = [
            f"{fit.name} in place of {format_layers(range(boundary.start, boundary.stop))}"
            for boundary, fit in self.fits.items()
        ]
        return (
            f"PruneResult({type(self.model).__name__} without layers "
            f"{format_layers(self.plan.removed)} of {self.plan.num_layers}: "
            f"{', '.join(repairs) or 'no repair'})"
        )


def calibration_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: PruneConfig,
    *,
    progress: bool = True,
) -> Windows:
    """Make the calibration windows that a configuration asks for.

    Raises:
        CalibrationError: If there is no tokenizer or no text.
    """
    if tokenizer is None:
        raise CalibrationError("`tokenizer` is None. Give the model's tokenizer or `windows`.")
    window = resolve_window(config.window, model.config)
    if config.calibration == "self":
        windows = sampled_windows(
            model,
            tokenizer,
            num_windows=config.num_windows,
            window=window,
            seed=config.seed,
            progress=progress,
        )
    else:
        windows = text_windows(
            tokenizer, config.calibration, num_windows=config.num_windows, window=window
        )
    return shared_windows(windows)


def allowed_layers(config: PruneConfig, model_config: Any) -> tuple[int, ...]:
    """List the layers that a selector may remove from a model."""
    depth = num_decoder_layers(model_config)
    return removable_layers(
        depth,
        protect_first=config.protect_first,
        protect_last=config.protect_last,
        protected=protected_layers(text_config(model_config), depth),
    )


def resolve_plan(config: PruneConfig, model_config: Any) -> PruningPlan | None:
    """Check a configuration against a model's config, before any weight is loaded.

    Returns:
        The plan if `layers` names it, or None if a selector has to choose.

    Raises:
        PlanError: If the layers or the budget do not fit the depth.
        UnsupportedModelError: If the config has no depth.
        GhostlayersError: If the selector does not go with the other settings, or is a user's own
            and cannot be imported; if the rank exceeds the hidden size.
    """
    depth = num_decoder_layers(model_config)
    if config.recover != NO_OPERATOR:
        check_size(config.rank, text_config(model_config).hidden_size)
    if config.layers is not None:
        return PruningPlan(depth, parse_layers(config.layers, depth))
    allowed = allowed_layers(config, model_config)
    if config.num_remove is not None:
        check_num_remove(config.num_remove, depth, allowed)
    elif not allowed or depth < 2:
        raise PlanError(
            f"none of the {depth} layers may be removed. Protect fewer layers, or name the layers "
            "with `layers`."
        )
    check_model_selector(config, depth, allowed, quantized=is_quantized(model_config))
    return None


def prune_without_weights(model_config: Any, plan: PruningPlan, config: PruneConfig) -> PruneResult:
    """Cut a model of which only the config is read: for quantized checkpoints.

    The result's parameters hold no memory; `save_pruned` copies the tensors that stay, bit for
    bit, from the source's files.

    Raises:
        UnsupportedModelError: If the config cannot describe the shorter model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config)
    remove_layers_(model, plan.removed)
    spent = budget_record(config, plan, structure(model_config), model)
    dense = {"config_sha256": config_sha256(model_config), "weights_sha256": None}
    record = result_record(config, Selection(plan), Recovery(), None, spent, dense=dense)
    return PruneResult(model, plan, {}, record)


def prune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PruneConfig | None = None,
    *,
    windows: Windows | torch.Tensor | None = None,
    scores: Scores | None = None,
    source: ModelSource | None = None,
    progress: bool = True,
    **settings: Any,
) -> PruneResult:
    """Remove layers from a causal LM and repair it. The model given in is left untouched.

    Args:
        model: The dense model; its modules and config are copied, its tensors shared.
        tokenizer: Its tokenizer; needed unless `windows` are given.
        config: Settings; or give them as keyword arguments of `PruneConfig`.
        windows: Calibration windows, (n, T) int64 ids; None makes those the settings ask for.
        scores: From `load_scores` or `Analysis.scores`: no first sweep is run. Keyword settings
            that are not given are those of the scores, the windows too; a `config` gives all of
            them.
        source: Where the weights lie that will be copied: `target_bytes` counts them as stored.
            None counts the bytes in memory.
        progress: Show progress bars when standard error is a terminal.
        **settings: Fields of `PruneConfig`, such as ``num_remove=7, select="streamline"``.

    Returns:
        The pruned model with its plan, fits and record.

    Raises:
        PlanError: If the layers cannot be removed.
        UnsupportedModelError: If the model is no decoder-only LM with one list of layers.
        CalibrationError: If there is no text, a hidden state is not finite, or the scores are of
            other windows.
        CheckpointError: If the scores are of another model.

    Example:
        >>> import ghostlayers as gl                                             # doctest: +SKIP
        >>> result = gl.prune(model, tokenizer, num_remove=7, calibration="c4")  # doctest: +SKIP
        >>> gl.save_pruned(result, "out")                                        # doctest: +SKIP
    """
    stored = config is None and not any(name in settings for name in CALIBRATION_SETTINGS)
    if config is None:
        given = settings if scores is None else scores.settings_with(settings)
        config = configured(PruneConfig, given)
    plan = resolve_plan(config, model.config)
    dense = _check_model(model, config, scores)
    budget = size_budget(config, model, text_config(model.config).hidden_size, source=source)
    if budget is not None:
        budget.fewest(allowed_layers(config, model.config))
    run = PruningRun(
        model,
        config,
        allowed_layers(config, model.config),
        None if scores is None else scores.measured,
        progress,
    )
    if plan is not None:
        run.cut_(plan)
    if isinstance(windows, torch.Tensor):
        windows = Windows(windows, "windows given in", bos_per_window=False)
    if windows is not None or needs_windows(config):

        def made() -> Windows:
            return calibration_windows(model, tokenizer, config, progress=progress)

        windows = windows_of_run(config, model.config, windows, scores, stored=stored, made=made)
    ids = torch.empty(0, 0, dtype=torch.long) if windows is None else windows.ids
    chosen, pruned, recovery, probes = run.repaired(ids, budget)
    changed = change_layers_(pruned, chosen.plan, chosen.weights)
    spent = budget_record(config, chosen.plan, model, pruned, budget=budget, probes=probes)
    return PruneResult(
        model=pruned,
        plan=chosen.plan,
        fits=recovery.used,
        record=result_record(config, chosen, recovery, windows, spent, scores, dense=dense),
        tokenizer=tokenizer,
        warnings=(*run.warnings, *chosen.warnings, *recovery.warnings),
        changed=recovery.changed | changed,
    )


def _check_model(
    model: PreTrainedModel, config: PruneConfig, scores: Scores | None
) -> dict[str, str]:
    """Check the dense model, and that the scores are of it; return its fingerprint."""
    check_quantized(config, model.config)
    check_reloadable(model)
    if config.recover in ATTACHING:
        check_attachable(model)
    check_causal(model)
    runs_layerwise(model)  # found once here; the copies that are made of the model know it
    check_cache(model, what="the dense model")
    found = shared_fingerprint(model)
    if scores is not None:
        scores.check_settings(config)
        scores.check_model(model, found)
    return found
