"""How well repaired cuts predict text: operators and selectors against published Ghosted Layers.

    python benchmarks/recovery_quality.py MODEL --calibration c4.txt wiki.valid.raw \
        --texts c4.rest.txt wiki.test.raw --budgets 3 5 7 --out smollm2.jsonl
    python benchmarks/recovery_quality.py MODEL --calibration c4.txt --texts c4.rest.txt \
        wiki.test.raw --contiguous 1 3 5 7 --operators ghost-robust --out smollm2.jsonl

The first form scores every selector's cut of every budget with every operator. The second scores
every contiguous cut of these lengths with one operator against none. Each result is a JSON line in
`--out`, written at once; a run that is started again continues. At the end, or with `--table`,
the ratios are printed: geometric means over the texts (and calibrations), both sides from one run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import ghostlayers as gl
from ghostlayers.fit_ladder import fit_ladder
from ghostlayers.guard import first_changed_layer, judge_repairs
from ghostlayers.guard_text import guard_scorer
from ghostlayers.loading import load_model, load_tokenizer, locate
from ghostlayers.pipeline import allowed_layers
from ghostlayers.plan import Boundary, PruningPlan, format_layers
from ghostlayers.repairs import apply_repairs_
from ghostlayers.steps import (
    collect_moments,
    cut,
    find_massive_tokens,
    fit_sink_rules,
    measure_similarity,
    select_layers,
)
from ghostlayers.suffix import SuffixScorer
from ghostlayers.sweep import batches_of

SIMILARITY = ("lorp", "shortgpt", "streamline")
SELECTORS = (
    *SIMILARITY,
    *("shortened-ppl", "shortened-taylor", "shortened-magnitude", "greedy-ppl", "laco", "auto"),
)
OPERATORS = (
    *("none", "ghost", "ghost-robust", "fold", "fold+ghost"),
    *("linearpatch-diag", "linearpatch-rotate", "replaceme-lstsq", "replaceme-cosine"),
)
PUBLISHED = tuple(name for name in SELECTORS if name not in ("greedy-ppl", "auto"))


class Results:
    """JSON lines by key; what is there already is not computed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines() if line]

    def find(self, **key: Any) -> dict[str, Any] | None:
        """Return the line with these values."""
        same = (line for line in self.lines if all(line.get(k) == v for k, v in key.items()))
        return next(same, None)

    def add(self, **line: Any) -> dict[str, Any]:
        """Store a line at once."""
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:200], flush=True)
        return line


