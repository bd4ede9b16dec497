"""Tables of a comparison: text for the terminal, Markdown, CSV. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compare_lock import cannot_be_written
from .compare_results import CellLine, CompareResults, CutLine
from .plan import format_layers
from .records import write_whole
from .tables import render_table

CSV_FILE, MARKDOWN_FILE = "results.csv", "results.md"
CSV_COLUMNS = (
    *("calibration", "num_windows", "selector", "num_remove", "layers", "operator", "fit", "used"),
    *("text", "perplexity", "standard_error", "ratio", "log_ratio", "log_ratio_standard_error"),
    *("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "acc_norm_retained"),
    *("parameters", "seconds", "refused"),
)
REFUSED, MISSING = "refused", "-"


@dataclass(frozen=True)
class Table:
    """A table and what stands above it.

    Attributes:
        title: One or two sentences.
        header: Names of the columns.
        rows: Cells as text.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """Return the table for a terminal."""
        return f"{self.title}\n\n{render_table(self.header, self.rows)}"

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.title}\n\n{body}"


def columns(results: CompareResults) -> list[tuple[str, str]]:
    """List the operators, each with the states it was fitted on, in the order of the settings."""
    found = dict.fromkeys((cell.operator, cell.fit) for cell in results.cells)
    order = [] if results.run is None else list(results.run.settings["recover"])
    return sorted(
        found, key=lambda pair: (order.index(pair[0]) if pair[0] in order else -1, pair[1])
    )


def column_name(pair: tuple[str, str]) -> str:
    """Name an operator's column."""
    return pair[0] if pair[1] == "dense" else f"{pair[0]} ({pair[1]})"


def tables(results: CompareResults) -> list[Table]:
    """Lay out a comparison: cuts against operators for each text and for the tasks."""
    found = [table for name in _texts(results) for table in _perplexities(results, name)]
    if results.dense is not None and results.dense.tasks is not None:
        found.append(_tasks(results))
    if results.dense is not None and results.dense.speed is not None:
        found.append(_speeds(results))
    if len(results.calibrations) > 1:
        found += [_sensitivity(results, name) for name in _texts(results)]
    return found


def _texts(results: CompareResults) -> list[str]:
    return [] if results.dense is None else list(results.dense.perplexity)


def _ordered(results: CompareResults) -> list[CutLine]:
    places = [(line.name, line.num_windows) for line in results.calibrations]
    return sorted(
        results.cuts,
        key=lambda cut: (
            places.index((cut.calibration, cut.num_windows)),
            cut.num_remove,
        ),
    )


def _head(cut: CutLine) -> tuple[str, ...]:
    layers = REFUSED if cut.refused else format_layers(cut.layers)
    return (f"{cut.calibration} ({cut.num_windows})", str(cut.num_remove), cut.selector, layers)


HEAD = ("calibration (windows)", "removed", "selector", "layers")


def _cells(results: CompareResults, cut: CutLine) -> dict[tuple[str, str], CellLine]:
    if cut.refused:
        return {}
    return {(cell.operator, cell.fit): cell for cell in results.cells_of(cut)}


def _perplexities(results: CompareResults, name: str) -> Iterator[Table]:
    assert results.dense is not None
    dense, pairs = results.dense.perplexity[name], columns(results)
    model = "" if results.run is None else f"{results.run.model['name']}, "
    what = (
        f"{dense['windows']} windows of {dense['window']} tokens, {dense['tokens']} tokens scored"
    )
    header = (*HEAD, *map(column_name, pairs))
    for key, title, form in (
        ("ratio", f"ratio to the dense model's {dense['perplexity']:.4f}", "{:.4f}"),
        ("perplexity", f"dense {dense['perplexity']:.4f}", "{:.2f}"),
    ):
        rows = []
        for cut in _ordered(results):
            cells = _cells(results, cut)
            rows.append((*_head(cut), *(_value(cells.get(p), name, key, form) for p in pairs)))
        yield Table(f"{model}perplexity on {name} ({what}), {title}.", header, tuple(rows))


def _value(cell: CellLine | None, name: str, key: str, form: str) -> str:
    if cell is None:
        return MISSING
    if cell.refused:
        return REFUSED
    value = cell.perplexity[name][key]
    if value is None:
        return "inf"
    return f"{value:.3g}" if value >= 1e5 else form.format(value)


def _tasks(results: CompareResults) -> Table:
    assert results.dense is not None and results.dense.tasks is not None
    tasks, pairs = results.dense.tasks, columns(results)
    average = tasks["average"]["acc_norm"]
    names = ", ".join(row["task"] for row in tasks["scores"])
    skipped = f"; not run: {', '.join(tasks['not_run'])}" if tasks["not_run"] else ""
    limit = f"first {tasks['limit']} items each" if tasks["limit"] else "all items"
    rows = []
    for cut in _ordered(results):
        cells = _cells(results, cut)
        rows.append((*_head(cut), *(_accuracy(cells.get(pair)) for pair in pairs)))
    title = (
        f"Average accuracy (acc_norm, or acc) over {names} ({limit}{skipped}), percent ± standard "
        f"error of the difference to the dense model's {100 * average['value']:.2f}."
    )
    return Table(title, (*HEAD, *map(column_name, pairs)), tuple(rows))


