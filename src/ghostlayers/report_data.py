"""What a report shows, however it was measured: studies of dense models and their shallower ones.

Imports no torch and no plotting library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import format_layers
from .report_parts import CutErrors, Expectation

SHORT_HASH = 12


@dataclass(frozen=True)
class Value:
    """A number and its standard error; None where it has none."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class LayerScores:
    """One sweep over the dense model.

    Attributes:
        calibration: Label of the text it was measured on.
        similarity: (L+1) rows of L+1 mean cosines of the hidden states.
        block_influence: 1 − S[i, i+1] of each of the L layers.
        rls: Representation Locality Score; None if it is infinite.
        clusters: Cluster of each of the L layers, numbered by first layer.
    """

    calibration: str
    similarity: Sequence[Sequence[float]]
    block_influence: Sequence[float]
    rls: float | None
    clusters: Sequence[int]

    @property
    def num_layers(self) -> int:
        """Depth L."""
        return len(self.block_influence)


@dataclass(frozen=True)
class Model:
    """A model that was measured: dense, pruned or recovered.

    Attributes:
        name: What the input calls it; empty for a cell of a comparison.
        selector: Selector, `layers` for an explicit list; None for the dense model.
        operator: What was asked for at the boundaries.
        removed: Removed layers; None where the input does not say.
        num_layers: Depth L of the dense model; None where the input does not say.
        calibration: Label of the text that it was repaired with.
        calibration_name: Short name of that text.
        num_windows: Windows of that text; None where the input does not say.
        fit: `dense` or `sequential`.
        used: Operator at each boundary after the guard.
        boundaries: What a checkpoint's record says of each boundary.
        guard: What a checkpoint's record says of the guard; None without.
        perplexity: By label of the text.
        accuracy: By metric: the mean over the tasks.
        tasks: JSON values of the tasks; None if not measured.
        speed: JSON values of the speed; None if not measured.
        trained: Whether it was trained after the closed form.
        warnings: One line each.
    """

    name: str = ""
    selector: str | None = None
    operator: str = ""
    removed: tuple[int, ...] | None = None
    num_layers: int | None = None
    calibration: str = ""
    calibration_name: str = ""
    num_windows: int | None = None
    fit: str = "dense"
    used: tuple[str, ...] = ()
    boundaries: Sequence[Mapping[str, Any]] = ()
    guard: Mapping[str, Any] | None = None
    perplexity: Mapping[str, Value] = field(default_factory=dict)
    accuracy: Mapping[str, Value] = field(default_factory=dict)
    tasks: Mapping[str, Any] | None = None
    speed: Mapping[str, Any] | None = None
    trained: bool = False
    warnings: Sequence[str] = ()

    @property
    def num_removed(self) -> int | None:
        """Number of removed layers, from their list or from the depth that was timed."""
        if self.removed is not None:
            return len(self.removed)
        depth = (self.speed or {}).get("num_layers")
        return None if depth is None or self.num_layers is None else self.num_layers - depth

    @property
    def method(self) -> str:
        """Selector and operator, for people."""
        if self.selector is None:
            return self.name or "dense"
        parts = [self.selector, self.operator]
        parts += ["sequential"] if self.fit == "sequential" else []
        parts += ["trained"] if self.trained else []
        return " + ".join(parts)

    @property
    def operator_label(self) -> str:
        """The operator with what sets it apart from the same operator elsewhere."""
        extra = ", sequential" if self.fit == "sequential" else ""
        return self.operator + extra + (", trained" if self.trained else "")

    @property
    def layers(self) -> str:
        """Removed layers as a list of ranges."""
        return "not known" if self.removed is None else format_layers(self.removed) or "none"


@dataclass(frozen=True)
class Gap:
    """Something that has no number, and why."""

    what: str
    reason: str


