"""The cells of a comparison on several processes: each measures whole cuts, alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from . import distributed

if TYPE_CHECKING:
    from .compare_cells import Job
    from .compare_results import CellLine, ResultsFile

# Cuts that each process measures before the first one stores the lines of all.
CUTS_AT_ONCE = 4


def share_cells(
    file: ResultsFile, jobs: Sequence[Job], measure: Callable[[Sequence[Job]], None]
) -> None:
    """Measure cells; with several processes each takes cuts in turn, and all get all lines.

    Args:
        file: Where lines go; only the first process writes it.
        jobs: The cells, those of a cut together.
        measure: Measures cells and adds a line for each to `file`.
    """
    count = distributed.size()
    if count == 1:
        measure(jobs)
        return
    cuts = [list(group) for _, group in groupby(jobs, key=lambda job: id(job.cut))]
    for first in range(0, len(cuts), CUTS_AT_ONCE * count):
        part = cuts[first : first + CUTS_AT_ONCE * count]
        before = len(file.results.cells)

        def lines_of(own: Sequence[Job], start: int = before) -> list[CellLine]:
            file.held = True
            try:
                measure(own)
            finally:
                file.held = False
            return file.results.cells[start:]

        dealt = [[job for group in part[i::count] for job in group] for i in range(count)]
        found = distributed.spread(lines_of, dealt)
        del file.results.cells[before:]
        lines = {line.key: line for part_lines in found for line in part_lines}
        for job in (job for group in part for job in group):
            file.add(lines[job.key])


__all__ = ["share_cells"]
