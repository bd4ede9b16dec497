"""Judge every causal-LM class of the installed transformers by the three oracles.

    python tests/architectures.py --write      # writes docs/architectures.md

A class is `ok` when every oracle passes for every removal set that is not refused, without and
with an operator; a refusal carries the tool's own message. Nothing is skipped: a class on which an
oracle cannot run must be refused by the tool.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

import ghostlayers as gl
from families import MODEL_TYPES, UNBUILDABLE, tiny_model
from oracles import identity_reference, logits, random_ids, reload, step_error

REMOVALS = {
    "first": (0,),
    "last": (7,),
    "middle": (3, 4),
    "scattered": (1, 4, 6),
    "all but two": (1, 2, 3, 5, 6, 7),
}
TABLE = Path(__file__).parents[1] / "docs" / "architectures.md"
TOLERANCE = 2e-4  # qwen3_next reaches 1.2e-4 between stepping and one forward by rounding alone


@dataclass
class Verdict:
    """What the oracles say of one class.

    Attributes:
        model_type: Key of the causal-LM mapping.
        passed: Names of (removal set, recovery) pairs that passed all oracles.
        refused: The tool's message by pair that it refused.
        failures: What went wrong; the test fails if there is anything.
    """

    model_type: str
    passed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """Return `ok`, `ok, some refused`, `refused` or `FAILED`."""
        if self.failures:
            return "FAILED"
        if not self.passed:
            return "refused"
        return "ok, some refused" if self.refused else "ok"

    @property
    def reason(self) -> str:
        """Return the distinct refusals, one after the other."""
        texts: dict[str, list[str]] = {}
        for name, text in self.refused.items():
            texts.setdefault(text, []).append(name)
        if not self.passed:
            return " / ".join(list(texts)[:1])
        return " / ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())


def judge(model_type: str, removals: dict[str, tuple[int, ...]] = REMOVALS) -> Verdict:
    """Run the oracles on one class."""
    verdict = Verdict(model_type)
    if model_type in UNBUILDABLE:
        verdict.refused["build"] = UNBUILDABLE[model_type]
        return verdict
    dense = tiny_model(model_type)
    ids = random_ids()
    before = logits(dense, ids)
    for set_name, removed in removals.items():
        for recover in ("none", "ghost"):
            name = set_name if recover == "none" else f"{set_name} + ghost"
            try:
                _judge_one(dense, removed, recover, ids, verdict)
            except gl.UnsupportedModelError as error:
                verdict.refused[name] = str(error)
            except Exception as error:  # reported as a failure of this class
                verdict.failures.append(f"{name}: {type(error).__name__}: {error}")
            else:
                verdict.passed.append(name)
    if not torch.equal(logits(dense, ids), before):
        verdict.failures.append("the dense model changed")
    return verdict


def _judge_one(dense, removed, recover, ids, verdict) -> None:
    result = gl.prune(
        dense,
        layers=",".join(map(str, removed)),
        recover=recover,
        ridge=1e-2,
        windows=random_ids(4, 40, seed=2),
        progress=False,
    )
    pruned = result.model
    operators = {boundary.stop: fit.tensors["m"] for boundary, fit in result.fits.items()}
    expected = identity_reference(dense, list(removed), ids, operators)
    difference = float((logits(pruned, ids) - expected).abs().max())
    assert difference <= TOLERANCE, f"identity oracle off by {difference:.3g}"
    stepped = step_error(pruned, ids)
    assert stepped <= TOLERANCE, f"step oracle off by {stepped:.3g}"
    with tempfile.TemporaryDirectory() as folder:
        gl.save_pruned(result, Path(folder) / "out")
        loaded = reload(Path(folder) / "out")
        # Not 0: experts that are fused on loading lie in memory in another order (dbrx: 2e-7).
        difference = float((logits(loaded, ids) - logits(pruned, ids)).abs().max())
        assert difference <= 1e-6, f"reload oracle off by {difference:.3g}"


def write_table(verdicts: list[Verdict]) -> str:
    """Return the table as Markdown."""
    counts = {
        status: sum(v.status == status for v in verdicts)
        for status in ("ok", "ok, some refused", "refused")
    }
    lines = [
        "# Architectures",
        "",
        "Written by `python tests/architectures.py --write`; do not edit. Every class of the",
        f"causal-LM mapping of transformers {transformers.__version__}, as a tiny random model",
        "of 8 layers: the identity, step and reload oracles for five removal sets (first, last,",
        "middle, scattered, all but two), without and with an attached `ghost` operator.",
        "",
        f"{counts['ok']} model types are ok for every set, {counts['ok, some refused']} for some",
        f"(the others are refused before anything is written), {counts['refused']} are refused.",
        "",
        "| model type | result | why not |",
        "|---|---|---|",
    ]
    for verdict in verdicts:
        reason = verdict.reason.replace("|", "/").replace("\n", " ")
        lines.append(f"| `{verdict.model_type}` | {verdict.status} | {reason} |")
    return "\n".join(lines) + "\n"


def judge_all(model_types: list[str], jobs: int) -> list[Verdict]:
    """Judge classes in several processes; verdicts come in the order of the names."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool:
        verdicts = []
        for verdict in pool.map(judge, model_types):
            print(f"{verdict.model_type}: {verdict.status} {verdict.failures or ''}", flush=True)
            verdicts.append(verdict)
    return verdicts


def _start_worker() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def statuses(table: str) -> dict[str, str]:
    """Read model types and results out of the table (reasons hold measured numbers)."""
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): row[2].strip() for row in rows}


def main() -> int:
    """Judge all classes, or those named; write the table or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", default=None)
    parser.add_argument("--write", action="store_true", help="write docs/architectures.md")
    parser.add_argument("--check", action="store_true", help="fail unless the table is current")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    started = time.perf_counter()
    verdicts = judge_all(args.model_types or sorted(MODEL_TYPES), args.jobs)
    for verdict in verdicts:
        if args.model_types:
            print(f"{verdict.model_type}: {verdict.reason}")
    print(f"{len(verdicts)} classes in {time.perf_counter() - started:.0f} s")
    failed = [verdict.model_type for verdict in verdicts if verdict.failures]
    if args.write:
        TABLE.write_text(write_table(verdicts), encoding="utf-8")
    if args.check:
        told = statuses(TABLE.read_text(encoding="utf-8"))
        found = {verdict.model_type: verdict.status for verdict in verdicts}
        wrong = [name for name in found if found[name] != told.get(name)]
        if not args.model_types:
            wrong += sorted(set(told) - set(found))
        print(
            f"docs/architectures.md is {'wrong about ' + ', '.join(wrong) if wrong else 'current'}"
        )
        failed += wrong
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
