"""Reads what a report is made of: comparisons, checkpoints, and JSON of `eval` and `analyze`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .compare_results import RESULTS_FILE, CompareResults, read_results
from .errors import CheckpointError
from .expected_numbers import expected_faults
from .json_shape import shape_error
from .records import RECORD_FILE, plain, read_record
from .report_parts import LARGEST_RATIO
from .report_shapes import ANALYSIS, EVALUATION, LINES, RECORD

LARGEST_COSINE = 1.001  # rounding
KNOWN = (
    "a folder of `compare`, a checkpoint of `prune`, or a JSON file of `eval`, `analyze` or `prune`"
)


@dataclass
class Inputs:
    """Everything that was read, checked; each with the path it is from.

    Attributes:
        comparisons: Results of `compare`.
        checkpoints: Records of `prune`.
        evaluations: JSON values of `eval`.
        analyses: JSON values of `analyze`.
    """

    comparisons: list[tuple[str, CompareResults]] = field(default_factory=list)
    checkpoints: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    evaluations: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    analyses: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def read_inputs(paths: Sequence[str]) -> Inputs:
    """Read and check files and folders.

    Args:
        paths: See `KNOWN`.

    Raises:
        CheckpointError: If one cannot be read, is none of these, or holds values of other types.
    """
    inputs, seen = Inputs(), set()
    for name in paths:
        path = Path(name).expanduser()
        try:
            place = path.resolve(strict=True)
            if place in seen:
                continue
            seen.add(place)
            _read(name, path, inputs)
        except OSError as error:
            raise CheckpointError(
                f"PATH {name!r} cannot be read: {error.strerror or error}. Give {KNOWN}."
            ) from error
    return inputs


def _read(name: str, path: Path, inputs: Inputs) -> None:
    if path.is_dir():
        if (path / RESULTS_FILE).is_file():
            inputs.comparisons.append((name, _comparison(name, path)))
        elif (path / RECORD_FILE).is_file():
            record = plain(read_record(path))
            _check_record(name, record)
            inputs.checkpoints.append((name, record))
        elif runs := _runs(path):
            for run in runs:
                inputs.comparisons.append((f"{name}/{run.name}", _comparison(str(run), run)))
        else:
            raise CheckpointError(
                f"PATH {name!r} has neither {RESULTS_FILE} nor {RECORD_FILE}. Give {KNOWN}."
            )
    elif path.suffix == ".jsonl":
        inputs.comparisons.append((name, _comparison(name, path)))
    else:
        _read_json(name, path, inputs)


def _runs(path: Path) -> list[Path]:
    """List the folders of a comparison of several models in a folder."""
    return sorted(each.parent for each in path.glob(f"*/{RESULTS_FILE}") if each.is_file())


def _read_json(name: str, path: Path, inputs: Inputs) -> None:
    try:
        value = plain(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
        raise CheckpointError(
            f"PATH {name!r} is no JSON file ({_short(error)}). Give {KNOWN}."
        ) from error
    keys = set(value) if isinstance(value, dict) else set()
    if {"results"} <= keys:
        _check(name, value, EVALUATION)
        _check_evaluation(name, value)
        inputs.evaluations.append((name, value))
    elif {"similarity", "block_influence"} <= keys:
        _check(name, value, ANALYSIS)
        _check_sweep(name, value)
        _check_recoverability(name, value)
        inputs.analyses.append((name, value))
    elif {"removed", "boundaries"} <= keys:
        _check_record(name, value)
        inputs.checkpoints.append((str(value.get("out", name)), value))
    else:
        raise CheckpointError(f"PATH {name!r} is none of what a report reads. Give {KNOWN}.")


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:120]


def _check(name: str, value: Any, shape: Any) -> None:
    wrong = shape_error(value, shape)
    if wrong is not None:
        raise CheckpointError(f"PATH {name!r} is damaged: {wrong}. Measure it again.")


def _fail(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"PATH {name!r} is damaged: {what}. Measure it again.")


def _check_record(name: str, record: dict[str, Any]) -> None:
    _check(name, record, RECORD)
    _check_layers(name, record["removed"], record["num_layers"])
    _check_boundaries(name, record["boundaries"], record["num_layers"])


def _check_layers(name: str, layers: Sequence[int], num_layers: int) -> None:
    if layers != sorted(set(layers)) or any(not 0 <= layer < num_layers for layer in layers):
        raise _fail(name, f"it removes layers {layers} of {num_layers}")


def _check_boundaries(name: str, boundaries: Sequence[dict[str, Any]], num_layers: int) -> None:
    for entry in boundaries:
        if not 0 <= entry["start"] < entry["stop"] <= num_layers:
            raise _fail(
                name,
                f"it has a boundary [{entry['start']}, {entry['stop']}) of {num_layers} layers",
            )


def _check_sweep(name: str, value: dict[str, Any]) -> None:
    size, rows = len(value["block_influence"]) + 1, value["similarity"]
    if size < 2 or len(rows) != size or any(len(row) != size for row in rows):
        raise _fail(
            name,
            f"`similarity` is no {size} x {size} matrix for {size - 1} values of `block_influence`",
        )
    if any(abs(cosine) > LARGEST_COSINE for row in rows for cosine in row):
        raise _fail(name, "`similarity` has a cosine above 1")
    if value["num_clusters"] < 1:
        raise _fail(name, f"`num_clusters` is {value['num_clusters']}")


def _check_recoverability(name: str, value: dict[str, Any]) -> None:
    found, size = value.get("recoverability"), len(value["block_influence"]) + 1
    if found is None:
        return
    for key in ("error_before", "error_after"):
        rows = found[key]
        if len(rows) != size or any(len(row) != size for row in rows):
            raise _fail(name, f"`recoverability.{key}` is no {size} x {size} matrix")
        for start, row in enumerate(rows):
            for stop, error in enumerate(row):
                if error is not None and (stop <= start or not 0 <= error < LARGEST_RATIO):
                    raise _fail(name, f"`recoverability.{key}[{start}][{stop}]` is {error}")


def _check_positive(name: str, perplexity: Any) -> None:
    if perplexity is not None and perplexity <= 0:
        raise _fail(name, f"a perplexity is {perplexity}")


def _check_evaluation(name: str, value: dict[str, Any]) -> None:
    if not value["results"]:
        raise _fail(name, "`results` is empty")
    for result in value["results"]:
        for text in [result, *(result.get("texts") or ())]:
            _check_positive(name, text.get("perplexity"))
        _check_speed(name, result.get("speed"))


def _check_speed(name: str, speed: dict[str, Any] | None) -> None:
    for row in (speed or {}).get("rows", ()):
        for phase in ("prefill", "decode"):
            if row[phase]["median_s"] <= 0 or (row[phase].get("speedup") or 1) <= 0:
                raise _fail(name, f"a time of {phase} is not positive")


def _comparison(name: str, path: Path) -> CompareResults:
    results = CompareResults()
    for line in _lines(read_results(path)):
        values = plain(vars(line))
        _check(name, values, LINES[line.kind])
        results.add(type(line)(**values))
    if results.run is None:
        raise CheckpointError(f"PATH {name!r} has no line of kind 'run'. Run `compare` again.")
    for fault in expected_faults(results.run.expected, results.run.model["name"]):
        raise _fail(name, fault)
    num_layers = results.run.model["num_layers"]
    for sweep in results.calibrations:
        _check_sweep(name, vars(sweep))
        if len(sweep.clusters) != num_layers or len(sweep.block_influence) != num_layers:
            raise _fail(name, f"calibration {sweep.name!r} is not of {num_layers} layers")
    places: list[Any] = [*results.cuts, *results.cells]
    for place in places:
        _check_layers(name, place.layers, num_layers)
    for cell in results.cells:
        _check_boundaries(name, cell.boundaries, num_layers)
    every: list[Any] = [results.dense, *results.cells]
    for measured in filter(None, every):
        _check_speed(name, measured.speed)
        for entry in measured.perplexity.values():
            _check_positive(name, entry.get("perplexity"))
    return results


def _lines(results: CompareResults) -> list[Any]:
    every: list[Any] = [results.run, results.dense, *results.calibrations, *results.cuts]
    return [line for line in [*every, *results.cells] if line is not None]


__all__ = ["KNOWN", "Inputs", "read_inputs"]
