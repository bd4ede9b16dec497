"""What measuring costs beside the forward passes it needs, and that its memory does not grow.

    python benchmarks/calibration_cost.py MODEL [--num-windows 16] [--window 512]

Prints (wall time of select + fit) / (wall time of the bare base-model forwards: two passes over the
windows, or one when the layers are given), both sides measured alternately in this run, and the
peak memory above the loaded model for 8 and for 64 windows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import resource
import statistics
import time

import torch

import ghostlayers as gl
from ghostlayers.decoder import base_model
from ghostlayers.loading import load_model, locate
from ghostlayers.plan import format_layers

# In the processes whose memory is measured, glibc gives freed memory back at once; otherwise its
# free lists keep growing over the first dozens of forward passes, ours or bare ones.
EXACT_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def random_windows(vocabulary: int, num_windows: int, window: int) -> torch.Tensor:
    """Draw token ids; what they say does not change what the arithmetic costs."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (num_windows, window), generator=generator)


def bare_seconds(model: torch.nn.Module, windows: torch.Tensor, passes: int) -> float:
    """Time the base model's forward, without head, over all windows."""
    base = base_model(model)
    started = time.perf_counter()
    with torch.no_grad():
        for _ in range(passes):
            for ids in windows.split(1):
                base(input_ids=ids, use_cache=False)
    return time.perf_counter() - started


def prune_seconds(model: torch.nn.Module, windows: torch.Tensor, **settings: object) -> float:
    """Time select + fit (+ putting the pruned model together, which copies no weight)."""
    started = time.perf_counter()
    gl.prune(model, windows=windows, progress=False, **settings)
    return time.perf_counter() - started


def peak_megabytes(path: str, num_windows: int, window: int, queue: multiprocessing.Queue) -> None:
    """In a process of its own: peak memory of a pruning run above the loaded model."""
    model = load_model(locate(path))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for windows in (2, num_windows):  # the first run is a warm-up of the allocator
        release_free_memory()
        reset_peak()
        before = resident_megabytes()
        gl.prune(
            model,
            windows=random_windows(vocabulary, windows, window),
            num_remove=5,
            select="streamline",
            recover="ghost",
            progress=False,
        )
    queue.put(peak_resident_megabytes() - before)


def release_free_memory() -> None:
    """Give memory that is free inside the process back, or it hides what is allocated next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Make the kernel count the peak from now on (Linux)."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _status(field: str) -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_megabytes() -> float:
    """Return the resident memory now."""
    return _status("VmRSS:")


def peak_resident_megabytes() -> float:
    """Return the peak of the resident memory since `reset_peak`."""
    return _status("VmHWM:")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--num-remove", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    source = locate(args.model)
    model = load_model(source)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    windows = random_windows(vocabulary, args.num_windows, args.window)
    size = f"{args.num_windows} windows of {args.window}"
    print(f"{args.model}: {size}, {torch.get_num_threads()} threads")
    bare_seconds(model, windows[:1], 1)
    depth = model.config.get_text_config().num_hidden_layers
    given = format_layers(range(depth - 1 - args.num_remove, depth - 1))
    cases = (
        (
            "select + fit (streamline, ghost)",
            2,
            {"num_remove": args.num_remove, "select": "streamline", "recover": "ghost"},
        ),
        ("select + fit (lorp, ghost)", 2, {"num_remove": args.num_remove, "recover": "ghost"}),
        (f"fit, layers given ({given}, ghost)", 1, {"layers": given, "recover": "ghost"}),
        (
            "select + fit + guard (streamline, ghost-robust)",
            2,
            {"num_remove": args.num_remove, "select": "streamline"},
        ),
    )
    for name, passes, settings in cases:
        ratios = []
        for _ in range(args.repeats):
            ours = prune_seconds(model, windows, **settings)
            bare = bare_seconds(model, windows, passes)
            ratios.append(ours / bare)
            print(f"  {name}: {ours:.2f} s / {bare:.2f} s = {ratios[-1]:.3f}")
        print(f"{name}: ratio {statistics.median(ratios):.3f} (median of {args.repeats})")

    os.environ |= EXACT_MALLOC
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for num_windows in (8, 64):
        queue = context.Queue()
        process = context.Process(
            target=peak_megabytes, args=(args.model, num_windows, args.window, queue)
        )
        process.start()
        peaks[num_windows] = queue.get()
        process.join()
        print(f"peak memory above the model, {num_windows} windows: {peaks[num_windows]:.0f} MB")
    print(f"memory ratio 64 / 8 windows: {peaks[64] / peaks[8]:.3f}")


if __name__ == "__main__":
    main()
