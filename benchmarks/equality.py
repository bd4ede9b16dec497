"""Whether several processes, and serving engines, say what one process of transformers says.

    python benchmarks/equality.py processes MODEL --calibration c4.txt --text wiki.test.txt \
        --launchers torchrun:2 torchrun:3 --out equality.jsonl
    python benchmarks/equality.py engines MODEL --calibration c4.txt \
        --engines llama.cpp transformers=PYTHON vllm=PYTHON openvino=PYTHON --out equality.jsonl

`processes` runs this script in one process, and then by each launcher (torchrun, accelerate) in
several that share the windows, and compares: similarities of all states, float64 moments at the
cuts of `streamline`, the operators of `prune` with its guard, perplexity of the pruned model.

`engines` removes layers, repairs them in each way of `--recover`, and compares greedy texts in
float32. Each engine runs in the Python that has it (`engine_texts.py`); llama.cpp and its converter
come in environments that are made for them, as for `ghostlayers export`.

Both add JSON lines to `--out`, which `results_page.py --equality` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from equality_lines import QUANTITIES, Line, append, origin

import ghostlayers as gl
from ghostlayers import distributed
from ghostlayers.gguf_export import export_gguf
from ghostlayers.gguf_verify import NEW_TOKENS, llama_cpp_texts, transformers_texts
from ghostlayers.loading import load_model, load_tokenizer, locate
from ghostlayers.plan import Boundary, format_layers
from ghostlayers.sweep import batches_of
from ghostlayers.tool_environments import LLAMA_CPP, tool_python

LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--num_machines", "1", "--num_processes"),
    ),
}
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):",
    "Water boils at",
    "The three primary colours are",
    "In 1969, the first man",
    "Dear Sir or Madam,\n",
    "A triangle with three equal sides",
)


def measure(args: argparse.Namespace) -> None:
    """Measure what is compared, alone or as one of several processes; the first one writes it."""
    source = locate(args.model)
    model, tokenizer = load_model(source), load_tokenizer(source)
    size = {"window": args.window}
    windows = gl.text_windows(tokenizer, args.calibration, num_windows=args.num_windows, **size)
    scored = gl.text_windows(tokenizer, args.text, num_windows=args.eval_windows, **size)
    with distributed.session():
        print(f"process {distributed.rank() + 1} of {distributed.size()}", file=sys.stderr)
        batches = batches_of(windows.ids, args.batch_size)
        similarity = gl.measure_similarity(model, batches)
        plan = gl.select_layers(similarity, selector="streamline", num_remove=args.num_remove)
        moments = gl.collect_moments(model, batches, plan.boundaries)
        result = gl.prune(
            model,
            layers=",".join(map(str, plan.removed)),
            recover=args.recover,
            windows=windows,
            batch_size=args.batch_size,
        )
        loss = gl.perplexity(result.model, scored, batch_size=args.batch_size)
        found = {
            "processes": distributed.size(),
            "removed": list(plan.removed),
            "similarities": [torch.as_tensor(similarity.matrix)],
            "moments": [part for each in moments.values() for part in parts_of(each)],
            "operators": operator_tensors(result.fits),
            "perplexity": [
                torch.tensor([loss.perplexity, *loss.window_losses], dtype=torch.float64)
            ],
        }
        if not found["operators"]:
            raise SystemExit("the guard left no operator: nothing to compare. Give more windows.")
        if distributed.is_main():
            torch.save(found, args.file)


def parts_of(moments: gl.SplitMoments) -> list[torch.Tensor]:
    """List the sums of one cut's moments."""
    sums = [("gram", "cross"), ("delta_squares", "target_squares", "num_tokens")]
    tensors = []
    for half in (moments.fit, moments.held_out):
        tensors += [getattr(half, name) for name in sums[0]]
        numbers = [float(getattr(half, name)) for name in sums[1]]
        tensors.append(torch.tensor(numbers, dtype=torch.float64))
    return tensors


def operator_tensors(fits: dict[Boundary, gl.OperatorFit]) -> list[torch.Tensor]:
    """List the tensors of all operators, in the order of their places."""
    return [fits[cut].tensors[name] for cut in fits for name in sorted(fits[cut].tensors)]


