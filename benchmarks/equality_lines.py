"""Lines of equality figures: benchmarks write them, `results_page.py` makes tables of them.

Each line is a JSON object: `kind` ("memory", "processes" or "engine"), the values of its table
below, and `origin`, which says what was run. Of lines about the same thing the last one counts.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ghostlayers.compare_provenance import commit, machine
from ghostlayers.records import plain, versions

Line = dict[str, Any]


def short(argument: str) -> str:
    """Return an argument without the folders of this machine."""
    return re.sub(r"(^|[,=])/(?:[^,]*/)?", r"\1", argument)


def origin(threads: int | None = None) -> Line:
    """Say what runs.

    Args:
        threads: Of the processes that are measured; None: as many as this one has.

    Returns:
        JSON values: command, commit, created (ISO 8601, UTC), versions, machine.
    """
    found = machine()
    arguments = [f"benchmarks/{Path(sys.argv[0]).name}", *map(short, sys.argv[1:])]
    return {
        "command": shlex.join(["python", *arguments]),
        "commit": commit(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": found if threads is None else {**found, "threads": threads},
    }


def append(out: Path | None, line: Line) -> None:
    """Print a line and add it to a file, if there is one."""
    text = json.dumps(plain(line))
    print(text, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def read(path: Path) -> list[Line]:
    """Read a file of lines."""
    lines: list[Line] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            TABLES[line["kind"]].row(line)
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{path}, line {number} holds no equality figures: {error!r}"
            ) from error
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Table:
    """How lines of a kind are shown.

    Attributes:
        title: Heading.
        text: What the columns mean.
        header: Column names.
        keys: How many columns, from the left, say what a row is about.
        row: Makes the cells of a line.
    """

    title: str
    text: str
    header: Sequence[str]
    keys: int
    row: Callable[[Line], list[str]]

    def markdown(self, lines: Sequence[Line]) -> str:
        """Write the table and what was run for it."""
        rows = {tuple((cells := self.row(line))[: self.keys]): (cells, line) for line in lines}
        parts = [f"### {self.title}", "", self.text, ""]
        parts += [f"| {' | '.join(self.header)} |", "|" + " --- |" * len(self.header)]
        parts += [f"| {' | '.join(rows[key][0])} |" for key in sorted(rows)]
        runs = dict.fromkeys(_run(line["origin"]) for _, line in rows.values())
        return "\n".join([*parts, "", *runs])


def _run(origin: Line) -> str:
    found = origin["versions"]
    releases = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers"))
    device = origin["machine"]["gpu"] or origin["machine"]["cpu"]
    return (
        f"- `{origin['command']}`: commit {origin['commit'] or 'not known'}; {origin['created']}; "
        f"{releases}; {device}, threads a process: {origin['machine']['threads']}"
    )


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _said(value: bool) -> str:
    return "yes" if value else "NO"


def _memory_row(line: Line) -> list[str]:
    one, two = line["in_memory"], line["offloaded"]
    gigabytes = line["checkpoint_bytes"] / 1e9
    return [
        f"random Llama, {line['layers']} layers, {gigabytes:.2f} GB, {line['recover']}",
        f"{one['VmHWM'] / 1e9:.2f} GB",
        f"{two['VmHWM'] / 1e9:.2f} GB",
        f"{100 * two['VmHWM'] / line['checkpoint_bytes']:.1f} %",
        f"{two['wall'] / one['wall']:.2f}",
        f"{two['cpu'] / one['cpu']:.2f}",
        _said(line["layers_equal"]),
        str(line["tensors"]),
        _difference(line["largest_difference"]),
    ]


def _processes_row(line: Line) -> list[str]:
    return [
        line["model"],
        line["launcher"],
        str(line["processes"]),
        line["windows"],
        _said(line["layers_equal"]),
        *(_difference(line["differences"][name]) for name in QUANTITIES),
    ]


def _engine_row(line: Line) -> list[str]:
    return [
        line["engine"],
        line["release"],
        line["checkpoint"],
        f"{line['equal']} of {line['prompts']}",
        str(line["new_tokens"]),
    ]


QUANTITIES = ("similarities", "moments", "operators", "perplexity")
TABLES = {
    "memory": Table(
        "Larger than memory",
        "`prune` (select, fit, write) offloaded to disk against the whole model in memory. Peaks "
        "are resident sets (VmHWM); share: of the checkpoint (bound 35 %); wall (bound 2) and CPU "
        "time: offloaded over in memory; difference: the largest of all tensors that were written "
        "(bound 1e-5).",
        (
            *("model", "peak in memory", "peak offloaded", "share", "wall time", "CPU time"),
            *("layers equal", "tensors", "difference"),
        ),
        1,
        _memory_row,
    ),
    "processes": Table(
        "Many processes",
        "Several processes that share the windows against one: the largest relative difference "
        "of any number (bound 1e-10; 0: the same bits). Similarities of all states, float64 "
        "moments at the cuts, the operators that `prune` fits, perplexity of the pruned model. "
        "Windows: calibration + scored.",
        ("model", "launcher", "processes", "windows", "layers equal", *QUANTITIES),
        4,
        _processes_row,
    ),
    "engine": Table(
        "Engines",
        "Prompts after which an engine's greedy text is that of transformers in this package's "
        "environment, float32 on the CPU, to the last character.",
        ("engine", "release", "checkpoint", "equal prompts", "new tokens"),
        3,
        _engine_row,
    ),
}


def section(lines: Sequence[Line]) -> str:
    """Write the part of the page about equality."""
    parts = ["## Equality"]
    for kind, table in TABLES.items():
        own = [line for line in lines if line["kind"] == kind]
        parts += [table.markdown(own)] if own else []
    return "\n\n".join(parts)