def _accuracy(cell: CellLine | None) -> str:
    if cell is None:
        return MISSING
    if cell.refused or cell.tasks is None:
        return REFUSED
    found = cell.tasks["average"]["acc_norm"]
    error = found["difference_stderr"]
    return f"{100 * found['value']:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def _speeds(results: CompareResults) -> Table:
    """Lay out how many times as fast as the dense model each cell is."""
    assert results.dense is not None and results.dense.speed is not None
    speed, pairs = results.dense.speed, columns(results)
    sizes = [(row["batch_size"], row["length"]) for row in speed["rows"]]
    rows = []
    for cut in _ordered(results):
        cells = _cells(results, cut)
        promised = MISSING
        if cut.layers:
            promised = f"{speed['num_layers'] / (speed['num_layers'] - len(cut.layers)):.2f}"
        for index, size in enumerate(sizes):
            head = (*_head(cut), "x".join(map(str, size)), promised)
            rows.append((*head, *(_speedup(cells.get(pair), index) for pair in pairs)))
    title = (
        "Speed: times as fast as the dense model, prefill / decode, medians of "
        f"{speed['repeats']} runs on {speed['device']}, {speed['threads']} threads, "
        f"{speed['dtype']}; promised: by the number of layers alone."
    )
    header = (*HEAD, "batch x prompt", "promised", *map(column_name, pairs))
    return Table(title, header, tuple(rows))


def _speedup(cell: CellLine | None, index: int) -> str:
    if cell is None or cell.refused or cell.speed is None:
        return MISSING if cell is None else REFUSED
    row = cell.speed["rows"][index]
    return f"{row['prefill']['speedup']:.2f} / {row['decode']['speedup']:.2f}"


def _sensitivity(results: CompareResults, name: str) -> Table:
    """Lay out how much the calibration matters: the mean over cuts, per text and window count."""
    pairs, rows = columns(results), []
    for line in results.calibrations:
        place = line.name, line.num_windows
        cuts = [cut for cut in results.cuts if (cut.calibration, cut.num_windows) == place]
        cuts = [cut for cut in cuts if not cut.merged]
        row = [line.name, str(line.num_windows), str(line.tokens)]
        for pair in pairs:
            own = [_cells(results, cut).get(pair) for cut in cuts]
            logs = [c.perplexity[name]["log_ratio"] for c in own if c and not c.refused]
            known = [value for value in logs if value is not None]
            mean = math.exp(math.fsum(known) / len(known)) if known else None
            few = f" ({len(known)} of {len(cuts)})" if known and len(known) < len(cuts) else ""
            row.append(MISSING if mean is None else f"{mean:.4f}{few}")
        rows.append(tuple(row))
    header = ("calibration", "windows", "tokens", *map(column_name, pairs))
    title = (
        f"Sensitivity to the calibration: ratio of perplexity on {name} to dense, geometric mean "
        "over the cuts (the cuts may differ with the calibration)."
    )
    return Table(title, header, tuple(rows))


def csv_rows(results: CompareResults) -> Iterator[dict[str, Any]]:
    """Yield a row for every cut, cell and text; the dense model first."""
    if results.dense is not None:
        for name, value in results.dense.perplexity.items() or [("", {})]:
            yield _row({"operator": "dense model"}, name, value, results.dense.tasks)
    for cut in _ordered(results):
        place = {key: getattr(cut, key) for key in CSV_COLUMNS[:4]}
        place["layers"] = format_layers(cut.layers) if cut.layers else ""
        if cut.refused:
            yield {**place, "refused": cut.refused}
            continue
        for cell in results.cells_of(cut):
            own = {key: getattr(cell, key) for key in ("operator", "fit", "parameters", "seconds")}
            own |= {"used": " ".join(cell.used), "refused": cell.refused or ""}
            for name, value in cell.perplexity.items() or [("", {})]:
                yield _row({**place, **own}, name, value, cell.tasks)


def _row(
    place: dict[str, Any], text: str, value: dict[str, Any], tasks: dict[str, Any] | None
) -> dict[str, Any]:
    row = {**place, "text": text, **{key: value.get(key, "") for key in CSV_COLUMNS[9:14]}}
    for metric in ("acc", "acc_norm"):
        average = (tasks or {}).get("average", {}).get(metric) or {}
        row |= {metric: average.get("value", ""), f"{metric}_stderr": average.get("stderr", "")}
        if metric == "acc_norm":
            row["acc_norm_retained"] = average.get("retained", "")
    return row


def write_tables(results: CompareResults, folder: Path) -> None:
    """Write `results.csv` and `results.md`; each appears when it is complete.

    Raises:
        CheckpointError: If they cannot be written.
    """
    try:
        _write_tables(results, folder)
    except OSError as error:
        raise cannot_be_written(folder, error) from error


def _write_tables(results: CompareResults, folder: Path) -> None:
    rows = io.StringIO(newline="")
    writer = csv.DictWriter(rows, CSV_COLUMNS, restval="")
    writer.writeheader()
    writer.writerows(csv_rows(results))
    write_whole(folder / CSV_FILE, rows.getvalue())
    text = "\n\n".join(table.markdown() for table in tables(results))
    write_whole(folder / MARKDOWN_FILE, f"{text}\n")


__all__: Sequence[str] = ["Table", "csv_rows", "tables", "write_tables"]
