"""Write the checkpoint of a cell: what `prune` with the cell's settings would write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .budgets import budget_record
from .checkpoint import save_pruned
from .compare_calibration import readable_name
from .pipeline import PruneResult
from .plan import format_layers
from .run_record import result_record
from .selection import Selection

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from .compare import Comparison
    from .compare_cells import Job
    from .config import PruneConfig
    from .recovered import Recovery

CHECKPOINTS_FOLDER = "checkpoints"
MAX_LAYERS_LENGTH = 60


def save_cell(
    run: Comparison, job: Job, recovery: Recovery, model: PreTrainedModel, settings: PruneConfig
) -> Path:
    """Write a cell's model below the folder of the results; an older one of that name goes.

    Args:
        run: The comparison.
        job: The cell.
        recovery: Its repairs.
        model: The repaired model.
        settings: With which `prune` would make it.

    Returns:
        The folder.
    """
    plan, calibration = job.cut.plan, job.cut.calibration
    chosen = Selection(plan, calibration.measured.similarity)
    spent = budget_record(settings, plan, run.model, model)
    assert run.file.results.run is not None
    dense = run.file.results.run.model["fingerprint"]
    record: dict[str, Any] = result_record(
        settings, chosen, recovery, calibration.windows, spent, dense=dense
    )
    result = PruneResult(
        model=model,
        plan=plan,
        fits=recovery.used,
        record=record,
        tokenizer=run.tokenizer,
        warnings=recovery.warnings,
        changed=recovery.changed,
    )
    what = job.operator if job.cut.selector is None else job.cut.selector
    text, text_hash = readable_name(calibration.name)
    if text != calibration.name:
        text = f"{text}-{text_hash}"
    layers = format_layers(plan.removed)
    if len(layers) > MAX_LAYERS_LENGTH:
        layers = f"{layers[:MAX_LAYERS_LENGTH]}-{readable_name(layers)[1]}"
    name = f"{text}-{calibration.num_windows}-{layers}-{what}-{job.fit}"
    folder = run.file.path.parent / CHECKPOINTS_FOLDER / name
    save_pruned(result, folder, source=run.source, dtype=settings.dtype, force=True)
    return folder


__all__ = ["save_cell"]