class Bench:
    """One model, its texts and its calibrations."""

    def __init__(self, args: argparse.Namespace) -> None:
        source = locate(args.model)
        self.args, self.name = args, Path(args.model).name
        self.tokenizer, self.model = load_tokenizer(source), load_model(source)
        self.results = Results(args.out)
        self.texts = {text: self.windows(text, args.eval_windows) for text in args.texts}

    def windows(self, text: str, count: int) -> gl.Windows:
        """Cut the first windows of a text file."""
        return gl.text_windows(self.tokenizer, text, num_windows=count, window=self.args.window)

    def key(self, calibration: str) -> dict[str, Any]:
        """Return what every line says about its run."""
        args = self.args
        return {
            "model": self.name,
            "calibration": Path(calibration).name,
            "num_windows": args.num_windows,
            "window": args.window,
            "eval_windows": args.eval_windows,
        }

    def perplexities(self, model: Any) -> dict[str, float]:
        """Score a model on every text."""
        batch = self.args.batch_size
        return {
            Path(text).name: gl.perplexity(model, windows, batch_size=batch).perplexity
            for text, windows in self.texts.items()
        }

    def grid(self, calibration: str) -> None:
        """Score every selector's cut of every budget with every operator."""
        args, key = self.args, self.key(calibration)
        windows = self.windows(calibration, args.num_windows)
        similarity = measure_similarity(self.model, batches_of(windows.ids, args.batch_size))
        for budget in args.budgets:
            for selector in args.selectors:
                chosen = self.results.find(kind="cut", budget=budget, selector=selector, **key)
                if chosen is None:
                    chosen = self.choose(selector, budget, windows, similarity, key)
                if chosen.get("merged") is None:  # merged layers are no plain cut
                    for operator in args.operators:
                        self.cell(chosen["layers"], operator, windows, key)

    def choose(
        self,
        selector: str,
        budget: int,
        windows: gl.Windows,
        similarity: gl.Similarity,
        key: dict[str, Any],
    ) -> dict[str, Any]:
        """Store which layers a selector removes; score merged layers at once."""
        start, merged = time.perf_counter(), None
        if selector in SIMILARITY:
            allowed = allowed_layers(gl.PruneConfig(num_remove=1), self.model.config)
            plan = select_layers(similarity, selector=selector, num_remove=budget, allowed=allowed)
            search = None
        else:
            found = gl.prune(
                self.model,
                num_remove=budget,
                select=selector,
                recover="ghost-robust" if selector == "auto" else "none",
                windows=windows,
                batch_size=self.args.batch_size,
            )
            plan, search = found.plan, found.record["search"]
            merged = self.perplexities(found.model) if found.changed and not found.fits else None
        return self.results.add(
            kind="cut",
            budget=budget,
            selector=selector,
            **key,
            layers=list(plan.removed),
            seconds=round(time.perf_counter() - start, 1),
            search=search,
            merged=merged,
        )

    def cell(
        self, layers: list[int], operator: str, windows: gl.Windows, key: dict[str, Any]
    ) -> None:
        """Score one cut with one operator."""
        args = self.args
        for fit in args.fits if operator != "none" else ["dense"]:
            name = {"kind": "cell", "layers": layers, "operator": operator, "fit": fit, **key}
            if self.results.find(**name) is not None:
                continue
            start, text = time.perf_counter(), ",".join(map(str, layers))
            try:
                result = gl.prune(
                    self.model,
                    layers=text,
                    recover=operator,
                    fit=fit,
                    windows=windows,
                    batch_size=args.batch_size,
                )
            except gl.UnsupportedModelError as error:
                self.results.add(**name, refused=str(error))
                continue
            self.results.add(
                **name,
                used=[entry["operator"] for entry in result.record["boundaries"]],
                seconds=round(time.perf_counter() - start, 1),
                perplexity=self.perplexities(result.model),
                guard=result.record["guard"],
                refinement=result.record["refinement"],
                errors_of=[entry.get("errors_of") for entry in result.record["boundaries"]],
            )

    def contiguous(self, calibration: str, operator: str) -> None:
        """Score every contiguous cut of some lengths; the moments of all come from one sweep."""
        args, key = self.args, self.key(calibration)
        depth = self.model.config.get_text_config().num_hidden_layers
        boundaries = [
            Boundary(start, start + length)
            for length in args.contiguous
            for start in range(1, depth - length)
        ]
        wanted = [
            boundary
            for boundary in boundaries
            if not self.results.find(
                kind="contiguous",
                start=boundary.start,
                stop=boundary.stop,
                operator=operator,
                **key,
            )
        ]
        if not wanted:
            return
        ids = self.windows(calibration, args.num_windows).ids
        batches = batches_of(ids, args.batch_size)
        massive = find_massive_tokens(self.model, batches)
        moments = collect_moments(self.model, batches, wanted, massive=massive)
        rules = fit_sink_rules(self.model, batches, moments, massive)
        guard = guard_scorer(self.model, ids, batch_size=args.batch_size)
        joined = torch.cat([windows.ids for windows in self.texts.values()])
        scorer = SuffixScorer(self.model, joined, batch_size=args.batch_size, progress=False)
        for boundary in wanted:
            plan = PruningPlan(depth, tuple(range(boundary.start, boundary.stop)))
            pruned = cut(self.model, plan)
            ladder = fit_ladder(
                moments.pop(boundary),
                operator=operator,
                dtype=self.model.dtype,
                sinks=rules.get(boundary),
            )
            ladders = {boundary: ladder}
            verdict = judge_repairs(self.model, pruned, plan, ladders, ids, scorer=guard)
            none = repaired = None
            if verdict.chosen:  # else the model is the pruned one: nothing to compare
                suffix = scorer.suffix(pruned, plan, first_changed_layer(plan, ladders))
                none = self._by_text(scorer.losses(suffix))
                apply_repairs_(suffix.model, suffix.plan, verdict.chosen)
                repaired = self._by_text(scorer.losses(suffix))
            self.results.add(
                kind="contiguous",
                start=boundary.start,
                stop=boundary.stop,
                operator=operator,
                **key,
                used=bool(verdict.chosen),
                ridge=[fit.diagnostics["ridge"] for fit in verdict.chosen.values()],
                written=verdict.record.get("written_text"),
                share=verdict.record.get("recovered_share"),
                gain=verdict.record.get("gain"),
                gain_error=verdict.record.get("gain_standard_error"),
                none=none,
                repaired=repaired,
            )
            scorer.states.clear()
            guard.forget()

    def _by_text(self, losses: list[float]) -> dict[str, float]:
        parts = iter(losses)
        return {
            Path(text).name: math.exp(min(700.0, _mean([next(parts) for _ in windows.ids])))
            for text, windows in self.texts.items()
        }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _ratio(line: dict[str, Any], base: dict[str, Any]) -> float:
    """Return the geometric mean over the texts of the ratio of perplexities."""
    found = line["perplexity"]
    return math.exp(_mean(math.log(found[t] / base["perplexity"][t]) for t in found))


