"""What `prune --dry-run` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .budget_values import budget_kind
from .budgets import SizeBudget, size_budget
from .config import PruneConfig
from .decoder import num_decoder_layers, text_config
from .model_sizes import structure
from .operators import FOLDING, NO_OPERATOR
from .records import versions
from .rotation import rotation_name
from .tables import render_table

UNKNOWN = {
    "target_bytes": "known once the weight files are opened",
    "max_ppl_ratio": "known once repaired models are measured on the calibration text",
}


def describe_run(
    config: PruneConfig,
    model_config: Any,
    window: int,
    num_remove: int | None,
    allowed: Sequence[int] = (),
) -> tuple[str, dict[str, Any]]:
    """Describe a run from its settings and the model's config alone.

    Args:
        config: Settings.
        model_config: The model's config.
        window: Tokens per window.
        num_remove: Number of layers that go, if the settings say so.
        allowed: Layers that may go.

    Returns:
        A table, and the JSON value of `--json`.
    """
    depth, size = num_decoder_layers(model_config), text_config(model_config).hidden_size
    moments = 0 if config.recover == NO_OPERATOR else 4 * size * size * 8
    folding = config.recover in FOLDING
    low, high = num_remove, num_remove
    if num_remove is None and budget_kind(config) not in UNKNOWN:
        low, high = num_remove_range(config, model_config, allowed)
        num_remove = low if low == high else None
    goes = UNKNOWN.get(budget_kind(config), f"{low} to {high}, by which ones the selector takes")
    goes = goes if num_remove is None else str(num_remove)
    rows = [[name, str(value)] for name, value in config.to_dict().items()]
    rows += [
        ["window (resolved)", str(window)],
        ["decoder layers", str(depth)],
        ["hidden size", str(size)],
        ["layers that go", goes],
        ["calibration tokens (at most)", str(config.num_windows * window)],
        [
            "moments per boundary",
            "known once the model is loaded" if folding else f"{moments / 1e6:.1f} MB (float64)",
        ],
    ]
    if config.recover == "linearpatch-rotate":
        rows.append(["rotation", rotation_name(size)])
    table = render_table(["setting", "value"], rows)
    text = f"{table}\n\ndry run: nothing was loaded or written"
    return text, {
        "config": config.to_dict(),
        "window": window,
        "num_layers": depth,
        "num_remove": num_remove,
        "num_remove_range": None if low is None else [low, high],
        "moments_bytes_per_boundary": None if folding else moments,
        "versions": versions(),
    }


def num_remove_range(
    config: PruneConfig, model_config: Any, allowed: Sequence[int]
) -> tuple[int, int]:
    """Return the least and the largest number of layers that a budget by parameters can come to.

    They differ where layers differ in size, or where operators count and the number of boundaries
    is not known yet. A selector without an answer for such a number goes on to a larger one.

    Raises:
        PlanError: If the budget cannot be met.
    """
    size = text_config(model_config).hidden_size
    budget = size_budget(config, structure(model_config), size)
    assert budget is not None  # the caller asks for budgets by parameters only
    return budget.fewest(allowed), _surely(budget, allowed)


def _surely(budget: SizeBudget, allowed: Sequence[int]) -> int:
    """Return the least number of layers that meets the limit whichever of them go."""
    alone = sorted(budget.sizes.by_owners.get(frozenset({layer}), 0) for layer in allowed)
    depth, stays = budget.sizes.num_layers, budget.dense
    most = min(len(alone), depth - 1)
    for count, amount in enumerate(alone[:most], start=1):
        stays -= amount
        boundaries = min(count, depth - count + 1)
        if stays + budget.operator * boundaries <= budget.limit:
            return count
    return most
