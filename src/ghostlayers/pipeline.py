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

from .boundary_record import boundary_entries
from .calibration import Windows, resolve_window, sampled_windows, text_windows
from .config import PruneConfig
from .decoder import num_decoder_layers, remove_layers_, text_config
from .errors import CalibrationError, UnsupportedModelError
from .layer_fields import protected_layers
from .model_checks import check_attachable, check_cache, check_causal, check_reloadable
from .operators import ATTACHING, NO_OPERATOR, OperatorFit, check_size
from .plan import Boundary, PruningPlan, check_num_remove, parse_layers, removable_layers
from .records import FORMAT_VERSION, versions
from .recovery import Recovery, prepare_recovery, recover_
from .selection import Selection, choose_layers
from .steps import cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        GhostlayersError: If the operator asked for does not exist for the hidden size.
    """
    depth = num_decoder_layers(model_config)
    if config.recover != NO_OPERATOR:
        check_size(config.recover, config.rank, text_config(model_config).hidden_size)
    if config.layers is not None:
        return PruningPlan(depth, parse_layers(config.layers, depth))
    check_num_remove(int(config.num_remove or 0), depth, allowed_layers(config, model_config))
    return None


def is_quantized(config: Any) -> bool:
    """Say whether a config describes low-bit weights."""
    return getattr(config, "quantization_config", None) is not None


def check_quantized(config: PruneConfig, model_config: Any) -> None:
    """Refuse what would need a low-bit weight to be written, or a map beside one.

    Raises:
        UnsupportedModelError: If operators are asked for on a quantized model.
    """
    if not is_quantized(model_config):
        return
    settings = model_config.quantization_config
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    if config.dtype != "auto":
        raise UnsupportedModelError(
            f"the model is quantized ({method}) and `dtype` is {config.dtype!r}: its tensors are "
            "only copied as they are. Use `dtype` auto."
        )
    if config.recover != NO_OPERATOR:
        raise UnsupportedModelError(
            f"the model is quantized ({method}) and `recover` is {config.recover!r}: a reload "
            "would quantize the operators as well. Prune the unquantized model, or use `recover` "
            "none."
        )


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
    return PruneResult(model, plan, {}, _record(config, Selection(plan), Recovery(), None))


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
    plan = resolve_plan(config, model.config)
    check_quantized(config, model.config)
    check_reloadable(model)
    if config.recover in ATTACHING:
        check_attachable(model)
    check_causal(model)
    check_cache(model, what="the dense model")
    chosen, pruned, folds = None, None, None
    if plan is not None:
        chosen, pruned = Selection(plan), cut(model, plan)
        folds = prepare_recovery(model, plan, config)
    if isinstance(windows, torch.Tensor):
        windows = Windows(windows, "windows given in", bos_per_window=False)
    if windows is None and (plan is None or config.recover != NO_OPERATOR):
        if tokenizer is None:
            raise CalibrationError("`tokenizer` is None. Give the model's tokenizer or `windows`.")
        windows = calibration_windows(model, tokenizer, config, progress=progress)
    ids = torch.empty(0, 0, dtype=torch.long) if windows is None else windows.ids
    if chosen is None or pruned is None:
        allowed = allowed_layers(config, model.config)
        chosen = choose_layers(model, ids, config, allowed=allowed, progress=progress)
        pruned = cut(model, chosen.plan)
    plan, recovery = chosen.plan, Recovery()
    if windows is not None:
        recovery = recover_(
            pruned, model, plan, config, ids, chosen.massive, folds=folds, progress=progress
        )
    return PruneResult(
        model=pruned,
        plan=plan,
        fits=recovery.used,
        record=_record(config, chosen, recovery, windows),
        tokenizer=tokenizer,
        warnings=recovery.warnings,
        changed=recovery.changed,
    )


def _record(
    config: PruneConfig,
    chosen: Selection,
    recovery: Recovery,
    windows: Windows | None,
) -> dict[str, Any]:
    plan, verdict = chosen.plan, recovery.verdict
    return {
        "format_version": FORMAT_VERSION,
        "num_layers": plan.num_layers,
        "removed": list(plan.removed),
        "kept": list(plan.kept),
        "boundaries": boundary_entries(plan, recovery),
        "selector": "layers" if config.layers is not None else config.select,
        "recover": config.recover,
        "guard": None if verdict is None else verdict.record,
        "rls": None if chosen.similarity is None else chosen.similarity.rls,
        "search": chosen.search,
        "calibration": None if windows is None else windows.record(),
        "seed": config.seed,
        "config": config.to_dict(),
        "versions": versions(),
    }