def print_grid(lines: list[dict[str, Any]]) -> None:
    """Print the ratio to `ghost` on the same cut, and of `auto` to the best published selector."""
    cells = {
        (
            line["model"],
            line["calibration"],
            tuple(line["layers"]),
            line["operator"],
            line["fit"],
        ): line
        for line in lines
        if line["kind"] == "cell" and "perplexity" in line
    }
    table: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    against: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for line in (line for line in lines if line["kind"] == "cut"):
        run, cut_of = (line["model"], line["calibration"]), tuple(line["layers"])
        base = cells.get((*run, cut_of, "ghost", "dense"))
        rivals = [
            cells[(*run, tuple(other["layers"]), "ghost", "dense")]
            for other in lines
            if other["kind"] == "cut"
            and (other["model"], other["calibration"]) == run
            and other["budget"] == line["budget"]
            and other["selector"] in PUBLISHED
            and (*run, tuple(other["layers"]), "ghost", "dense") in cells
        ]
        for operator in OPERATORS:
            for fit in ("dense", "sequential"):
                found = cells.get((*run, cut_of, operator, fit))
                if found is None or base is None:
                    continue
                row = (line["model"], line["budget"], f"{operator} ({fit})")
                table[(*row, line["selector"])].append(_ratio(found, base))
                if line["selector"] == "auto" and rivals:
                    best = min(
                        rivals, key=lambda cell: _mean(map(math.log, cell["perplexity"].values()))
                    )
                    against[row].append(_ratio(found, best))
    print(
        "\n| model | layers removed | operator | selector | ratio to ghost on the same cut | runs |"
    )
    print("|---|---|---|---|---|---|")
    for (model, budget, operator, selector), ratios in sorted(table.items()):
        mean = math.exp(_mean(map(math.log, ratios)))
        print(f"| {model} | {budget} | {operator} | {selector} | {mean:.3f} | {len(ratios)} |")
    print(
        "\n| model | layers removed | operator on the cut of auto | to best selector with ghost |"
    )
    print("|---|---|---|---|")
    for (model, budget, operator), ratios in sorted(against.items()):
        print(f"| {model} | {budget} | {operator} | {math.exp(_mean(map(math.log, ratios))):.3f} |")


