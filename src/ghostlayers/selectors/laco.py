"""LaCo (Yang et al., arXiv 2402.11187): collapse runs of layers into their lowest one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import distributed
from ..errors import PlanError
from . import Choice, ModelContext

if TYPE_CHECKING:
    from ..collapse_search import CollapseScorer, Rules

# The threshold in the published code for a Llama of 13 billion parameters.
LOW_COSINE = 0.45


def select_laco(context: ModelContext) -> Choice:
    """Collapse layers from the top down until k are gone (paper, algorithm 1).

    Layer l takes θ_l + Σ_j (θ_{l+j} − θ_l), j = 1..m−1, and the m−1 layers above go, if the mean
    cosine between the dense and the collapsed model's last hidden states stays above a threshold.
    The last merge is as small as the budget asks. Without `laco_threshold` it is the highest one
    with which a scan reaches the budget.

    Differs from the published code: the cosine is that of each token over channels (there, over
    all tokens and channels of a text at once), of the raw last state (there, behind the final
    norm), and all parameters of a layer are merged (there, its linear maps, each minus the running
    sum).

    Returns:
        The choice: removed layers, merges with their cosines, new weights.

    Raises:
        PlanError: If no scan reaches the budget; what to change is named.
        UnsupportedModelError: If the last hidden states cannot be read.
    """
    from ..collapse_search import CollapseScorer, scan, search_threshold

    ids, given = context.score_ids, context.config.laco_threshold
    rules = _rules(context)
    with distributed.alone():  # every process does all of it: few tokens, one step after another
        scorer = CollapseScorer(
            context.model, ids, batch_size=context.config.batch_size, progress=context.progress
        )
        with scorer.bar:
            if given is None:
                threshold, found = search_threshold(scorer, rules)
            else:
                threshold, found = given, scan(scorer, rules, given)
    removed = tuple(sorted(set(scorer.dense.layers) - set(found.layers)))
    if len(removed) < rules.budget:
        raise PlanError(_too_few(scorer, rules, len(removed), given))
    merges = [
        {"layer": m.layer, "merged": list(m.others), "cosine": m.cosine} for m in found.merges
    ]
    record: dict[str, Any] = {
        "windows": ids.shape[0],
        "window": ids.shape[1],
        "threshold": threshold,
        "evaluations": len(scorer.cosines),
        "merges": merges,
        "skipped": [{"layer": k, "reason": why} for k, why in sorted(scorer.skipped.items())],
    }
    return Choice(removed, record, found.weights(), _warnings(found.merges[-1].cosine, rules))


def _warnings(cosine: float, rules: Rules) -> tuple[str, ...]:
    if cosine >= LOW_COSINE:
        return ()
    return (
        f"laco: the last hidden state of the merged model has a mean cosine of {cosine:.3f} to the "
        f"dense model's (the published code stays above {LOW_COSINE}): measure it before use. "
        f"Fewer layers per merge (`laco_layers`, now {rules.size}) or a smaller `num_remove` do "
        "less harm.",
    )


def _rules(context: ModelContext) -> Rules:
    from ..collapse_search import Rules
    from ..decoder import decoder_layers
    from ..plan import parse_layers

    config, allowed = context.config, context.allowed
    low, high = max(allowed[0] - 1, 0), allowed[-1]
    if config.laco_range is not None:
        named = parse_layers(config.laco_range, len(decoder_layers(context.model)))
        low, high = named[0], named[-1]
    return Rules(
        size=config.laco_layers,
        interval=config.laco_interval,
        low=low,
        high=high,
        allowed=frozenset(allowed),
        budget=context.num_remove,
    )


def _too_few(scorer: CollapseScorer, rules: Rules, gone: int, given: float | None) -> str:
    what = f"`select` laco merges away {gone} of {rules.budget} layers (`num_remove`)"
    if given is not None:
        what += f" with `laco_threshold` {given}. Lower it, or leave it out to have it found"
    else:
        what += (
            f" with `laco_layers` {rules.size}, `laco_interval` {rules.interval} and layers "
            f"{rules.low} to {rules.high}. Lower `num_remove` or the interval, or widen "
            "`laco_range`"
        )
    for layer, reason in sorted(scorer.skipped.items())[:1]:
        what += f"; not merged into layer {layer}, for example: {reason.rstrip('.')}"
    return f"{what}."
