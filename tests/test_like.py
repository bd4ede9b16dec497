"""CASES 65: a record read back gives the same checkpoint, or nothing and a line that says why."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

import ghostlayers as gl
from ghostlayers.loading import load_model, load_tokenizer, locate
from tiny_checkpoints import listing, text_of

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
def test_a_record_read_back_gives_the_same_checkpoint(work, first, run, tmp_path, name):
    record = json.loads((first / name / "ghostlayers.json").read_text())
    assert record["removed"] and record["versions"]["torch"] and record["config"]
    assert len(record["calibration"]["ids_sha256"]) == 64
    shutil.copy(first / name / "ghostlayers.json", tmp_path)
    places = [(first / name, "a"), (tmp_path / "ghostlayers.json", "b")]
    for place, out in places if name == "none" else places[:1]:
        status, _, _ = run("prune", work / "m", "-o", tmp_path / out, "--like", place)
        assert status == 0
        files = listing(tmp_path / out)
        assert files == listing(first / name)  # weights, record, config and card, byte by byte


def test_from_python(work, first):
    """The record's `config` is all that a `PruneConfig` needs."""
    record = json.loads((first / "robust" / "ghostlayers.json").read_text())
    source = locate(str(work / "m"))
    model, tokenizer = load_model(source), load_tokenizer(source)
    result = gl.prune(model, tokenizer, gl.PruneConfig(**record["config"]), progress=False)
    assert list(result.plan.removed) == record["removed"]
    assert result.record["boundaries"] == record["boundaries"]


def test_another_text_is_refused_and_nothing_is_written(work, first, refuse, tmp_path):
    moved = shutil.copytree(first / "ghost", tmp_path / "p")
    (tmp_path / "u.txt").write_text(text_of(2000, seed=4))
    record = json.loads((moved / "ghostlayers.json").read_text())
    record["config"]["calibration"] = str(tmp_path / "u.txt")
    record["versions"]["torch"] = "1.0"
    (moved / "ghostlayers.json").write_text(json.dumps(record))
    line = refuse(tmp_path, "prune", work / "m", "-o", tmp_path / "o", "--like", moved)
    assert "calibration ids sha256 " in line and record["calibration"]["ids_sha256"][:12] in line
    assert "torch 1.0, now " in line


def test_settings_given_count_instead(work, first, run, tmp_path):
    flags = ("--like", first / "ghost", "--num-remove", 1, "--rank", 2)
    assert run("prune", work / "m", "-o", tmp_path / "o", *flags)[0] == 0
    record = json.loads((tmp_path / "o" / "ghostlayers.json").read_text())
    config = record["config"]
    assert (config["num_remove"], config["sparsity"], config["rank"]) == (1, None, 2)
    assert (config["recover"], config["ridge"], len(record["removed"])) == ("ghost", 0.01, 1)
    down = [t for n, t in load_file(tmp_path / "o" / "model.safetensors").items() if ".down." in n]
    assert [tuple(tensor.shape) for tensor in down] == [(2, 64)]


def test_what_is_no_record(work, first, refuse, tmp_path):
    command = ("prune", work / "m", "-o", tmp_path / "o", "--like")
    assert "no ghostlayers.json" in refuse(tmp_path, *command, work / "m")
    moved = shutil.copytree(first / "none", tmp_path / "p")
    record = json.loads((moved / "ghostlayers.json").read_text())
    record["config"]["magic"] = 1
    (moved / "ghostlayers.json").write_text(json.dumps(record))
    assert "does not know: magic" in refuse(tmp_path, *command, moved)
