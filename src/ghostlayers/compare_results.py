"""The file of a comparison, `DIR/results.jsonl`: one JSON value a line, written as it is known.

Every line has `kind` and `schema`. A line is written in one piece and flushed to the disk; a last
line that was cut off (the process was killed) is dropped when the file is read. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from .errors import CheckpointError
from .records import plain

SCHEMA = 1
RESULTS_FILE = "results.jsonl"


@dataclass(frozen=True)
class RunLine:
    """What is compared; the first line.

    Attributes:
        model: `name`, `architecture`, `num_layers`, `hidden_size`, `parameters`, `dtype`, and
            `fingerprint` (`config_sha256`, `weights_sha256`).
        versions: Of Python and the packages that numbers depend on.
        created: When the run began, ISO 8601, UTC.
        settings: Every setting of the comparison.
        machine: `cpu`, `gpu` (None without), `threads`.
        title: What a configuration file says that it reproduces; None without.
        expected: Numbers that a configuration file expects, with their source; None without.
        commit: Commit of the source tree that ran, if it is one.
        command: Arguments of the command line.
    """

    kind: ClassVar[str] = "run"
    model: dict[str, Any]
    versions: dict[str, str]
    created: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    title: str | None = None
    expected: Any = None
    commit: str | None = None
    command: list[str] | None = None


@dataclass(frozen=True)
class CalibrationLine:
    """One calibration text at one number of windows, and the first sweep over it.

    Attributes:
        name: Short name of the text; cuts and cells refer to it.
        num_windows: Windows asked for; cuts and cells refer to it.
        hash: SHA-256 of the token ids.
        window: Tokens a window.
        tokens: Tokens in all windows.
        calibration: The record of the windows, as in a checkpoint.
        similarity: (L+1) rows of L+1 mean cosine similarities of the hidden states.
        rls: Representation Locality Score.
        locality: `localized`, `intermediate` or `distributed`.
        num_clusters: Clusters that `lorp` uses.
        clusters: Cluster of each of the L layers, in the order of depth.
        block_influence: 1 − S[i, i+1] of each of the L layers.
        seconds: Wall time of the sweep.
    """

    kind: ClassVar[str] = "calibration"
    name: str
    num_windows: int
    hash: str
    window: int
    tokens: int
    calibration: dict[str, Any]
    similarity: list[list[float]]
    rls: float
    locality: str
    num_clusters: int
    clusters: list[int]
    block_influence: list[float]
    seconds: float = 0.0


@dataclass(frozen=True)
class DenseLine:
    """The dense model's quality and speed.

    Attributes:
        perplexity: By short name of the text: `perplexity`, `standard_error` (that of the mean loss
            over the windows times the perplexity; None for one window), `loss`, `window_losses`,
            and the record of the windows: `source`, `windows`, `window`, `tokens`, `ids_sha256`.
        tasks: JSON values of `TaskResults`; None if not asked for.
        speed: JSON values of `SpeedResult`; None if not asked for.
        task_items: By task: `items` and `values`, with which cells are compared item by item.
        seconds: Wall time.
    """

    kind: ClassVar[str] = "dense"
    perplexity: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None
    task_items: dict[str, Any] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class CutLine:
    """What one selector removes.

    Attributes:
        calibration: Short name of the text.
        num_windows: Windows asked for.
        selector: Name of the selector, or `layers`.
        num_remove: Budget.
        layers: Removed layers, ascending; empty if refused.
        clusters: Clusters of `lorp`, each a list of layers, by first layer; None for another.
        merged: Whether kept layers have new weights (`laco`): its cells carry the selector's name.
        selection: What the selector or its search measured, JSON values; None if nothing.
        seconds: Wall time.
        refused: Why there is no cut; None if there is one.
    """

    kind: ClassVar[str] = "cut"
    calibration: str
    num_windows: int
    selector: str
    num_remove: int
    layers: list[int] = field(default_factory=list)
    clusters: list[list[int]] | None = None
    merged: bool = False
    selection: dict[str, Any] | None = None
    seconds: float = 0.0
    refused: str | None = None


@dataclass(frozen=True)
class CellLine:
    """One cut with one operator.

    Attributes:
        calibration: Short name of the text.
        num_windows: Windows asked for.
        layers: Removed layers, ascending.
        operator: What was asked for, such as `ghost`.
        fit: `dense` or `sequential`.
        selector: The selector whose merged weights these are; None for a plain cut.
        used: Operator at each boundary after the guard; `none` where there is none.
        boundaries: What a checkpoint's record says of each boundary: errors before and after, ...
        guard: What a checkpoint's record says of the guard; None without.
        perplexity: As in `DenseLine`, and `ratio` to the dense model, `log_ratio` and its
            `log_ratio_standard_error` over pairs of windows.
        tasks: As in `DenseLine`, compared with the dense model item by item.
        speed: As in `DenseLine`, with `promised_speedup` and `speedup`.
        parameters: Parameters of the model.
        warnings: One line each.
        seconds: Wall time.
        refused: Why there is no result; None if there is one.
    """

    kind: ClassVar[str] = "cell"
    calibration: str
    num_windows: int
    layers: list[int]
    operator: str
    fit: str = "dense"
    selector: str | None = None
    used: list[str] = field(default_factory=list)
    boundaries: list[dict[str, Any]] = field(default_factory=list)
    guard: dict[str, Any] | None = None
    perplexity: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None
    parameters: int | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    refused: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells a cell from all others."""
        place = self.calibration, self.num_windows, tuple(self.layers)
        return (*place, self.operator, self.fit, self.selector)


