"""The model card that every pruned checkpoint carries."""

from __future__ import annotations

import math
from typing import Any

from .operators import REFINED
from .plan import format_layers
from .records import has_operators


def load_snippet(path: str, *, has_operators: bool) -> str:
    """Return the two lines that load a checkpoint and its tokenizer."""
    extra = ", trust_remote_code=True" if has_operators else ""
    return (
        f'model = AutoModelForCausalLM.from_pretrained("{path}"{extra})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{path}"{extra})'
    )


def model_card(record: dict[str, Any]) -> str:
    """Write the card from a checkpoint's record.

    Args:
        record: Content of `ghostlayers.json`.

    Returns:
        Markdown with the Hub's YAML header.
    """
    source = record.get("source") or {}
    base = source.get("model")
    is_hub_id = isinstance(base, str) and base.count("/") == 1 and not base.startswith((".", "~"))
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if is_hub_id:
        header.append(f"base_model: {base}")
    header += ["tags:", "- ghostlayers", "- depth-pruning", "---", ""]
    depth, removed = record["num_layers"], record["removed"]
    operators = has_operators(record)
    lines = [
        *header,
        "# Depth-pruned model",
        "",
        f"{len(removed)} of {depth} decoder layers were removed from "
        f"{f'[{base}](https://huggingface.co/{base})' if is_hub_id else 'the dense model'} by "
        f"ghostlayers, {_training(record)}.",
        "",
        f"- Removed layers (0-based, dense model): {format_layers(removed)}",
        f"- Kept layers: {format_layers(record['kept'])}",
        *_budget_line(record),
        f"- Selector: `{record['selector']}`",
        f"- Recovery: `{record['recover']}`",
        *_calibration_line(record),
        *_finetune_line(record),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        load_snippet("PATH", has_operators=operators),
        "```",
        "",
    ]
    lines += _what_was_repaired(record)
    lines += _loss_table(record)
    lines += ["The whole record is in `ghostlayers.json`.", ""]
    return "\n".join(lines)


def _what_was_repaired(record: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    operators = has_operators(record)
    if operators:
        lines += [
            "The operators that stand in for the removed layers are small modules inside the "
            "decoder layers (`modeling_ghostlayers.py`). `trust_remote_code=True` is not needed "
            "after `import ghostlayers`. Loaders that would drop them raise an error.",
            "",
        ]
    if merges := (record.get("selection") or {}).get("merges"):
        listed = "; ".join(f"{format_layers(m['merged'])} into {m['layer']}" for m in merges)
        lines += [
            f"Layers were merged, not only removed (0-based, dense model): {listed}. Nothing was "
            "added: this is a stock checkpoint.",
            "",
        ]
    if folded := any(entry.get("weights") for entry in record["boundaries"]):
        lines += [
            f"Layers before a cut have new weights ({_how(record)}): the maps "
            "named in `ghostlayers.json`."
            + ("" if operators else " Nothing was added: this is a stock checkpoint."),
            "",
        ]
    if operators or folded:
        lines += _boundary_table(record["boundaries"])
    elif record["recover"] != "none":
        lines += [
            "No repair was kept: on held-out calibration windows none won back enough of what "
            "the cut loses. This is a stock checkpoint.",
            "",
        ]
    return lines


def _loss_table(record: dict[str, Any]) -> list[str]:
    """Return what the guard measured: perplexity on windows that no fit has seen."""
    guard = record.get("guard") or {}
    named = {"dense": "loss_dense", "pruned": "loss_none", "this model": "loss_chosen"}
    losses: dict[str, float] = {
        name: guard[key] for name, key in named.items() if isinstance(guard.get(key), float)
    }
    if len(losses) < len(named):
        return []
    rows = [
        f"| {name} | {math.exp(loss):.2f} | {math.exp(loss - losses['dense']):.3f} |"
        for name, loss in losses.items()
    ]
    what = f"{guard['windows']} calibration windows that were held out"
    return [
        f"Perplexity on {what}, of repairs fitted without them:",
        "",
        "| model | perplexity | ratio |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _budget_line(record: dict[str, Any]) -> list[str]:
    budget = record.get("budget")
    return [f"- Budget: `{budget['reason']}`"] if budget else []


def _how(record: dict[str, Any]) -> str:
    cosine = record["recover"] == "replaceme-cosine"
    if cosine:
        return "one linear map found by an optimiser"
    steps = _refined_steps(record)
    refined = f"then refined by {steps} gradient steps" if steps else "not trained"
    return f"refitted in closed form, {refined}"


def _training(record: dict[str, Any]) -> str:
    if "finetune" in record:
        return "then distilled"
    steps = _refined_steps(record)
    return f"its repair refined by {steps} gradient steps" if steps else "without training"


def _refined_steps(record: dict[str, Any]) -> int:
    """Return the gradient steps behind the repairs that were kept; 0 if none is refined."""
    if not any(entry["operator"].endswith(REFINED) for entry in record["boundaries"]):
        return 0
    return int(record["refinement"]["steps"])


def _calibration_line(record: dict[str, Any]) -> list[str]:
    windows = record.get("calibration")
    if not windows:
        return []
    return [
        f"- Calibration: `{windows['source']}`, {windows['windows']} windows of "
        f"{windows['window']} tokens"
    ]


def _finetune_line(record: dict[str, Any]) -> list[str]:
    found = record.get("finetune")
    if not found:
        return []
    what = "operators and adapters (merged)" if found["config"]["train"] == "lora" else "operators"
    return [
        f"- Distillation: {what}, {found['best_step']} steps on the top {found['teacher']['top_k']}"
        f" logits of the dense model, `{found['calibration']['source']}`; held-out divergence "
        f"{found['held_out_kl_before']:.4f} before, {found['held_out_kl_after']:.4f} after. "
        "Errors below are those of the closed form that it started from."
    ]


def _boundary_table(boundaries: list[dict[str, Any]]) -> list[str]:
    def number(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else "-"

    rows = [
        f"| [{entry['start']}, {entry['stop']}) | `{entry['operator']}` | "
        f"{number(entry.get('error_before'))} | {number(entry.get('error_after'))} | "
        f"{number(entry.get('held_out_error_before'))} | "
        f"{number(entry.get('held_out_error_after'))} |"
        for entry in boundaries
    ]
    return [
        "Relative error of the hidden state behind each cut:",
        "",
        "| removed | repair | before | after | held-out before | held-out after |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