def relative_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest |a - b| / |b| of any number; the same bits give 0."""
    largest = 0.0
    for one, two in zip(ours, theirs, strict=True):
        difference = (one.double() - two.double()).abs()
        share = torch.where(difference == 0, 0.0, difference / two.double().abs())
        if not bool(share.isfinite().all()):
            return float("inf")
        largest = max(largest, float(share.max()))
    return largest


def launched(launcher: str | None, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run `measure` in a number of processes and read what the first one wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.pt"
        command = [sys.executable]
        command += [] if launcher is None else [*LAUNCHERS[launcher], str(count)]
        command += [__file__, "measure", args.model, "--file", str(file)]
        for name in ("calibration", "text", "num_windows", "eval_windows", "window", "batch_size"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--num-remove", str(args.num_remove), "--recover", args.recover]
        threads = {"OMP_NUM_THREADS": str(args.threads), "TQDM_DISABLE": "1"}
        subprocess.run(command, env={**os.environ, **threads}, check=True)
        found: dict[str, Any] = torch.load(file)
    if found["processes"] != count:
        raise SystemExit(f"{launcher} started {found['processes']} processes, not {count}")
    return found


def processes(args: argparse.Namespace) -> None:
    """Compare launched processes with one."""
    run, alone = origin(args.threads), launched(None, 1, args)
    name = Path(args.model).name if Path(args.model).exists() else args.model
    for asked in args.launchers:
        launcher, _, count = asked.partition(":")
        found = launched(launcher, int(count), args)
        differences = {key: relative_difference(found[key], alone[key]) for key in QUANTITIES}
        line: Line = {
            "kind": "processes",
            "model": f"{name}, layers {format_layers(alone['removed'])}, {args.recover}",
            "launcher": launcher,
            "processes": int(count),
            "windows": f"{args.num_windows} + {args.eval_windows} of {args.window}",
            "layers_equal": found["removed"] == alone["removed"],
            "differences": differences,
            "origin": run,
        }
        append(args.out, line)


def engines(args: argparse.Namespace) -> None:
    """Compare engines with transformers."""
    run, folder = origin(), Path(args.folder or tempfile.mkdtemp(prefix="ghostlayers-equality-"))
    source = locate(args.model)
    model, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    windows = gl.text_windows(
        tokenizer, args.calibration, num_windows=args.num_windows, window=args.window
    )
    for recover in args.recover:
        result = gl.prune(
            model, tokenizer, windows=windows, layers=args.layers, recover=recover, ridge=0.01
        )
        checkpoint = gl.save_pruned(result, folder / recover, force=True)
        expected = transformers_texts(checkpoint, PROMPTS)
        form = "attached" if "Ghost" in type(result.model).__name__ else "stock"
        for asked in args.engines:
            engine, _, python = asked.partition("=")
            if engine == "llama.cpp" and recover == "ghost":
                continue  # `export` refuses it
            release, texts = engine_texts(engine, python, checkpoint)
            line: Line = {
                "kind": "engine",
                "engine": engine,
                "release": release,
                "checkpoint": f"{Path(source.name).name}, layers {args.layers}, {recover} ({form})",
                "prompts": len(PROMPTS),
                "equal": sum(map(str.__eq__, texts, expected)),
                "new_tokens": NEW_TOKENS,
                "different": [[a, b] for a, b in zip(expected, texts, strict=True) if a != b],
                "origin": run,
            }
            append(args.out, line)


def engine_texts(engine: str, python: str, checkpoint: Path) -> tuple[str, list[str]]:
    """Generate with an engine: its release and the texts."""
    if engine == "llama.cpp":
        runner = tool_python(LLAMA_CPP, python or None, flag="--engines")
        with tempfile.TemporaryDirectory() as work:
            export_gguf(checkpoint, f"{work}/model.gguf")
            texts = llama_cpp_texts(Path(work) / "model.gguf", runner, PROMPTS)
        return LLAMA_CPP.requirements[0].replace("==", " "), texts
    with tempfile.TemporaryDirectory() as work:
        request, answer = Path(work) / "request.json", Path(work) / "answer.json"
        job = {"model": str(checkpoint), "prompts": PROMPTS, "num_tokens": NEW_TOKENS}
        request.write_text(json.dumps(job))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": work, "VLLM_NO_USAGE_STATS": "1"}
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        script = Path(__file__).with_name("engine_texts.py")
        subprocess.run([python, str(script), engine, request, answer], env=env, check=True)
        found = json.loads(answer.read_text(encoding="utf-8"))
    return found["release"], found["texts"]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for run in (measure, processes, engines):
        command = commands.add_parser(run.__name__, description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("model")
        command.add_argument("--calibration", required=True, help="local text file")
        command.add_argument("--window", type=int, default=256)
        if run is engines:
            command.add_argument("--num-windows", type=int, default=3, help="too few for the guard")
            command.add_argument("--layers", default="14-18")
            names = ["none", "fold", "ghost", "ghost-norm"]
            command.add_argument("--recover", nargs="+", default=names)
            command.add_argument("--engines", nargs="+", default=["llama.cpp"])
            command.add_argument("--folder", help="where checkpoints are kept")
        else:
            command.add_argument("--text", required=True, help="local text file to score")
            command.add_argument("--num-windows", type=int, default=13)
            command.add_argument("--eval-windows", type=int, default=5)
            command.add_argument("--batch-size", type=int, default=2)
            command.add_argument("--num-remove", type=int, default=5)
            command.add_argument("--recover", default="ghost-robust")
        if run is processes:
            command.add_argument("--launchers", nargs="+", default=["torchrun:2", "torchrun:3"])
            command.add_argument("--threads", type=int, default=1, help="of each process")
        if run is measure:
            command.add_argument("--file", type=Path, required=True)
        else:
            command.add_argument("--out", type=Path, help="file to which lines are added")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
