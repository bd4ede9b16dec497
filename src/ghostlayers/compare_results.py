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

from . import distributed
from .compare_lines import (
    KINDS,
    CalibrationLine,
    CellLine,
    CutLine,
    DenseLine,
    Line,
    RunLine,
)
from .compare_lock import RESULTS_FILE, cannot_be_written
from .errors import CheckpointError
from .records import plain

SCHEMA = 1


@dataclass
class CompareResults:
    """All lines of a file by kind, in the order in which they were written."""

    runs: list[RunLine] = field(default_factory=list)
    calibrations: list[CalibrationLine] = field(default_factory=list)
    dense: DenseLine | None = None
    cuts: list[CutLine] = field(default_factory=list)
    cells: list[CellLine] = field(default_factory=list)

    @property
    def run(self) -> RunLine | None:
        """What the grid is: the last run line, since a grid only ever grows."""
        return self.runs[-1] if self.runs else None

    def add(self, line: Line) -> None:
        """Take in a line."""
        if isinstance(line, RunLine):
            self.runs.append(line)
        elif isinstance(line, DenseLine):
            self.dense = line
        elif isinstance(line, CalibrationLine):
            self.calibrations.append(line)
        elif isinstance(line, CutLine):
            self.cuts.append(line)
        else:
            self.cells.append(line)

    @property
    def measured(self) -> list[CellLine]:
        """The cells that were not refused."""
        return [cell for cell in self.cells if not cell.refused]

    @property
    def refusals(self) -> list[str]:
        """Why cells, or cuts with all their cells, were refused."""
        found = [*(cut.refused for cut in self.cuts), *(cell.refused for cell in self.cells)]
        return [reason for reason in found if reason]

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
        self.pending: RunLine | None = None
        self.held = False
        with distributed.section():
            if self.path.exists() and distributed.is_main():
                if not self.path.is_file():
                    raise CheckpointError(f"{str(self.path)!r} is no file. Use another folder.")
                lines = _whole_lines(self.path)
                self.results = _parse(self.path, lines)
                whole = sum(len(line) + 1 for line in lines)
                if whole < self.path.stat().st_size:
                    os.truncate(self.path, whole)
        self.results = distributed.same(self.results)

    def start(self, line: RunLine) -> None:
        """Take in what the run is; it is stored with the first line of its results."""
        self.pending = line
        self.results.add(line)

    def add(self, line: Line) -> None:
        """Store a line: it is on the disk when this returns.

        Of several processes the first one writes; a line that is `held` waits for the others'.

        Raises:
            CheckpointError: If it cannot be written.
        """
        if not self.held and distributed.is_main():
            self._write([line] if self.pending is None else [self.pending, line])
            self.pending = None
        self.results.add(line)

    def _write(self, lines: Sequence[Line]) -> None:
        text = "".join(f"{to_json(each)}\n" for each in lines)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_be_written(self.path.parent, error) from error


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
