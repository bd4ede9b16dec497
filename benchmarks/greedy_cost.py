"""What `greedy-ppl` costs against the naive loop: remove, run the whole model, repeat.

    python benchmarks/greedy_cost.py MODEL --text FILE [--num-remove 3] [--num-windows 4]
        [--window 128] [--threads 1]

Both sides choose from the same layers on the same windows and are timed in this run, one after the
other; the run fails unless they remove the same layers in the same order with the same losses. The
naive side cuts (`remove_layers_`, no check of the cache) and runs the whole pruned model for every
candidate of every round.
"""

from __future__ import annotations

import argparse
import math
import time

import torch

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers, remove_layers_, share_tensors
from ghostlayers.evaluation import window_losses
from ghostlayers.greedy_removal import remove_greedily
from ghostlayers.loading import load_model, load_tokenizer, locate


def naive(
    model: torch.nn.Module, ids: torch.Tensor, allowed: range, num_remove: int
) -> list[tuple[int, float]]:
    """Choose layers greedily, each time by the loss of the whole pruned model."""
    removed: list[tuple[int, float]] = []
    for _ in range(num_remove):
        gone, losses = [layer for layer, _ in removed], {}
        for layer in sorted(set(allowed) - set(gone)):
            pruned = remove_layers_(share_tensors(model), [*gone, layer])
            found = window_losses(pruned, ids, progress=False)
            losses[layer] = math.fsum(found) / len(found)
        best = min(losses, key=lambda layer: (losses[layer], layer))
        removed.append((best, losses[best]))
    return removed


def main() -> None:
    """Time both sides and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--num-remove", type=int, default=3)
    parser.add_argument("--num-windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = locate(args.model)
    model, tokenizer = load_model(source), load_tokenizer(source)
    ids = gl.text_windows(
        tokenizer, args.text, num_windows=args.num_windows, window=args.window
    ).ids
    allowed = range(1, len(decoder_layers(model)) - 1)
    window_losses(model, ids[:1], progress=False)  # warm-up

    started, cpu = time.perf_counter(), time.process_time()
    steps = remove_greedily(model, ids, allowed, args.num_remove)
    ours, ours_cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"greedy-ppl {ours:8.1f} s wall {ours_cpu:8.1f} s CPU", flush=True)
    started, cpu = time.perf_counter(), time.process_time()
    wanted = naive(model, ids, allowed, args.num_remove)
    whole, whole_cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"naive loop {whole:8.1f} s wall {whole_cpu:8.1f} s CPU")
    if [step.layer for step in steps] != [layer for layer, _ in wanted]:
        raise SystemExit(f"different layers: {steps} and {wanted}")
    error = max(abs(s.loss - loss) for s, (_, loss) in zip(steps, wanted, strict=True))
    if error > 1e-4:
        raise SystemExit(f"losses differ by {error}")
    print(f"both remove {[layer for layer, _ in wanted]} in this order, losses within {error:.1e}")
    print(f"naive / greedy-ppl: {whole / ours:.2f} wall, {whole_cpu / ours_cpu:.2f} CPU")


if __name__ == "__main__":
    main()