@dataclass
class Study:
    """One dense model and everything that was made of it.

    Attributes:
        model: Name of the dense model as the input gives it.
        dense: Its measurements; None if there are none.
        scores: Sweeps over it.
        recoverability: Errors of every contiguous cut.
        models: Pruned and recovered models.
        gaps: What was refused or not run.
        facts: What was measured how: pairs of term and text.
        versions: `{package: version}` with where they were read.
        title: What a configuration says that it reproduces.
        expected: Numbers that configurations expect, beside those that were measured.
    """

    model: str
    dense: Model | None = None
    scores: list[LayerScores] = field(default_factory=list)
    recoverability: list[CutErrors] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    versions: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    title: str | None = None
    expected: list[Expectation] = field(default_factory=list)

    def add_fact(self, term: str, text: str) -> None:
        """Say how something was measured, once."""
        if (term, text) not in self.facts:
            self.facts.append((term, text))

    def add_scores(self, scores: LayerScores) -> None:
        """Add a sweep, once: `analyze` and `compare` may have measured the same windows."""
        if scores not in self.scores:
            self.scores.append(scores)

    @property
    def num_layers(self) -> int | None:
        """Depth L of the dense model, if any input says it."""
        depths = [scores.num_layers for scores in self.scores]
        depths += [model.num_layers for model in self.models if model.num_layers is not None]
        if self.dense is not None and self.dense.num_layers is not None:
            depths.append(self.dense.num_layers)
        return depths[0] if depths else None

    @property
    def texts(self) -> list[str]:
        """Labels of the texts that perplexity was measured on, in the order of the input."""
        every = [self.dense, *self.models] if self.dense is not None else self.models
        return unique(label for model in every if model for label in model.perplexity)

    @property
    def calibrations(self) -> list[str]:
        """Labels of the calibrations of the models."""
        return unique(model.calibration for model in self.models)

    @property
    def main_models(self) -> list[Model]:
        """Models of the first calibration; those of checkpoints all count."""
        cells = [model for model in self.models if not model.name]
        first = cells[0].calibration if cells else None
        return [model for model in self.models if model.name or model.calibration == first]

    def best(self, models: Iterable[Model]) -> Model | None:
        """Return the model of lowest perplexity on the first text, else of highest accuracy."""
        known = list(models)
        for text in self.texts[:1]:
            measured = [model for model in known if text in model.perplexity]
            if measured:
                return min(measured, key=lambda model: model.perplexity[text].value)
        measured = [model for model in known if "acc" in model.accuracy]
        if measured:
            return max(measured, key=lambda model: model.accuracy["acc"].value)
        return None

    @property
    def budgets(self) -> list[int]:
        """Numbers of removed layers of the models, ascending."""
        return sorted({model.num_removed for model in self.main_models if model.num_removed})

    def of_budget(self, budget: int) -> list[Model]:
        """Return the main models that lack so many layers."""
        return [model for model in self.main_models if model.num_removed == budget]

    @property
    def headline(self) -> Model | None:
        """The best model of the largest number of removed layers that has a result."""
        for budget in reversed(self.budgets):
            found = self.best(self.of_budget(budget))
            if found is not None:
                return found
        return None


def unique(items: Iterable[str]) -> list[str]:
    """Return the items without repetition, in their order."""
    return list(dict.fromkeys(items))


def short_name(name: str) -> str:
    """Return the last part of a path; a Hub id stays whole."""
    clean = name.rstrip("/\\") or name
    local = clean.startswith((".", "/", "~")) or clean.count("/") > 1 or "\\" in clean
    return clean.replace("\\", "/").rsplit("/", 1)[-1] if local else clean


def windows_label(record: Mapping[str, Any]) -> str:
    """Name windows of a text, from their record."""
    name = short_name(str(record.get("source", "text")))
    count, window = record.get("windows"), record.get("window")
    return f"{name}, {count} × {window} tokens" if count and window else name


def windows_fact(record: Mapping[str, Any]) -> str:
    """Say of windows what tells them from others, from their record."""
    bos = record.get("bos_per_window")
    parts = [
        str(record.get("source", "text")),
        f"{record.get('windows', '?')} windows of {record.get('window', '?')} tokens",
        f"{record.get('tokens', '?')} tokens",
        *([] if bos is None else ["BOS in front of each" if bos else "no BOS"]),
    ]
    digest = record.get("ids_sha256")
    return "; ".join(parts) + (f"; ids sha256 {str(digest)[:SHORT_HASH]}" if digest else "")


def accuracies(tasks: Mapping[str, Any] | None) -> dict[str, Value]:
    """Return the mean accuracy over the tasks by metric."""
    if not tasks:
        return {}
    averages = tasks.get("average") or {}
    return {
        metric: Value(entry["value"], entry.get("stderr"))
        for metric, entry in averages.items()
        if entry and entry.get("value") is not None
    }


__all__ = [
    "Gap",
    "LayerScores",
    "Model",
    "Study",
    "Value",
    "accuracies",
    "short_name",
    "unique",
    "windows_fact",
    "windows_label",
]