Line = RunLine | CalibrationLine | DenseLine | CutLine | CellLine
KINDS: dict[str, type[Any]] = {
    line.kind: line for line in (RunLine, CalibrationLine, DenseLine, CutLine, CellLine)
}


@dataclass
class CompareResults:
    """All lines of a file by kind, in the order in which they were written."""

    run: RunLine | None = None
    calibrations: list[CalibrationLine] = field(default_factory=list)
    dense: DenseLine | None = None
    cuts: list[CutLine] = field(default_factory=list)
    cells: list[CellLine] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Take in a line."""
        if isinstance(line, RunLine):
            self.run = line
        elif isinstance(line, DenseLine):
            self.dense = line
        elif isinstance(line, CalibrationLine):
            self.calibrations.append(line)
        elif isinstance(line, CutLine):
            self.cuts.append(line)
        else:
            self.cells.append(line)

    def cells_of(self, cut: CutLine) -> list[CellLine]:
        """Return the cells of a cut; several cuts may share them."""
        place = cut.calibration, cut.num_windows, cut.layers, cut.selector if cut.merged else None
        return [
            cell
            for cell in self.cells
            if (cell.calibration, cell.num_windows, cell.layers, cell.selector) == place
        ]


def to_json(line: Line) -> str:
    """Return a line's text, without the line break; numbers that are not finite become null."""
    values = {item.name: getattr(line, item.name) for item in fields(line)}
    value = plain({"kind": line.kind, "schema": SCHEMA, **values})
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Line:
    """Read a line; keys that this release does not know are left out.

    Raises:
        ValueError: If it is no line of a comparison, or of another schema.
    """
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        raise ValueError("it is no line of a comparison")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"it has schema {value.get('schema')!r}, this release reads {SCHEMA}")
    kind = KINDS[value["kind"]]
    known = {item.name for item in fields(kind)}
    try:
        line: Line = kind(**{key: item for key, item in value.items() if key in known})
    except TypeError as error:
        raise ValueError(f"a key is missing ({error})") from error
    return line


def results_path(place: str | Path) -> Path:
    """Return the file of a comparison: `place` itself, or `results.jsonl` in it."""
    path = Path(place).expanduser()
    return path / RESULTS_FILE if path.is_dir() else path


def read_results(place: str | Path) -> CompareResults:
    """Read a comparison, finished or not.

    Args:
        place: Its folder, or the file.

    Raises:
        CheckpointError: If there is none, or a line other than a torn last one is damaged.
    """
    path = results_path(place)
    if not path.is_file():
        raise CheckpointError(
            f"{str(place)!r} has no {RESULTS_FILE}: it was not written by `ghostlayers compare`."
        )
    return _parse(path, _whole_lines(path))


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines that end in a line break: a write that was cut off has none."""
    return path.read_bytes().split(b"\n")[:-1]


def _parse(path: Path, lines: Sequence[bytes]) -> CompareResults:
    results = CompareResults()
    for number, line in enumerate(lines, start=1):
        try:
            results.add(from_json(line.decode("utf-8")))
        except ValueError as error:  # not UTF-8, not JSON, no such line
            raise CheckpointError(f"{path}, line {number}: {error}. Use another folder.") from error
    return results


class ResultsFile:
    """The file of a comparison that runs: what is there already, and a place for more.

    Args:
        folder: The folder; made if it does not exist.

    Raises:
        CheckpointError: If a line other than a torn last one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS_FILE
        self.results = CompareResults()
        if self.path.exists():
            lines = _whole_lines(self.path)
            self.results = _parse(self.path, lines)
            whole = sum(len(line) + 1 for line in lines)
            if whole < self.path.stat().st_size:
                os.truncate(self.path, whole)

    def add(self, line: Line) -> None:
        """Store a line: it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write((to_json(line) + "\n").encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        self.results.add(line)


__all__ = [
    "RESULTS_FILE",
    "SCHEMA",
    "CalibrationLine",
    "CellLine",
    "CompareResults",
    "CutLine",
    "DenseLine",
    "ResultsFile",
    "RunLine",
    "read_results",
    "results_path",
]
