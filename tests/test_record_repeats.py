"""CASES 65: what a record says is enough to make the same checkpoint again."""

from __future__ import annotations

import json

import pytest

import ghostlayers as gl
from ghostlayers.loading import load_model, load_tokenizer, locate
from tiny_checkpoints import listing

RUNS = {
    "robust": ("--num-remove", 3, "--select", "streamline"),
    "ghost": ("--sparsity", 0.25, "--recover", "ghost", "--ridge", 0.01, "--rank", 5),
    "patch": ("--layers", "2-3,5", "--recover", "linearpatch-rotate", "--seed", 3),
    "fold": ("--num-remove", 2, "--select", "shortened-ppl", "--recover", "replaceme-lstsq"),
    "none": ("--target-params", "220k", "--select", "shortgpt", "--recover", "none"),
}


@pytest.fixture(scope="module")
def first(work, tmp_path_factory):
    """One checkpoint of each run."""
    from ghostlayers.cli import main

    folder = tmp_path_factory.mktemp("first")
    text = ("--calibration", work / "t.txt", "--num-windows", 8, "--window", 32)
    for name, flags in RUNS.items():
        command = ["prune", work / "m", "-o", folder / name, *text, *flags]
        assert main([str(part) for part in command]) == 0
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_the_settings_of_a_record_give_the_same_checkpoint(work, first, tmp_path, name):
    """Weights, config, record and model card, byte by byte."""
    record = json.loads((first / name / "ghostlayers.json").read_text())
    assert record["removed"] and record["versions"]["torch"]
    source = locate(str(work / "m"))
    model, tokenizer = load_model(source), load_tokenizer(source)
    result = gl.prune(
        model, tokenizer, gl.PruneConfig(**record["config"]), source=source, progress=False
    )
    assert len(record["calibration"]["ids_sha256"]) == 64
    assert result.record["calibration"]["ids_sha256"] == record["calibration"]["ids_sha256"]
    gl.save_pruned(result, tmp_path / "again", source=source)
    assert listing(tmp_path / "again") == listing(first / name)
