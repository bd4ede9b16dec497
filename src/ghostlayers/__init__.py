"""ghostlayers: make a large language model shallower without training, and keep it working.

Importing this package imports no torch and changes nothing, except where transformers is already
loaded or loaded later: the model type of checkpoints with operators is then made known to it. An
installed transformers outside the releases in `requirements` raises an ImportError.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registration import arrange_registration
from .requirements import check_transformers, needing_transformers

if TYPE_CHECKING:
    from .analysis import Analysis, analyze
    from .calibration import Windows, sampled_windows, text_windows
    from .checkpoint import PrunedCheckpoint, load_pruned, save_pruned
    from .config import PruneConfig
    from .decoder import remove_layers_, share_tensors
    from .distillation import FinetuneResult, finetune
    from .errors import (
        CalibrationError,
        CheckpointError,
        GhostlayersError,
        PlanError,
        UnsupportedModelError,
    )
    from .evaluation import PerplexityResult, perplexity
    from .finetune_config import FinetuneConfig
    from .finetuned_checkpoint import save_finetuned
    from .loading import load_model, load_tokenizer
    from .moments import BoundaryMoments, SplitMoments
    from .operators import OperatorFit
    from .pipeline import PruneResult, prune
    from .placement import Placement
    from .plan import Boundary, PruningPlan
    from .scores import Scores
    from .scores_file import load_scores
    from .selectors import ModelContext, SelectionContext
    from .similarity import Similarity
    from .speed import measure_speed
    from .speed_results import SpeedResult, SpeedSettings
    from .steps import (
        attach_operators_,
        collect_moments,
        find_massive_tokens,
        fit_operator,
        fit_sink_rules,
        measure_similarity,
        select_layers,
    )
    from .task_scores import TaskResults, TaskScore
    from .tasks import evaluate_tasks, load_tasks
    from .teacher_logits import TeacherLogits, cache_teacher

__version__ = "0.1.0"

_EXPORTS = {
    "Analysis": "analysis",
    "Boundary": "plan",
    "BoundaryMoments": "moments",
    "CalibrationError": "errors",
    "CheckpointError": "errors",
    "FinetuneConfig": "finetune_config",
    "FinetuneResult": "distillation",
    "GhostlayersError": "errors",
    "ModelContext": "selectors",
    "OperatorFit": "operators",
    "PerplexityResult": "evaluation",
    "Placement": "placement",
    "PlanError": "errors",
    "PruneConfig": "config",
    "PruneResult": "pipeline",
    "PrunedCheckpoint": "checkpoint",
    "PruningPlan": "plan",
    "Scores": "scores",
    "SelectionContext": "selectors",
    "Similarity": "similarity",
    "SpeedResult": "speed_results",
    "SpeedSettings": "speed_results",
    "SplitMoments": "moments",
    "TaskResults": "task_scores",
    "TaskScore": "task_scores",
    "UnsupportedModelError": "errors",
    "TeacherLogits": "teacher_logits",
    "Windows": "calibration",
    "analyze": "analysis",
    "attach_operators_": "steps",
    "cache_teacher": "teacher_logits",
    "collect_moments": "steps",
    "find_massive_tokens": "steps",
    "evaluate_tasks": "tasks",
    "finetune": "distillation",
    "fit_operator": "steps",
    "fit_sink_rules": "steps",
    "load_model": "loading",
    "load_pruned": "checkpoint",
    "load_scores": "scores_file",
    "load_tasks": "tasks",
    "load_tokenizer": "loading",
    "measure_similarity": "steps",
    "measure_speed": "speed",
    "perplexity": "evaluation",
    "prune": "pipeline",
    "remove_layers_": "decoder",
    "sampled_windows": "calibration",
    "save_finetuned": "finetuned_checkpoint",
    "save_pruned": "checkpoint",
    "select_layers": "steps",
    "share_tensors": "decoder",
    "text_windows": "calibration",
}

__all__ = [*sorted(_EXPORTS), "__version__"]  # noqa: PLE0604


check_transformers()
arrange_registration()


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing_transformers():
        value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
