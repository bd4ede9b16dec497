"""What every model of a comparison is measured on: texts, tasks, speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .compare_config import CompareConfig
from .compare_results import DenseLine
from .compare_scoring import TextScorer
from .speed_results import SpeedSettings, compare_speed
from .task_scores import TaskResults, TaskScore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .tasks import LoadedTasks


@dataclass
class Evaluator:
    """What every model of a comparison is measured on.

    Attributes:
        config: Settings.
        tokenizer: The model's tokenizer, for tasks.
        texts: Scores perplexity; None without texts.
        tasks: Loaded tasks; None without.
        speed: What to time; None without.
    """

    config: CompareConfig
    tokenizer: PreTrainedTokenizerBase
    texts: TextScorer | None = None
    tasks: LoadedTasks | None = None
    speed: SpeedSettings | None = None

    def dense(self, model: PreTrainedModel, starts: Sequence[int]) -> DenseLine:
        """Measure the dense model; keep states for the cells to come in the same pass."""
        start = time.perf_counter()
        perplexity = {} if self.texts is None else self.texts.dense(starts)
        scores = self.task_results(model)
        items = None
        if scores is not None:
            items = {
                name: {
                    "items": [list(item) for item in score.items],
                    "values": {k: list(v) for k, v in score.values.items()},
                    "num_fewshot": score.num_fewshot,
                    "version": score.version,
                }
                for name, score in scores.scores.items()
            }
        return DenseLine(
            perplexity=perplexity,
            tasks=None if scores is None else scores.to_dict(),
            speed=self.speed_of(model, None),
            task_items=items,
            seconds=round(time.perf_counter() - start, 3),
        )

    def task_results(self, model: PreTrainedModel) -> TaskResults | None:
        """Measure accuracies."""
        if self.tasks is None:
            return None
        from .tasks import evaluate_tasks

        config = self.config
        return evaluate_tasks(
            model,
            self.tokenizer,
            self.tasks,
            limit=config.limit,
            batch_size=config.batch_size,
        )

    def speed_of(
        self, model: PreTrainedModel, dense: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """Time a model and put it beside the dense one."""
        if self.speed is None:
            return None
        from .speed import measure_speed

        found = measure_speed(model, self.speed).to_dict()
        compare_speed(found, found if dense is None else dict(dense))
        return found

    def whole(self, model: PreTrainedModel, dense: DenseLine) -> dict[str, Any]:
        """Measure what needs the whole of a pruned model."""
        scores, tasks = self.task_results(model), None
        if scores is not None:
            assert dense.task_items is not None
            tasks = scores.to_dict(_baseline(dense.task_items, scores))
        return {
            "tasks": tasks,
            "speed": self.speed_of(model, dense.speed),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }


def _baseline(items: Mapping[str, Any], like: TaskResults) -> TaskResults:
    """Read the dense model's items as they were stored."""
    scores = {
        name: TaskScore(
            task=name,
            items=tuple(tuple(item) for item in value["items"]),
            values={metric: tuple(values) for metric, values in value["values"].items()},
            num_fewshot=value["num_fewshot"],
            version=value["version"],
        )
        for name, value in items.items()
    }
    return TaskResults(scores, like.not_run, like.protocol)


__all__ = ["Evaluator"]
