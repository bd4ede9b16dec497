"""Selectors that run the model itself: what they need, what they get, what comes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .changed_weights import change_weights_, layers_prefix
from .decoder import decoder_layers
from .errors import PlanError, UnsupportedModelError
from .operators import NO_OPERATOR
from .plan import PruningPlan, parse_layers
from .selectors import (
    MERGING,
    PLUS,
    READ_WEIGHTS,
    WITHOUT_WINDOWS,
    Choice,
    ModelContext,
    get_model_selector,
)
from .selectors.own import import_own, is_own
from .steps import measure_similarity
from .sweep import batches_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .config import PruneConfig
    from .similarity import Similarity

PLUS_FIRST = 4
PLUS_LAST = 2


def needs_windows(config: PruneConfig) -> bool:
    """Whether a run reads calibration windows at all."""
    if config.recover != NO_OPERATOR or config.max_ppl_ratio is not None:
        return True
    return config.layers is None and config.select not in WITHOUT_WINDOWS


def plus_layers(config: PruneConfig, depth: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """List the layers that a selector may remove after its "+" protection, if it has one."""
    if config.select not in PLUS or not config.plus:
        return tuple(allowed)
    return tuple(layer for layer in allowed if PLUS_FIRST <= layer < depth - PLUS_LAST)


def check_model_selector(
    config: PruneConfig, depth: int, allowed: Sequence[int], *, quantized: bool
) -> None:
    """Check a selector that runs the model against the other settings; nothing is loaded.

    Args:
        config: Settings.
        depth: Number of decoder layers L.
        allowed: Layers that may go.
        quantized: Whether the model has low-bit weights.

    Raises:
        PlanError: If its own protection leaves too few layers.
        UnsupportedModelError: If it needs what the other settings or the model exclude.
        GhostlayersError: If it is a user's own and cannot be imported.
    """
    if is_own(config.select):
        import_own(config.select)
        return
    budget, left = int(config.num_remove or 0), plus_layers(config, depth, allowed)
    if budget > len(left):
        raise PlanError(
            f"`num_remove` is {budget} and `select` {config.select} keeps the first {PLUS_FIRST} "
            f"and the last {PLUS_LAST} of the {depth} layers: {len(left)} may be removed. Lower "
            "`num_remove`, or turn that protection off with `plus` (--no-plus)."
        )
    if quantized and config.select in READ_WEIGHTS:
        raise UnsupportedModelError(
            f"the model is quantized and `select` is {config.select!r}, which reads the weights. "
            "Use another selector, or prune the unquantized model."
        )
    if config.select in MERGING:
        if config.recover != NO_OPERATOR:
            raise UnsupportedModelError(
                f"`select` {config.select} changes the weights of kept layers and `recover` is "
                f"{config.recover!r}, which is fitted to the dense model's. Use `recover` none."
            )
        if config.max_ppl_ratio is not None:
            raise UnsupportedModelError(
                f"`select` {config.select} merges layers, which `max_ppl_ratio` does not measure. "
                "Use `num_remove`."
            )
        if config.laco_range is not None:
            parse_layers(config.laco_range, depth)


def choose_by_model(
    model: PreTrainedModel,
    ids: torch.Tensor,
    config: PruneConfig,
    *,
    allowed: Sequence[int],
    similarity: Similarity | None = None,
    progress: bool = True,
) -> tuple[Choice, Similarity | None]:
    """Let a selector that runs the model choose.

    Args:
        model: The dense model.
        ids: (n, T) int64 calibration windows.
        config: Settings.
        allowed: Layers that may go.
        similarity: Of the dense model, if it was measured already.
        progress: Show progress bars when standard error is a terminal.

    Returns:
        Its choice, and the similarities if it read them.

    Raises:
        PlanError: If it has no answer for this budget.
    """
    measured = [] if similarity is None else [similarity]

    def measure() -> Similarity:
        if not measured:
            batches = batches_of(ids, config.batch_size)
            found = measure_similarity(model, batches, over=config.cosine_over, progress=progress)
            measured.append(found)
        return measured[0]

    left = plus_layers(config, len(decoder_layers(model)), allowed)
    context = ModelContext(model, ids, config, left, measure, progress)
    choice = get_model_selector(config.select)(context)
    return choice, measured[0] if measured else None


def change_layers_(
    pruned: PreTrainedModel, plan: PruningPlan, weights: Mapping[tuple[int, str], torch.Tensor]
) -> frozenset[str]:
    """Give kept layers of a pruned model new weights; see `change_weights_`.

    Args:
        pruned: The pruned model, made by `share_tensors`.
        plan: The plan by which it was pruned.
        weights: By dense layer and path inside it.

    Returns:
        Names of the changed parameters.
    """
    if not weights:
        return frozenset()
    prefix = layers_prefix(pruned)
    values = {f"{prefix}{plan.kept.index(k)}.{path}": w for (k, path), w in weights.items()}
    return change_weights_(pruned, values)
