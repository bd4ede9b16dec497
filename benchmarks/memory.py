"""Peak memory and wall time of `prune` on a model that does not fit: in memory against offloaded.

    python benchmarks/memory.py [--folder DIR] [--threads 1] [--recover ghost] [--keep]
        [--out FILE]

Builds a random Llama checkpoint of about 3 GB (float32, sharded) and prunes it twice (select, fit,
write), each time by the command line in a process of its own: with the whole model in memory, and
with `--device-map auto --max-memory cpu=... --spill-folder ...`. Prints the peaks, the wall times
and whether both removed the same layers with the same operators; exit status 1 unless the peak is
at most 35 % of the checkpoint, the wall time at most twice that in memory, the layers equal and the
tensors equal to 1e-5. What it made is deleted. With `--out` the figures are added to a file as a
JSON line, which `results_page.py --equality` shows.

What is counted: VmHWM, the largest resident set of the process as the kernel keeps it, Python and
its libraries included, files that are mapped into memory (weights that are read from safetensors
files) too. RssAnon is the part that cannot be dropped without swapping, RssFile the mapped part,
which the kernel can drop when memory is short; both are the largest of samples taken every 5 ms.
CPU time is user and system time of the whole process: on a machine that other processes share it
says more than the wall time, and nothing about waiting for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from equality_lines import append, origin

HIDDEN, INNER, LAYERS, HEADS, VOCABULARY = 1536, 4096, 26, 12, 4096
WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]
MAX_SHARE, MAX_TIMES, MAX_DIFFERENCE = 0.35, 2.0, 1e-5
STATUS = ("VmHWM", "VmRSS", "RssAnon", "RssFile")


def build_checkpoint(folder: Path, layers: int) -> int:
    """Write a random Llama checkpoint, two layers per shard; return its bytes."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    names = {name: index for index, name in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            k: v.shape for k, v in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    draw = torch.Generator().manual_seed(0)
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        group = f"{int(parts[2]) // 2:03d}" if parts[1] == "layers" else "rest"
        groups.setdefault(group, {})[name] = shape
    weight_map, total = {}, 0
    for number, group in enumerate(groups.values(), start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            name: torch.ones(shape)
            if len(shape) == 1
            else 0.03 * torch.randn(shape, generator=draw)
            for name, shape in group.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def status() -> dict[str, int]:
    """Return what the kernel says about this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.partition(":") for line in lines)
    return {name: 1024 * int(value.split()[0]) for name, _, value in fields if name in STATUS}


def child(arguments: list[str]) -> None:
    """Run the command line in this process and print the peaks as JSON on the last line."""
    peaks, done = dict.fromkeys(STATUS, 0), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            for name, value in status().items():
                peaks[name] = max(peaks[name], value)

    from ghostlayers.cli import main

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    code = main(arguments)
    wall, cpu = time.perf_counter() - start, sum(os.times()[:2])
    done.set()
    watcher.join()
    peaks["VmHWM"] = status()["VmHWM"]
    print(json.dumps({"code": code, "wall": wall, "cpu": cpu, **peaks}))


def measure(arguments: list[str], threads: int) -> dict[str, float]:
    """Run a command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if found["code"] != 0:
        raise SystemExit(f"ghostlayers {' '.join(arguments)} failed")
    return found


def largest_difference(one: Path, two: Path) -> tuple[float, int]:
    """Compare two checkpoints tensor by tensor; return the largest difference and how many."""
    from safetensors import safe_open

    def places(folder: Path) -> dict[str, Path]:
        found = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as handle:
                found |= dict.fromkeys(handle.keys(), file)
        return found

    ours, theirs = places(one), places(two)
    if ours.keys() != theirs.keys():
        raise SystemExit(f"the checkpoints differ in {sorted(ours.keys() ^ theirs.keys())[:3]}")
    largest = 0.0
    for name, file in ours.items():
        with safe_open(file, "pt") as first, safe_open(theirs[name], "pt") as second:
            difference = first.get_tensor(name) - second.get_tensor(name)
        largest = max(largest, float(difference.abs().max()))
    return largest, len(ours)


def compare(folder: Path, args: argparse.Namespace) -> bool:
    """Build, prune twice, print; say whether all bounds hold."""
    run = origin(args.threads)
    total = build_checkpoint(folder / "model", args.layers)
    draw = random.Random(0)
    words = (draw.choice(WORDS) for _ in range(args.num_windows * args.window + 1))
    (folder / "text.txt").write_text(" ".join(words))
    print(f"checkpoint: {total / 1e9:.2f} GB, {args.layers} layers, float32", flush=True)
    common = ["prune", str(folder / "model"), "--calibration", str(folder / "text.txt")]
    common += ["--num-windows", str(args.num_windows), "--window", str(args.window)]
    common += ["--num-remove", "4", "--select", args.select, "--recover", args.recover]
    common += ["--ridge", "0.01", "--json", str(folder / "record.json"), "--force"]
    offload = ["--device-map", "auto", "--max-memory", f"cpu={args.budget}"]
    offload += ["--offload-folder", str(folder / "o"), "--spill-folder", str(folder / "s")]
    runs, removed = {}, []
    for name, more in (("in memory", ["--device", "cpu"]), ("offloaded", offload)):
        out = ["-o", str(folder / name.replace(" ", "-"))]
        runs[name] = found = measure([*common, *out, *more], args.threads)
        removed.append(json.loads((folder / "record.json").read_text())["removed"])
        peak, anon, mapped = (found[key] / 1e9 for key in ("VmHWM", "RssAnon", "RssFile"))
        print(
            f"{name}: wall {found['wall']:.1f} s, CPU {found['cpu']:.1f} s, peak resident "
            f"{peak:.2f} GB = {1e11 * peak / total:.1f} % of the checkpoint "
            f"(RssAnon {anon:.2f} GB, RssFile {mapped:.2f} GB), removed {removed[-1]}",
            flush=True,
        )
    largest, count = largest_difference(folder / "in-memory", folder / "offloaded")
    times = runs["offloaded"]["wall"] / runs["in memory"]["wall"]
    print(f"layers equal: {removed[0] == removed[1]}; {count} tensors, difference {largest:.1e}")
    cpu = runs["offloaded"]["cpu"] / runs["in memory"]["cpu"]
    if args.out is not None:
        line = {
            "kind": "memory",
            "checkpoint_bytes": total,
            "layers": args.layers,
            "recover": args.recover,
            "in_memory": runs["in memory"],
            "offloaded": runs["offloaded"],
            "layers_equal": removed[0] == removed[1],
            "tensors": count,
            "largest_difference": largest,
        }
        append(args.out, {**line, "origin": run})
    print(f"wall time: {times:.2f} of the run in memory, CPU time: {cpu:.2f} of it")
    return (
        removed[0] == removed[1]
        and largest <= MAX_DIFFERENCE
        and runs["offloaded"]["VmHWM"] <= MAX_SHARE * total
        and times <= MAX_TIMES
    )


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--num-windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--select", default="streamline")
    parser.add_argument("--recover", default="ghost")
    parser.add_argument("--budget", default="200MiB", help="of the weights that stay in memory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the files")
    parser.add_argument("--out", type=Path, help="file to which a line of figures is added")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(json.loads(args.child))
        return
    folder = Path(tempfile.mkdtemp(prefix="ghostlayers-memory-", dir=args.folder))
    try:
        held = compare(folder, args)
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    print("all bounds hold" if held else "A BOUND IS EXCEEDED")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
