"""Perplexity of cuts under several operators, on two texts.

    python benchmarks/operator_perplexity.py MODEL --cuts 7-13 12-18 --operators none ghost-robust \
        --calibration c4.txt --texts wiki.test.raw c4.rest.txt

Prints one JSON line for each cut, operator and kind of fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import ghostlayers as gl
from ghostlayers.loading import load_model, load_tokenizer, locate


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--cuts", nargs="+", required=True, help="each as for `--layers`")
    parser.add_argument("--operators", nargs="+", default=["none", "ghost", "ghost-robust"])
    parser.add_argument("--fits", nargs="+", default=["dense"], help="dense, sequential")
    parser.add_argument("--calibration", required=True, help="local text file")
    parser.add_argument("--texts", nargs="+", required=True, help="local text files to score")
    parser.add_argument("--num-windows", type=int, default=32, help="calibration windows")
    parser.add_argument("--eval-windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    source = locate(args.model)
    tokenizer, model = load_tokenizer(source), load_model(source)
    counts = {args.calibration: args.num_windows, **dict.fromkeys(args.texts, args.eval_windows)}
    windows = {
        text: gl.text_windows(tokenizer, text, num_windows=count, window=args.window)
        for text, count in counts.items()
    }
    settings = itertools.product(args.cuts, args.operators, args.fits)
    for cut, operator, fit in settings:
        start = time.perf_counter()
        result = gl.prune(
            model,
            layers=cut,
            recover=operator,
            fit=fit,
            windows=windows[args.calibration],
            batch_size=args.batch_size,
        )
        seconds = time.perf_counter() - start
        scored = {
            text: round(gl.perplexity(result.model, windows[text]).perplexity, 2)
            for text in args.texts
        }
        entries, guard = result.record["boundaries"], result.record["guard"]
        print(
            json.dumps(
                {
                    "cut": cut,
                    "operator": operator,
                    "fit": fit,
                    "used": [entry["operator"] for entry in entries],
                    "perplexity": scored,
                    "ridges": [entry.get("ridge") for entry in entries],
                    "conditions": [entry.get("condition") for entry in entries],
                    "guard": guard,
                    "seconds": round(seconds, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
