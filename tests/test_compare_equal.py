"""`ghostlayers compare`: cells of the methods that change weights, or are refined, equal prune."""

from __future__ import annotations

from pathlib import Path

import pytest

import ghostlayers as gl
from ghostlayers.compare_results import read_results
from ghostlayers.loading import load_model, load_tokenizer, locate
from tiny_checkpoints import save_tiny, text_of

OPERATORS = ("ghost-norm", "ghost-robust", "replaceme-cosine", "fold", "fold+ghost")
GUARDED = ("ghost-norm", "ghost-robust", "fold", "fold+ghost")
LAYERS = "2,5-6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("equal")
    save_tiny(place / "m", num_layers=8)
    (place / "t.txt").write_text(text_of(400))
    (place / "u.txt").write_text(text_of(100, seed=5))
    return place


@pytest.fixture(scope="module", params=[(0, "dense"), (4, "dense"), (4, "sequential")])
def measured(folder, request):
    """One scattered cut with every operator, with and without refinement."""
    from ghostlayers.cli import main

    refine, fit = request.param
    out = folder / f"refined-{refine}-{fit}"
    values = {
        "layers": LAYERS,
        "recover": ",".join(OPERATORS),
        "fit": fit,
        "refine": refine,
        "calibration": folder / "t.txt",
        "num-windows": 8,
        "window": 24,
        "perplexity": folder / "u.txt",
        "eval-window": 24,
        "eval-windows": 3,
    }
    flags = [part for name, value in values.items() for part in (f"--{name}", value)]
    assert main([str(part) for part in ["compare", folder / "m", *flags, "-o", out]]) == 0
    return refine, fit, read_results(out)


@pytest.mark.parametrize("operator", OPERATORS)
def test_cell_equals_prune_and_eval(folder, measured, operator, tmp_path):
    refine, fit, results = measured
    (cell,) = [c for c in results.cells if (c.operator, c.fit) == (operator, fit)]
    assert cell.refused is None
    source = locate(str(folder / "m"))
    model, tokenizer = load_model(source), load_tokenizer(source)
    result = gl.prune(
        model,
        tokenizer,
        layers=LAYERS,
        recover=operator,
        fit=fit,
        refine=refine if operator in GUARDED else None,
        calibration=str(folder / "t.txt"),
        num_windows=8,
        window=24,
        progress=False,
    )
    gl.save_pruned(result, tmp_path / "out", source=source)
    text = str(folder / "u.txt")
    windows = gl.text_windows(tokenizer, text, num_windows=3, window=24, evaluation=True)
    again = load_model(locate(str(tmp_path / "out")))
    wanted = gl.perplexity(again, windows, progress=False)
    found = cell.perplexity["u.txt"]
    assert found["perplexity"] == pytest.approx(wanted.perplexity, rel=1e-6)
    assert found["window_losses"] == pytest.approx(wanted.window_losses, rel=1e-6)
    assert cell.used == [entry["operator"] for entry in result.record["boundaries"]]
    assert (cell.refinement is not None) == (refine > 0 and operator in GUARDED)
