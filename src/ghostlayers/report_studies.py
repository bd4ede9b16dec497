"""Puts what was read together: one study for each dense model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .report_compare import add_comparison
from .report_data import (
    Gap,
    LayerScores,
    Model,
    Study,
    Value,
    accuracies,
    short_name,
    windows_fact,
    windows_label,
)
from .report_inputs import Inputs
from .report_parts import CutErrors
from .report_protocol import Studies, add_protocol
from .selectors.lorp import cluster_layers
from .task_scores import mean_and_error


def build_studies(inputs: Inputs) -> list[Study]:
    """Put everything together.

    A result of `eval` belongs to the checkpoint of the same path; the first result of each file
    is the dense model of the others. A checkpoint that was not evaluated belongs to the model that
    its record names.

    Returns:
        Studies in the order of the input, comparisons first.
    """
    studies = Studies()
    for _, comparison in inputs.comparisons:
        add_comparison(studies, comparison)
    records = {_place(path): (path, record) for path, record in inputs.checkpoints}
    measured: dict[str, tuple[Study, list[Mapping[str, Any]]]] = {}
    for _, evaluation in inputs.evaluations:
        _add_evaluation(studies, evaluation, measured)
    for place, (path, record) in records.items():
        if place in measured:
            study, results = measured.pop(place)
        else:
            source = (record.get("source") or {}).get("model")
            study, results = studies.of(str(source or path)), []
        _add_model(studies, study, path, record, results)
    for study, results in measured.values():
        _add_model(studies, study, str(results[0]["path"]), None, results)
    for path, value in inputs.analyses:
        _add_analysis(studies, path, value)
    return list(studies.by_model.values())


def _place(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _add_evaluation(
    studies: Studies,
    evaluation: Mapping[str, Any],
    measured: dict[str, tuple[Study, list[Mapping[str, Any]]]],
) -> None:
    first, *others = evaluation["results"]
    study = studies.of(first["path"])
    found = _measurements(studies, study, [first])
    depth = (first.get("speed") or {}).get("num_layers")
    earlier = study.dense
    if earlier is not None:
        found = {
            "perplexity": {**earlier.perplexity, **found["perplexity"]},
            "accuracy": {**earlier.accuracy, **found["accuracy"]},
            "tasks": found["tasks"] or earlier.tasks,
            "speed": found["speed"] or earlier.speed,
        }
        depth = depth or earlier.num_layers
    study.dense = Model(name=first["path"], num_layers=depth, **found)
    for result in others:
        measured.setdefault(_place(result["path"]), (study, []))[1].append(result)
    if evaluation.get("versions"):
        study.versions.append(("eval", evaluation["versions"]))


def _measurements(
    studies: Studies, study: Study, results: list[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return perplexities, tasks and speed of one model from its results."""
    perplexity: dict[str, Value] = {}
    tasks = speed = None
    for result in results:
        for text in result.get("texts") or ([result] if "source" in result else []):
            label = studies.label(windows_label(text), text.get("ids_sha256"))
            study.add_fact(f"Perplexity on {label}", windows_fact(text))
            name = short_name(result["path"])
            if text.get("perplexity") is None:
                study.gaps.append(Gap(f"perplexity of {name} on {label}", "it is not finite"))
            else:
                perplexity[label] = Value(text["perplexity"], _standard_error(text))
        tasks, speed = result.get("tasks") or tasks, result.get("speed") or speed
        if result.get("dtype"):
            study.add_fact("Evaluated in", str(result["dtype"]))
    add_protocol(study, tasks, speed)
    return {
        "perplexity": perplexity,
        "accuracy": accuracies(tasks),
        "tasks": tasks,
        "speed": speed,
    }


def _standard_error(result: Mapping[str, Any]) -> float | None:
    losses = result.get("window_losses") or []
    if len(losses) < 2:
        return None
    error = mean_and_error(losses)[1]
    return None if error is None else float(result["perplexity"]) * error


def _add_model(
    studies: Studies,
    study: Study,
    path: str,
    record: Mapping[str, Any] | None,
    results: list[Mapping[str, Any]],
) -> None:
    found = _measurements(studies, study, results)
    if record is None:
        depth = study.num_layers
        study.models.append(Model(name=path, num_layers=depth, **found))
        return
    calibration = record.get("calibration") or {}
    label = ""
    if calibration:
        label = studies.label(windows_label(calibration), calibration.get("ids_sha256"))
        study.add_fact(f"Calibration on {label}", windows_fact(calibration))
    if record.get("versions"):
        study.versions.append((f"prune {short_name(path)}", record["versions"]))
    study.models.append(
        Model(
            name=path,
            selector=record["selector"],
            operator=record["recover"],
            removed=tuple(record["removed"]),
            num_layers=record["num_layers"],
            calibration=label,
            calibration_name=short_name(str(calibration.get("source", ""))),
            num_windows=calibration.get("windows"),
            fit=(record.get("config") or {}).get("fit") or "dense",
            used=tuple(entry["operator"] for entry in record["boundaries"]),
            boundaries=record["boundaries"],
            guard=record.get("guard"),
            trained=bool(record.get("finetune")),
            warnings=[line for entry in record["boundaries"] for line in entry.get("warnings", ())],
            **found,
        )
    )


def _add_analysis(studies: Studies, path: str, value: Mapping[str, Any]) -> None:
    study = studies.of(str(value["model"]))
    calibration = value["calibration"]
    label = studies.label(windows_label(calibration), calibration.get("ids_sha256"))
    study.add_fact(f"Similarity on {label}", windows_fact(calibration))
    if value.get("versions"):
        study.versions.append((f"analyze {short_name(path)}", value["versions"]))
    cuts = value.get("recoverability")
    if cuts is not None:
        counts = {key: cuts.get(key) for key in ("tokens", "held_out_tokens")}
        errors = CutErrors(label, cuts["error_before"], cuts["error_after"], **counts)
        if errors not in study.recoverability and any(True for _ in errors.cuts()):
            study.recoverability.append(errors)
    matrix = np.array(value["similarity"], dtype=np.float64)
    clusters = cluster_layers(matrix[:-1, :-1], min(value["num_clusters"], len(matrix) - 1))
    labels = {layer: index for index, members in enumerate(clusters) for layer in members}
    rls = value.get("rls")
    study.add_scores(
        LayerScores(
            label,
            value["similarity"],
            value["block_influence"],
            rls if rls is not None and math.isfinite(rls) else None,
            [labels[layer] for layer in range(len(matrix) - 1)],
        )
    )


__all__ = ["build_studies"]
