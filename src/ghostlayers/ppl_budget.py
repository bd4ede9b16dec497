"""`--max-ppl-ratio`: the most layers whose repaired model stays close to the dense one.

Bisection over the number of layers, on one first sweep: the selector gives a plan for any number
from the scores that are there. It takes for granted that more layers mean a higher loss. That need
not hold, so a larger number than the one found may pass too; what is certain is what was measured:
the number found passes, and the next larger one, if there is one, does not.

Cost, with n layers that may go: ⌈log2(n + 1)⌉ probes, each a second sweep, a fit and the losses on
up to 8 held-out windows of the layers behind the cut. Kept: the dense states of these windows at
the first cut of each probe, and the best repaired model so far, which shares the dense tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .decoder import num_decoder_layers, share_tensors
from .errors import CalibrationError, PlanError, UnsupportedModelError
from .guard import MIN_WINDOWS, first_changed_layer
from .guard_text import GuardScorer, guard_scorer
from .operators import NO_OPERATOR
from .recovered import Recovery
from .recovery import recover_
from .repairs import apply_repairs_, is_tested, without_held_out
from .selectors import AUTO
from .steps import cut

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .config import PruneConfig
    from .selection import Selection


@dataclass(frozen=True)
class Found:
    """The largest cut that passed.

    Attributes:
        chosen: Its layers.
        pruned: The pruned and repaired model.
        recovery: Its repairs.
        probes: JSON values of every number that was tried, in order.
    """

    chosen: Selection
    pruned: PreTrainedModel
    recovery: Recovery
    probes: tuple[dict[str, Any], ...]


def search_num_remove(
    model: PreTrainedModel,
    config: PruneConfig,
    ids: torch.Tensor,
    allowed: Sequence[int],
    choose: Callable[[int], Selection],
    *,
    progress: bool = True,
) -> Found:
    """Find the most layers whose repaired model stays within `max_ppl_ratio`.

    Args:
        model: The dense model.
        config: Settings with `max_ppl_ratio`.
        ids: (n, T) int64 calibration windows; every fourth one is held out from the fits whose loss
            is measured. The fits of the result use all of them.
        allowed: Layers that may go.
        choose: Gives the selection for a number of layers, without a new first sweep.
        progress: Show progress bars when standard error is a terminal.

    Raises:
        CalibrationError: If there are too few windows to hold some out, or the dense model's loss
            is not finite.
        PlanError: If even one layer costs more.
    """
    limit = float(config.max_ppl_ratio or 1.0)
    scorer, dense = _dense_scorer(model, config, ids, progress)
    passes, fails = 0, min(len(allowed), num_decoder_layers(model.config) - 1) + 1
    probes: list[dict[str, Any]] = []
    best: tuple[Selection, PreTrainedModel, Recovery] | None = None
    while fails - passes > 1:
        count = (passes + fails) // 2
        probe: dict[str, Any] = {"num_remove": count, "layers": None, "ratio": math.inf}
        reason = None
        try:
            chosen = choose(count)
            probe["layers"] = list(chosen.plan.removed)
            pruned, recovery, loss = _repaired(model, config, ids, chosen, scorer, progress)
            probe["ratio"] = _exp(loss - dense)
        except (PlanError, UnsupportedModelError) as error:  # no such cut, or it cannot be made
            reason = str(error)
        within = reason is None and probe["ratio"] <= limit
        probes.append({**probe, "within": within, "reason": reason})
        if within:
            passes, best = count, (chosen, pruned, recovery)
        else:
            fails = count
    if best is None:
        raise _unreachable(limit, probes[-1])
    return Found(*best, tuple(probes))


def _dense_scorer(
    model: PreTrainedModel, config: PruneConfig, ids: torch.Tensor, progress: bool
) -> tuple[GuardScorer, float]:
    """Return what scores models on the held-out windows, and the dense model's mean loss there."""
    if len(ids) < MIN_WINDOWS:
        raise CalibrationError(
            f"`max_ppl_ratio` measures on held-out windows and there are {len(ids)} calibration "
            f"windows. Use at least {MIN_WINDOWS}, or another budget."
        )
    scorer = guard_scorer(model, ids, batch_size=config.batch_size, progress=progress)
    dense = _mean(scorer.dense_losses())
    if not math.isfinite(dense):
        raise CalibrationError(
            "the dense model's loss on the held-out windows is not finite: `max_ppl_ratio` has "
            "nothing to compare with. Use float32 or bfloat16, or check the weights."
        )
    if config.select == AUTO:
        warnings.warn(
            "`max_ppl_ratio` with `select` auto repeats the search for every number of layers that "
            "it tries.",
            stacklevel=3,
        )
    return scorer, dense


def _repaired(
    model: PreTrainedModel,
    config: PruneConfig,
    ids: torch.Tensor,
    chosen: Selection,
    scorer: GuardScorer,
    progress: bool,
) -> tuple[PreTrainedModel, Recovery, float]:
    """Cut and repair; return the model, its repairs, and the loss of repairs that are not in it.

    Those are the same repairs fitted without the held-out windows, on which the loss is measured.
    """
    plan, pruned = chosen.plan, cut(model, chosen.plan)
    unrepaired = share_tensors(pruned)
    recovery = recover_(
        pruned, model, plan, config, ids, chosen.massive, scorer=scorer, progress=progress
    )
    verdict = recovery.verdict
    if verdict is not None and "loss_chosen" in verdict.record:
        return pruned, recovery, float(verdict.record["loss_chosen"])
    fits = {boundary: ladder[0] for boundary, ladder in recovery.ladders.items()}
    if config.recover != NO_OPERATOR and not all(map(is_tested, fits.values())):
        raise CalibrationError(
            "`max_ppl_ratio` needs repairs fitted without the held-out windows, and there are too "
            f"few calibration tokens for that ({ids.numel()}). Use more windows."
        )
    bare = scorer.suffix(unrepaired, plan, first_changed_layer(plan, recovery.ladders))
    repaired = share_tensors(bare.model)
    apply_repairs_(repaired, bare.plan, {b: without_held_out(fit) for b, fit in fits.items()})
    return pruned, recovery, _mean(scorer.losses(replace(bare, model=repaired)))


def _unreachable(limit: float, probe: dict[str, Any]) -> PlanError:
    """Say what removing a single layer would need."""
    if probe["reason"] is not None:
        return PlanError(f"`max_ppl_ratio` is {limit:g} and no layer goes: {probe['reason']}")
    least = math.ceil(1e4 * probe["ratio"]) / 1e4 if math.isfinite(probe["ratio"]) else math.inf
    return PlanError(
        f"`max_ppl_ratio` is {limit:g}, but removing 1 layer ({probe['layers'][0]}) makes the "
        f"held-out perplexity {least:g} x that of the dense model. Allowed: {least:g} or more; "
        "raise it, or choose another selector or `recover`."
    )


def _exp(difference: float) -> float:
    return math.exp(difference) if difference < 700 else math.inf


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf
