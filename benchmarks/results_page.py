"""Write docs/results.md from the files of comparisons.

    python benchmarks/results_page.py DIR... --equality FILE... --out docs/results.md

DIR is a folder of `ghostlayers compare`, FILE what `equality.py` and `memory.py` wrote. Every table
names its model, data, windows, tokens, commit and command; nothing is typed in by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import equality_lines
from equality_lines import short

from ghostlayers.compare_results import CompareResults, read_results
from ghostlayers.compare_tables import tables

HEAD = """# Results

Written by `python benchmarks/results_page.py` from the files of `ghostlayers compare`, and of the
benchmarks `equality.py` and `memory.py`; do not edit.
What the columns mean: [methods](methods.md). A ratio is the perplexity of the pruned model over
that of the dense model on the same windows; `-`: not measured (no operator is fitted to merged
weights).
"""


def section(results: CompareResults) -> str:
    """Write what one comparison says."""
    run, dense = results.run, results.dense
    if run is None or dense is None:
        raise SystemExit("a comparison is not finished: run it again to continue it")
    model, machine = run.model, run.machine
    command = " ".join(map(short, run.command or ["(not stored)"]))
    lines = [
        f"## {run.title or model['name']}",
        "",
        f"- model: {model['name']} ({model['architecture']}, {model['num_layers']} layers, "
        f"{model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}; weights sha256 "
        f"{model['fingerprint']['weights_sha256'][:12]})",
        f"- command: `ghostlayers {command}`",
        *(
            f"- commit: {each.commit or 'not known'}; {each.created}; {_versions(each.versions)}"
            for each in results.runs
        ),
        f"- machine: {machine['gpu'] or machine['cpu']}, threads: {machine['threads']}",
    ]
    for line in results.calibrations:
        lines.append(
            f"- calibration: {line.name}, {line.calibration['windows']} windows of {line.window} "
            f"tokens ({line.tokens} tokens, ids sha256 {line.hash[:12]}), RLS {line.rls:.4f}"
        )
    for name, value in dense.perplexity.items():
        lines.append(
            f"- scored: {name}, {value['windows']} windows of {value['window']} tokens "
            f"({value['tokens']} tokens, ids sha256 {value['ids_sha256'][:12]})"
        )
    if run.expected is not None:
        lines += ["- expected: see the configuration file"]
    parts = ["\n".join(lines), *(table.markdown() for table in tables(results))]
    refused = sorted(
        {f"- {cell.operator}: {cell.refused}" for cell in results.cells if cell.refused}
    )
    refused += [f"- {cut.selector}: {cut.refused}" for cut in results.cuts if cut.refused]
    if refused:
        parts.append("Refused:\n\n" + "\n".join(refused))
    return "\n\n".join(parts)


def _versions(found: dict[str, Any]) -> str:
    names = ("ghostlayers", "torch", "transformers")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="docs/results.md from files of comparisons")
    parser.add_argument("places", nargs="*", metavar="DIR", help="folders of comparisons")
    parser.add_argument(
        "--equality", nargs="+", type=Path, default=[], metavar="FILE", help="equality figures"
    )
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    args = parser.parse_args()
    parts = [HEAD.strip(), *(section(read_results(each)) for each in args.places)]
    lines = [line for path in args.equality for line in equality_lines.read(path)]
    parts += [equality_lines.section(lines)] if lines else []
    text = "\n\n".join(parts)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
