"""What a comparison's lines mean for a report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from .compare_lines import CalibrationLine, CellLine, CutLine, RunLine
from .compare_results import CompareResults
from .operators import NO_OPERATOR
from .plan import format_layers
from .report_data import (
    Gap,
    LayerScores,
    Model,
    Study,
    Value,
    accuracies,
    windows_fact,
    windows_label,
)
from .report_expected import expectation
from .report_protocol import Studies, add_protocol

UNFINISHED = "not run: the comparison is not finished"


def add_comparison(studies: Studies, results: CompareResults) -> None:
    """Add a comparison to the study of its model.

    Args:
        studies: What there is already.
        results: The comparison, checked, with a `run` line.
    """
    run = results.run
    assert run is not None  # checked where it was read
    study = studies.of(str(run.model["name"]))
    study.title = run.title or study.title
    for each in results.runs:
        _add_run(study, each)
    labels = {}
    for line in results.calibrations:
        labels[line.name, line.num_windows] = _add_sweep(studies, study, line)
    depth = run.model["num_layers"]
    if results.dense is not None:
        found = _measurements(studies, study, "the dense model", vars(results.dense))
        study.dense = Model(num_layers=depth, **found)
        add_protocol(study, found["tasks"], found["speed"])
    used: set[tuple[Any, ...]] = set()
    for cut in results.cuts:
        label = labels.get((cut.calibration, cut.num_windows), cut.calibration)
        if cut.refused is not None:
            what = f"{cut.selector}, {cut.num_remove} layers, calibrated on {label}"
            study.gaps.append(Gap(what, f"no cut: {cut.refused}"))
            continue
        cells = results.cells_of(cut)
        for cell in cells:
            used.add(cell.key)
            _add_cell(studies, study, cell, cut, depth, label)
        _add_missing(study, run, cut, cells, label)
    _add_missing_cuts(study, run, results, labels)
    for cell in results.cells:
        if cell.key not in used:
            label = labels.get((cell.calibration, cell.num_windows), cell.calibration)
            _add_cell(studies, study, cell, None, depth, label)
    if run.expected is not None:
        expected = expectation(results)
        study.expected += [expected] if expected not in study.expected else []


def _add_run(study: Study, run: RunLine) -> None:
    model = run.model
    parts = [str(model["name"]), str(model.get("architecture") or "")]
    parts.append(f"{model['num_layers']} decoder layers")
    if model.get("parameters"):
        parts.append(f"{model['parameters'] / 1e6:.1f} M parameters")
    parts.append(str(model.get("dtype") or ""))
    digest = (model.get("fingerprint") or {}).get("weights_sha256")
    parts.append(f"weights sha256 {str(digest)[:12]}" if digest else "")
    study.add_fact("Model", "; ".join(filter(None, parts)))
    machine = "; ".join(f"{key} {value}" for key, value in run.machine.items() if value is not None)
    study.add_fact("Machine", machine or "not recorded")
    study.add_fact("Begun", run.created)
    if run.commit:
        study.add_fact("Commit", run.commit)
    if run.command:
        study.add_fact("Command", f"ghostlayers {shlex.join(run.command)}")
    given = {key: value for key, value in run.settings.items() if value not in (None, [], "")}
    settings = "; ".join(
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in given.items()
    )
    study.add_fact("Settings", settings or "defaults")
    study.versions.append(("compare", run.versions))


def _add_sweep(studies: Studies, study: Study, line: CalibrationLine) -> str:
    record = {"source": line.name, "windows": line.num_windows, **line.calibration}
    record |= {"window": line.window, "tokens": line.tokens, "ids_sha256": line.hash}
    named = {**record, "source": line.name}
    label = studies.label(windows_label(named), line.hash)
    study.add_fact(f"Calibration on {label}", windows_fact(record))
    order = list(dict.fromkeys(line.clusters))
    study.add_scores(
        LayerScores(
            label,
            line.similarity,
            line.block_influence,
            line.rls,
            [order.index(cluster) for cluster in line.clusters],
        )
    )
    return label


def _measurements(
    studies: Studies, study: Study, what: str, line: Mapping[str, Any]
) -> dict[str, Any]:
    perplexity: dict[str, Value] = {}
    for name, entry in line["perplexity"].items():
        digest = entry.get("ids_sha256")
        label = studies.label(windows_label({**entry, "source": name}), digest)
        study.add_fact(f"Perplexity on {label}", windows_fact({"source": name, **entry}))
        if entry.get("perplexity") is None:
            study.gaps.append(Gap(f"perplexity of {what} on {label}", "it is not finite"))
        else:
            perplexity[label] = Value(entry["perplexity"], entry.get("standard_error"))
    return {
        "perplexity": perplexity,
        "accuracy": accuracies(line["tasks"]),
        "tasks": line["tasks"],
        "speed": line["speed"],
    }


def _add_cell(
    studies: Studies, study: Study, cell: CellLine, cut: CutLine | None, depth: int, label: str
) -> None:
    selector = cut.selector if cut is not None else cell.selector or "layers"
    fit = ", fitted in sequence" if cell.fit == "sequential" else ""
    what = (
        f"{selector} + {cell.operator}{fit}, layers {format_layers(cell.layers)}, "
        f"calibrated on {label}"
    )
    if cell.refused is not None:
        study.gaps.append(Gap(what, f"refused: {cell.refused}"))
        return
    found = _measurements(studies, study, what, vars(cell))
    add_protocol(study, found["tasks"], None)
    study.models.append(
        Model(
            selector=selector,
            operator=cell.operator,
            removed=tuple(cell.layers),
            num_layers=depth,
            calibration=label,
            calibration_name=cell.calibration,
            num_windows=cell.num_windows,
            fit=cell.fit,
            used=tuple(cell.used),
            boundaries=cell.boundaries,
            guard=cell.guard,
            warnings=cell.warnings,
            **found,
        )
    )


def _add_missing(
    study: Study, run: RunLine, cut: CutLine, cells: list[CellLine], label: str
) -> None:
    """List the cells that the settings ask for and that have no line for a cut."""
    done = {(cell.operator, cell.fit) for cell in cells}
    for operator in _listed(run, "recover"):
        if cut.merged and operator != NO_OPERATOR:
            continue  # merged layers leave no hidden state to repair
        for fit in _listed(run, "fit") or ["dense"]:
            place = (operator, "dense" if operator == NO_OPERATOR else fit)
            if place not in done:
                done.add(place)
                how = f"{operator} fitted in sequence" if place[1] == "sequential" else operator
                what = (
                    f"{cut.selector} + {how}, layers {format_layers(cut.layers)}, "
                    f"calibrated on {label}"
                )
                study.gaps.append(Gap(what, UNFINISHED))


def _add_missing_cuts(
    study: Study,
    run: RunLine,
    results: CompareResults,
    labels: Mapping[tuple[str, int], str],
) -> None:
    """List the cuts and texts that the settings ask for and that have no line."""
    done = {(c.calibration, c.num_windows, c.selector, c.num_remove) for c in results.cuts}
    for (name, windows), label in labels.items():
        for selector in _listed(run, "select"):
            for budget in _listed(run, "num_remove"):
                if (name, windows, selector, budget) not in done:
                    what = f"{selector}, {budget} layers, calibrated on {label}"
                    study.gaps.append(Gap(what, UNFINISHED))
    asked = len(_listed(run, "calibration")) * len(_listed(run, "num_windows"))
    if asked > len(labels):
        what = f"{asked - len(labels)} of {asked} calibrations"
        study.gaps.append(Gap(what, UNFINISHED))


def _listed(run: RunLine, name: str) -> list[Any]:
    value = run.settings.get(name)
    return value if isinstance(value, list) else []


__all__ = ["add_comparison"]
