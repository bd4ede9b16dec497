"""CPU time of `ghostlayers compare` against its cells run one by one with `prune` and `eval`.

    python benchmarks/compare_cost.py MODEL --calibration c4.txt --text wiki.test.txt

Both sides run in fresh processes, like a user's. One by one is, for each budget, selector and
operator, `ghostlayers prune` and `ghostlayers eval` of the dense model and the pruned checkpoint.
With `--sample N` only every N-th cell is run one by one, and the sum is scaled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path


def cpu_seconds(*arguments: str) -> float:
    """Run the command line in a process of its own and return its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "ghostlayers.cli", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure both sides and print the ratio."""
    parser = argparse.ArgumentParser(description="CPU time of compare against prune + eval")
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--budgets", default="3,5,7")
    parser.add_argument("--selectors", default="lorp,streamline")
    parser.add_argument("--operators", default="none,linearpatch-rotate,replaceme-lstsq,ghost")
    parser.add_argument("--num-windows", default="4")
    parser.add_argument("--window", default="256")
    parser.add_argument("--eval-windows", default="2")
    parser.add_argument("--sample", type=int, default=1)
    args = parser.parse_args()
    measure = ["--calibration", args.calibration, "--num-windows", args.num_windows]
    measure += ["--window", args.window]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        grid = ["--num-remove", args.budgets, "--select", args.selectors]
        grid += ["--recover", args.operators, "--perplexity", args.text]
        grid += ["--eval-window", args.window, "--eval-windows", args.eval_windows]
        own = cpu_seconds("compare", args.model, *grid, *measure, "-o", str(place / "grid"))
        lists = (args.budgets, args.selectors, args.operators)
        cells = list(itertools.product(*(each.split(",") for each in lists)))
        spent = []
        for budget, selector, operator in cells[:: args.sample]:
            out = str(place / "cell")
            cut = ["--num-remove", budget, "--select", selector, "--recover", operator]
            seconds = cpu_seconds("prune", args.model, *cut, *measure, "-o", out, "--force")
            score = ["--perplexity", args.text, "--window", args.window]
            score += ["--num-windows", args.eval_windows]
            spent.append(seconds + cpu_seconds("eval", args.model, out, *score))
    alone = sum(spent) / len(spent) * len(cells)
    found = {
        "cells": len(cells),
        "run_one_by_one": len(spent),
        "compare_cpu_s": round(own, 1),
        "one_by_one_cpu_s": round(alone, 1),
        "ratio": round(alone / own, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
