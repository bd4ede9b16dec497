"""Accuracies of tasks, their standard errors, and paired comparison on the same items.

Items are taken as drawn independently; tasks are independent of each other. The standard error of a
mean of n items is s / sqrt(n), s with n − 1 degrees of freedom, as in lm-evaluation-harness.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import GhostlayersError

METRICS = ("acc", "acc_norm")


@dataclass(frozen=True)
class TaskScore:
    """One task on one model.

    Attributes:
        task: Name of the task.
        items: What tells each item from others: number, and hashes of document and target.
        values: Per metric (`acc`, and `acc_norm` where the task has it) one value an item.
        num_fewshot: Examples in front of each item.
        version: The task's version, as its author counts.
    """

    task: str
    items: tuple[tuple[Any, ...], ...]
    values: Mapping[str, tuple[float, ...]]
    num_fewshot: int = 0
    version: Any = None

    def values_of(self, metric: str) -> tuple[float, ...]:
        """Return the items' values of a metric; `acc` where the task has no `acc_norm`, or back."""
        return self.values[metric] if metric in self.values else next(iter(self.values.values()))


@dataclass(frozen=True)
class TaskResults:
    """Tasks on one model.

    Attributes:
        scores: By task, in the order asked for.
        not_run: By task, why its data could not be had.
        protocol: What the numbers depend on: limit, BOS rule, dtype, releases.
    """

    scores: Mapping[str, TaskScore]
    not_run: Mapping[str, str]
    protocol: Mapping[str, Any]

    def to_dict(self, baseline: TaskResults | None = None) -> dict[str, Any]:
        """Return JSON values.

        Args:
            baseline: Results to compare with, item by item; usually the dense model's.

        Raises:
            GhostlayersError: If the baseline was measured on other tasks or items.
        """
        if baseline is not None:
            _check_paired(self, baseline)
        rows = []
        for name, score in self.scores.items():
            other = None if baseline is None else baseline.scores[name]
            row = {"task": name, "items": len(score.items), "num_fewshot": score.num_fewshot}
            row |= {"version": score.version}
            for metric in METRICS:
                row[metric] = None
                if metric in score.values:
                    row[metric] = _summary([score], metric, None if other is None else [other])
            rows.append(row)
        return {
            "scores": rows,
            "average": {metric: self._average(metric, baseline) for metric in METRICS},
            "not_run": dict(self.not_run),
            **self.protocol,
        }

    def _average(self, metric: str, baseline: TaskResults | None) -> dict[str, Any] | None:
        if not self.scores:
            return None
        others = None
        if baseline is not None:
            others = [baseline.scores[name] for name in self.scores]
        found = _summary(list(self.scores.values()), metric, others)
        return {**found, "tasks": list(self.scores), "not_run": list(self.not_run)}


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return a mean and its standard error, None for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _mean_of_means(parts: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Unweighted mean over tasks of their means, with the error of independent tasks."""
    means, errors = zip(*map(mean_and_error, parts), strict=True)
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) / len(parts) if len(known) == len(parts) else None
    return statistics.fmean(means), error


def _summary(
    scores: Sequence[TaskScore], metric: str, baseline: Sequence[TaskScore] | None
) -> dict[str, Any]:
    own = [score.values_of(metric) for score in scores]
    value, error = _mean_of_means(own)
    found: dict[str, Any] = {"value": value, "stderr": error}
    if baseline is None:
        return found
    other = [score.values_of(metric) for score in baseline]
    differences = [
        [one - two for one, two in zip(a, b, strict=True)] for a, b in zip(own, other, strict=True)
    ]
    difference, its_error = _mean_of_means(differences)
    reference = _mean_of_means(other)[0]
    retained = value / reference if reference > 0 else None
    paired = {"difference": difference, "difference_stderr": its_error, "retained": retained}
    return found | paired


def _check_paired(one: TaskResults, two: TaskResults) -> None:
    if list(one.scores) != list(two.scores):
        raise GhostlayersError(
            f"tasks {list(one.scores)} cannot be compared with {list(two.scores)}: measure both "
            "models on the same tasks."
        )
    for name, score in one.scores.items():
        other = two.scores[name]
        if score.items != other.items or set(score.values) != set(other.values):
            raise GhostlayersError(
                f"task {name!r}: the two models were measured on other items "
                f"({len(score.items)} and {len(other.items)}). Use the same `limit` and data."
            )


__all__ = ["METRICS", "TaskResults", "TaskScore", "mean_and_error"]
