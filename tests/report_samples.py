"""Planted comparisons, checkpoints and results of `eval` and `analyze`, as files, for a report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ghostlayers.compare_lines import CalibrationLine, CellLine, CutLine, DenseLine, RunLine
from ghostlayers.compare_results import ResultsFile
from ghostlayers.records import write_json

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"}
GAINS = {"none": 0.0, "linearpatch-rotate": 0.25, "ghost": 0.55, "ghost-robust": 0.6}
DENSE = {"c4": 21.3, "wiki": 24.7}
GUARD = {
    "windows": 8,
    "loss_dense": 3.1,
    "loss_none": 3.9,
    "loss_chosen": 3.5,
    "recovered_share": 0.5,
}


def similarity(depth: int) -> list[list[float]]:
    """Cosines that fall with distance, three groups of layers."""
    group = [3 * min(state, depth - 1) // depth for state in range(depth + 1)]
    return [
        [
            round(math.exp(-0.02 * abs(i - j)) - 0.12 * abs(group[i] - group[j]), 6)
            for j in range(depth + 1)
        ]
        for i in range(depth + 1)
    ]


def influence(depth: int) -> list[float]:
    rows = similarity(depth)
    return [1 - rows[layer][layer + 1] for layer in range(depth)]


def windows(name: str, count: int) -> dict[str, Any]:
    return {
        "source": name,
        "windows": count,
        "window": 256,
        "tokens": 256 * count,
        "bos_per_window": False,
        "ids_sha256": f"{name}{count}".encode().hex().ljust(64, "0"),
    }


def perplexity(name: str, value: float) -> dict[str, Any]:
    return {**windows(name, 4), "perplexity": value, "standard_error": round(0.04 * value, 4)}


def accuracy(value: float, base: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"value": value, "stderr": 0.021}
    if base is not None:
        found |= {"difference": value - base, "difference_stderr": 0.012, "retained": value / base}
    return found


def tasks(value: float, base: float | None = None) -> dict[str, Any]:
    scores = [
        {
            "task": name,
            "items": 200,
            "num_fewshot": 0,
            "version": 1.0,
            "acc": accuracy(value + shift, None if base is None else base + shift),
            "acc_norm": None,
        }
        for name, shift in (("arc_easy", 0.05), ("piqa", -0.05))
    ]
    average = {"acc": accuracy(value, base), "acc_norm": None}
    return {
        "scores": scores,
        "average": average,
        "not_run": {"copa": "its data could not be had"},
        "limit": 200,
        "lm_eval": "0.4.13",
    }


def speed(depth: int, layers: int, operator: str) -> dict[str, Any]:
    slow = 1.0 if operator == "none" else 1.012
    part = {"median_s": 0.04 * slow * layers / depth, "iqr_s": 0.001}
    part["speedup"] = 0.04 / part["median_s"]
    row = {"batch_size": 1, "length": 64, "prefill": part, "decode": part, "operator": None}
    return {
        "num_layers": layers,
        "parameters": 1000 * layers,
        "parameter_bytes": 4000 * layers,
        "operators": 1,
        "promised_speedup": depth / layers,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "repeats": 3,
        "warmup": 1,
        "new_tokens": 8,
        "rows": [{**row, "peak_memory_bytes": 1e8}],
    }


def layers_of(selector: str, budget: int, depth: int) -> list[int]:
    if selector == "streamline":
        return list(range(depth // 2, depth // 2 + budget))
    step = 3 if selector == "lorp" else 2
    return sorted({(2 + step * index) % (depth - 2) + 1 for index in range(budget)})


def boundaries(layers: list[int], operator: str) -> list[dict[str, Any]]:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1][1] = layer + 1
        else:
            runs.append([layer, layer + 1])
    found = []
    for start, stop in runs:
        entry: dict[str, Any] = {"start": start, "stop": stop, "operator": operator}
        if operator != "none":
            before = 0.1 + 0.05 * (stop - start) + 0.002 * start
            entry |= {"error_before": before, "error_after": before * (1 - GAINS[operator])}
            entry |= {
                f"held_out_{key}": 1.1 * entry[key] for key in ("error_before", "error_after")
            }
        if operator == "ghost-robust":
            tried = {
                "operator": "ghost-robust",
                "against": "none",
                "gain": round(0.3 - 0.02 * start, 4),
                "gain_standard_error": 0.05,
                "required_standard_errors": 2.0,
                "kept": 0.3 - 0.02 * start > 0.1,
            }
            entry["guard"] = {"candidate": operator, "tried": [tried], "chosen": operator}
        found.append(entry)
    return found


def cell_perplexity(name: str, selector: str, operator: str, budget: int, count: int) -> float:
    """The planted perplexity of a cell."""
    harm = {"lorp": 0.1, "streamline": 0.09, "shortgpt": 0.13}[selector]
    repaired = 1 - GAINS[operator] * (1 - 1 / count)
    return round(DENSE[name] * math.exp(harm * budget * repaired), 4)


def run_line(model: str, depth: int, settings: dict[str, Any]) -> RunLine:
    return RunLine(
        model={
            "name": model,
            "architecture": "LlamaForCausalLM",
            "num_layers": depth,
            "parameters": 134515008,
            "dtype": "float32",
            "fingerprint": {"weights_sha256": "ab" * 32},
        },
        versions=VERSIONS,
        created="2026-11-29T20:00:00+00:00",
        settings=settings,
        machine={"cpu": "Xeon", "gpu": None, "threads": 1},
        commit="abc1234",
        command=["compare", model, "-o", "grid"],
    )


def write_comparison(
    folder: Path,
    *,
    depth: int = 12,
    model: str = "org/model",
    budgets: tuple[int, ...] = (2, 3, 4),
    calibrations: tuple[tuple[str, int], ...] = (("c4", 8), ("c4", 32), ("wiki", 8), ("wiki", 32)),
    refusal: str = "GPT-2 has no such map.",
) -> Path:
    """Write a comparison: three selectors, four operators, refusals, and a cell that is missing."""
    file = ResultsFile(folder)
    selectors = ("lorp", "shortgpt", "streamline")
    settings = {
        "num_remove": list(budgets),
        "select": list(selectors),
        "recover": [*GAINS, "fold"],
        "fit": ["dense"],
        "calibration": list(dict.fromkeys(name for name, _ in calibrations)),
        "num_windows": list(dict.fromkeys(count for _, count in calibrations)),
    }
    file.add(run_line(model, depth, settings))
    texts = {name: perplexity(name, value) for name, value in DENSE.items()}
    file.add(DenseLine(texts, tasks(0.6), speed(depth, depth, "none")))
    for name, count in calibrations:
        record = windows(name, count)
        file.add(
            CalibrationLine(
                name=name,
                num_windows=count,
                hash=record["ids_sha256"],
                window=256,
                tokens=record["tokens"],
                calibration=record,
                similarity=similarity(depth),
                rls=0.5 + 0.01 * count,
                locality="distributed",
                num_clusters=3,
                clusters=[3 * layer // depth for layer in range(depth)],
                block_influence=influence(depth),
            )
        )
    for name, count in calibrations:
        for selector in selectors:
            for budget in budgets:
                _write_cut(file, name, count, selector, budget, depth, refusal)
        file.add(CutLine(name, count, "auto", 9, refused="only 10 layers may go"))
    return folder


def _write_cut(
    file: ResultsFile,
    name: str,
    count: int,
    selector: str,
    budget: int,
    depth: int,
    refusal: str,
) -> None:
    layers = layers_of(selector, budget, depth)
    file.add(CutLine(name, count, selector, budget, layers))
    for operator in GAINS:
        if (selector, budget, operator) == ("shortgpt", 2, "ghost"):
            continue  # as if the run was interrupted
        values = {
            text: perplexity(text, cell_perplexity(text, selector, operator, budget, count))
            for text in DENSE
        }
        file.add(
            CellLine(
                calibration=name,
                num_windows=count,
                layers=layers,
                operator=operator,
                used=[operator],
                boundaries=boundaries(layers, operator),
                guard=GUARD if operator == "ghost-robust" else None,
                perplexity=values,
                tasks=tasks(0.6 - 0.02 * budget * (1 - GAINS[operator]), 0.6),
                speed=speed(depth, depth - budget, operator),
            )
        )
    file.add(CellLine(name, count, layers, "fold", refused=refusal))


def write_checkpoint(
    folder: Path,
    *,
    operator: str = "ghost-robust",
    selector: str = "streamline",
    budget: int = 3,
    depth: int = 12,
    source: str = "org/model",
    **changes: Any,
) -> Path:
    """Write what a report reads of a checkpoint: its record."""
    folder.mkdir(parents=True)
    layers = layers_of(selector, budget, depth)
    record = {
        "format_version": 1,
        "num_layers": depth,
        "removed": layers,
        "kept": [layer for layer in range(depth) if layer not in layers],
        "boundaries": boundaries(layers, operator),
        "selector": selector,
        "recover": operator,
        "guard": GUARD if operator == "ghost-robust" else None,
        "calibration": windows("c4", 8),
        "config": {"fit": "dense"},
        "source": {"model": source},
        "versions": VERSIONS,
        "dtype": "float32",
        **changes,
    }
    write_json(folder / "ghostlayers.json", record)
    return folder


def write_evaluation(path: Path, results: dict[str, float], *, source: str = "c4") -> Path:
    """Write the JSON of `eval --perplexity`; window losses with a known spread."""
    found = [
        {
            "path": name,
            "parameters": 1000,
            "dtype": "float32",
            **windows(source, 2),
            "perplexity": value,
            "window_losses": [math.log(value) - 0.1, math.log(value) + 0.1],
        }
        for name, value in results.items()
    ]
    write_json(path, {"results": found, "versions": VERSIONS})
    return path


def write_analysis(path: Path, *, model: str = "org/model", depth: int = 12) -> Path:
    """Write the JSON of `analyze`."""
    value = {
        "model": model,
        "similarity": similarity(depth),
        "block_influence": influence(depth),
        "rls": 0.8123,
        "num_clusters": 3,
        "calibration": windows("c4", 8),
        "versions": VERSIONS,
    }
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
