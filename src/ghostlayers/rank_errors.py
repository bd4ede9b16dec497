"""Error against the rank of the map of `ghost`, measured before anything is pruned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .decoder import num_decoder_layers
from .errors import PlanError
from .plan import Boundary, PruningPlan, parse_layers
from .steps import collect_moments, fit_operator
from .sweep import batches_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

OPERATOR = "ghost"


def checked_cuts(given: str | Sequence[str], model_config: Any) -> list[Boundary]:
    """List the contiguous cuts that layer lists such as `12-18,21` consist of, each once.

    Args:
        given: One list or several.
        model_config: The model's config; no weight is needed.

    Raises:
        PlanError: If a list is malformed, or does not fit the depth.
    """
    depth, cuts = num_decoder_layers(model_config), list[Boundary]()
    for text in [given] if isinstance(given, str) else given:
        try:
            cuts += PruningPlan(depth, parse_layers(text, depth)).boundaries
        except PlanError as error:
            raise PlanError(f"`rank_errors` {text!r}: {error}") from error
    return list(dict.fromkeys(cuts))


def rank_errors(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cuts: Sequence[Boundary],
    *,
    batch_size: int = 1,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Fit `ghost` at every cut and measure what its map is worth at each rank.

    One sweep up to the last cut serves all of them; every cut is fitted on states of the dense
    model. Memory: 64·C² bytes per cut.

    Args:
        model: The dense model; it is left as it is.
        ids: (n, T) int64 calibration windows.
        cuts: Contiguous cuts.
        batch_size: Windows per forward pass.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        JSON values, one mapping per cut: `start`, `stop`, `operator`, the diagnostics of the fit of
        full rank (see `fit_ghost`; of float64 maps, before rounding), and in `error_by_rank` and
        `held_out_error_by_rank` the relative error at ranks 1, 2, 4, ..., C.
    """
    if not cuts:
        return []
    batches = batches_of(ids, batch_size)
    moments = collect_moments(model, batches, cuts, operator=OPERATOR, progress=progress)
    return [
        {
            "start": cut.start,
            "stop": cut.stop,
            "operator": OPERATOR,
            **fit_operator(moments.pop(cut), operator=OPERATOR).diagnostics,
        }
        for cut in cuts
    ]