def print_perplexities(lines: list[dict[str, Any]]) -> None:
    """Print perplexity of every selector's cut with every operator, one table a calibration."""
    cells = {
        (line["model"], line["calibration"], tuple(line["layers"]), line["operator"]): line
        for line in lines
        if line["kind"] == "cell" and line["fit"] == "dense"
    }
    runs = sorted({(line["model"], line["calibration"]) for line in lines if line["kind"] == "cut"})
    for run in runs:
        cuts = [line for line in lines if line["kind"] == "cut"]
        cuts = [line for line in cuts if (line["model"], line["calibration"]) == run]
        first, texts = cuts[0], next(c["perplexity"] for c in cells.values() if "perplexity" in c)
        print(
            f"\n{run[0]}, calibration {run[1]} ({first['num_windows']} windows of "
            f"{first['window']}), perplexity on {' / '.join(texts)} ({first['eval_windows']} "
            "windows each)\n"
        )
        print(f"| layers | selector | removed | {' | '.join(OPERATORS)} |")
        print("|---" * (3 + len(OPERATORS)) + "|")
        for line in cuts:
            row = [str(line["budget"]), line["selector"], format_layers(line["layers"])]
            for operator in OPERATORS:
                cell = cells.get((*run, tuple(line["layers"]), operator), {})
                found = cell.get("perplexity")
                if line.get("merged"):
                    found = line["merged"] if operator == "none" else None
                numbers = [f"{value:.4g}" for value in (found or {}).values()]
                row.append(" / ".join(numbers) or ("refused" if "refused" in cell else "-"))
            print(f"| {' | '.join(row)} |")


def print_contiguous(lines: list[dict[str, Any]]) -> None:
    """Print, for each model, calibration and text, what the operator does to contiguous cuts."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in (line for line in lines if line["kind"] == "contiguous"):
        groups[line["model"], line["calibration"]].append(line)
    if groups:
        print("\n| model | calibration | text | cuts | repaired | worst ratio to none | above 1 |")
        print("|---|---|---|---|---|---|---|")
    for (model, calibration), rows in sorted(groups.items()):
        used = [row for row in rows if row["used"]]
        for text in used[0]["none"] if used else ():
            ratios = [
                (row["repaired"][text] / row["none"][text], f"{row['start']}-{row['stop'] - 1}")
                for row in used
            ]
            worst, above = max(ratios), [place for ratio, place in ratios if ratio > 1]
            print(
                f"| {model} | {calibration} | {text} | {len(rows)} | {len(used)} | "
                f"{worst[0]:.3f} ({worst[1]}) | {', '.join(above) or 'none'} |"
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; continued if there")
    parser.add_argument("--calibration", nargs="+", default=[], help="local text files")
    parser.add_argument("--texts", nargs="+", default=[], help="local text files to score")
    parser.add_argument("--budgets", nargs="*", type=int, default=[])
    parser.add_argument("--selectors", nargs="+", default=list(SELECTORS), choices=SELECTORS)
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    parser.add_argument("--fits", nargs="+", default=["dense"], choices=("dense", "sequential"))
    parser.add_argument("--contiguous", nargs="*", type=int, default=[], help="lengths of cuts")
    parser.add_argument("--num-windows", type=int, default=32, help="calibration windows")
    parser.add_argument("--eval-windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    args = parser.parse_args()
    if not args.table:
        bench = Bench(args)
        for calibration in args.calibration:
            if args.budgets:
                bench.grid(calibration)
            if args.contiguous:
                for operator in args.operators:
                    bench.contiguous(calibration, operator)
    lines = Results(args.out).lines
    if any(line["kind"] == "cell" for line in lines):
        print_perplexities(lines)
        print_grid(lines)
    print_contiguous(lines)


if __name__ == "__main__":
    main()
