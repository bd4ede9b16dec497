"""The record of a run: what a checkpoint's `ghostlayers.json` says of how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .boundary_record import boundary_entries
from .records import FORMAT_VERSION, versions

if TYPE_CHECKING:
    from .calibration import Windows
    from .config import PruneConfig
    from .recovered import Recovery
    from .scores import Scores
    from .selection import Selection


def result_record(
    config: PruneConfig,
    chosen: Selection,
    recovery: Recovery,
    windows: Windows | None,
    budget: dict[str, Any],
    scores: Scores | None = None,
    *,
    dense: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the content of `ghostlayers.json`, as JSON values.

    Args:
        config: Settings.
        chosen: The layers, and what was measured to choose them.
        recovery: The repairs.
        windows: The calibration windows; None if none were read.
        budget: From `budget_record`.
        scores: Scores given in, if any.
        dense: `fingerprint` of the dense model; the weights' is None where none was read.
    """
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
        "refinement": recovery.refinement,
        "budget": budget,
        "scores": None if scores is None else scores.record(),
        "rls": None if chosen.similarity is None else chosen.similarity.rls,
        "search": chosen.search,
        "selection": chosen.selection,
        "calibration": None if windows is None else windows.record(),
        "seed": config.seed,
        "fingerprint": dict(dense),
        "config": config.to_dict(),
        "versions": versions(),
    }


__all__ = ["result_record"]
