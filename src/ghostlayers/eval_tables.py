"""Tables of `ghostlayers eval` for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tables import render_table
from .task_scores import METRICS


def perplexity_table(results: Sequence[dict[str, Any]]) -> str:
    """Lay out perplexities, two columns a text, and below what they were measured on."""
    rows = []
    for result in results:
        numbers = [
            f"{text[key]:.4f}" for text in result["texts"] for key in ("perplexity", "ratio")
        ]
        parameters = f"{result['parameters'] / 1e6:.1f} M"
        rows.append([result["path"], parameters, *numbers, result["dtype"]])
    texts = results[0]["texts"]
    names = ["perplexity"] if len(texts) == 1 else [Path(text["source"]).name for text in texts]
    header = [name for text in names for name in (text, "ratio")]
    return "\n".join(
        [render_table(["model", "parameters", *header, "dtype"], rows), "", *map(_scored, texts)]
    )


def _scored(text: dict[str, Any]) -> str:
    """Say what a perplexity was measured on."""
    return (
        f"{text['source']}: {text['windows']} windows of {text['window']} tokens, "
        f"{'BOS in front of each' if text['bos_per_window'] else 'no BOS'}, {text['tokens']} "
        f"tokens scored, ids sha256 {text['ids_sha256'][:12]}"
    )


def task_table(results: Sequence[dict[str, Any]]) -> str:
    """Lay out accuracies in percent: each task, the average, and what was not run."""
    rows = []
    first = results[0]["tasks"]
    for index, score in enumerate(first["scores"]):
        for result in results:
            own = result["tasks"]["scores"][index]
            cells = [_percent(own[metric]) for metric in METRICS]
            compared = own["acc_norm"] or own["acc"]
            rows.append([score["task"], result["path"], *cells, *_compared(compared)])
    for metric in METRICS:
        for result in results:
            own = result["tasks"]["average"][metric]
            cells = [_percent(own) if metric == each else "" for each in METRICS]
            rows.append(["average", result["path"], *cells, *_compared(own)])
    for name in first["not_run"]:
        rows.append([name, "not run", "", "", "", ""])
    header = ["task", "model", "acc", "acc_norm", "difference", "retained"]
    skipped = first["not_run"]
    over = f"average over {len(first['scores'])} tasks"
    if skipped:
        over += f", without {', '.join(skipped)} (not run)"
    return (
        f"{render_table(header, rows)}\n\npercent ± standard error; {over}; acc_norm is acc where "
        "a task has none; difference: on the same items, from the first model, of acc_norm where "
        "there is one"
    )


def _percent(value: dict[str, Any] | None, key: str = "value") -> str:
    if value is None:
        return "-"
    error = value["stderr" if key == "value" else f"{key}_stderr"]
    sign = "+" if key == "difference" else ""
    spread = "" if error is None else f" ± {100 * error:.1f}"
    return f"{100 * value[key]:{sign}.1f}{spread}"


def _compared(value: dict[str, Any]) -> list[str]:
    retained = value["retained"]
    return [_percent(value, "difference"), "-" if retained is None else f"{retained:.3f}"]


def speed_table(results: Sequence[dict[str, Any]]) -> str:
    """Lay out times in milliseconds, a line of its own for the operators."""
    rows = []
    for index, base in enumerate(results[0]["speed"]["rows"]):
        for result in results:
            speed, row = result["speed"], result["speed"]["rows"][index]
            head = [str(base["batch_size"]), str(base["length"]), result["path"]]
            cells = []
            for phase in ("prefill", "decode"):
                cells += [_time(row[phase]), f"{row[phase]['speedup']:.2f}"]
            peak = row["peak_memory_bytes"]
            memory = "-" if peak is None else f"{peak / 1e6:.0f}"
            rows.append([*head, *cells, f"{speed['promised_speedup']:.2f}", memory])
            if speed["operators"]:
                times = []
                for phase in ("prefill", "decode"):
                    own = row["operator"][phase]
                    times += [_time(own), f"{100 * own['share']:.1f} %"]
                rows.append(["", "", "  operators alone", *times, "", ""])
    header = ["batch", "prompt", "model", "prefill ms", "x", "ms/token", "x", "promised", "MB"]
    sizes = "; ".join(
        f"{result['path']}: {result['speed']['num_layers']} layers, "
        f"{result['speed']['parameters'] / 1e6:.1f} M parameters, "
        f"{result['speed']['parameter_bytes'] / 1e6:.1f} MB"
        for result in results
    )
    first = results[0]["speed"]
    return (
        f"{render_table(header, rows)}\n\n{sizes}\nmedian ± half the interquartile range of "
        f"{first['repeats']} runs after {first['warmup']}, {first['new_tokens']} new tokens, "
        f"{first['device']}, {first['dtype']}, {first['threads']} threads; x: times as fast as the "
        f"first model, promised: by the number of layers alone; memory: {first['memory']}"
    )


def _time(part: dict[str, Any]) -> str:
    spread = "" if part["iqr_s"] is None else f" ± {500 * part['iqr_s']:.2f}"
    return f"{1000 * part['median_s']:.2f}{spread}"


__all__ = ["perplexity_table", "speed_table", "task_table"]
