"""Write a distilled checkpoint: the pruned one, with the changed weights in their places."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import PrunedCheckpoint, save_pruned
from .decoder import num_decoder_layers
from .pipeline import PruneResult
from .plan import PruningPlan

if TYPE_CHECKING:
    from .distillation import FinetuneResult
    from .loading import ModelSource


def save_finetuned(
    result: FinetuneResult,
    checkpoint: PrunedCheckpoint,
    out: str | Path,
    *,
    source: ModelSource | None = None,
    teacher: str | None = None,
    force: bool = False,
) -> Path:
    """Write a distilled model as a complete checkpoint folder.

    Args:
        result: From `finetune`.
        checkpoint: The pruned checkpoint that was distilled into.
        out: Folder to write.
        source: Where that checkpoint's files lie: what did not change is copied from them, bit for
            bit, and the rest is cast to the dtype it has there. None writes the model in memory.
        teacher: Name of the dense model, for the record.
        force: Replace an existing folder.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the folder exists without `force`, or the disk is too small.
    """
    entry = {"teacher_model": teacher, **result.record}
    if "finetune" in checkpoint.record:
        entry["before"] = checkpoint.record["finetune"]
    depth = num_decoder_layers(result.model.config)
    as_pruned = PruneResult(
        model=result.model,
        plan=PruningPlan(depth, ()),
        fits={},
        record={**checkpoint.record, "finetune": entry},
        tokenizer=checkpoint.tokenizer,
        changed=result.changed,
    )
    return save_pruned(as_pruned, out, source=source, force=force)
