"""Entry 65 of the list of cases: a record read back gives the same checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

SETTINGS = ("--num-windows", 4, "--window", 24, "--select", "shortgpt", "--num-remove", 2)


@pytest.fixture(scope="module")
def first(work):
    from ghostlayers.cli import main

    args = ["prune", work / "m", "-o", work / "first", "--calibration", work / "t.txt", *SETTINGS]
    assert main([str(arg) for arg in (*args, "--recover", "ghost")]) == 0
    return work / "first"


@pytest.mark.parametrize("form", ["folder", "file", "other name"])
def test_same_weights_and_record(work, first, run, tmp_path, form):
    record = first / "ghostlayers.json"
    if form == "other name":
        record = tmp_path / "kept.json"
        record.write_bytes((first / "ghostlayers.json").read_bytes())
    like = first if form == "folder" else record
    status, _, err = run("prune", work / "m", "--like", like, "-o", tmp_path / "again")
    assert status == 0, err
    own, other = (load_file(p / "model.safetensors") for p in (first, tmp_path / "again"))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    texts = [(p / "ghostlayers.json").read_text() for p in (first, tmp_path / "again")]
    assert json.loads(texts[0]) == json.loads(texts[1])


def test_other_text_is_refused(work, first, refuse):
    (work / "other.txt").write_text("a text of another kind " * 60)
    args = ["prune", work / "m", "--like", first, "-o", work / "no"]
    err = refuse(work, *args, "--calibration", work / "other.txt")
    assert "calibration ids sha256" in err


def test_other_weights_are_refused(work, first, refuse):
    record = json.loads((first / "ghostlayers.json").read_text())
    record["removed"] = [1, 2] if record["removed"] != [1, 2] else [1, 3]
    (work / "changed.json").write_text(json.dumps(record))
    err = refuse(work, "prune", work / "m", "--like", work / "changed.json", "-o", work / "no")
    assert "removed layers" in err and str(record["removed"]) in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--num-remove", 3), "--num-remove"), (("--recover", "none"), "--recover")],
)
def test_settings_that_decide_are_refused(work, first, refuse, flags, said):
    assert said in refuse(work, "prune", work / "m", "--like", first, "-o", work / "no", *flags)


def test_no_record(work, refuse):
    err = refuse(work, "prune", work / "m", "--like", work / "t.txt", "-o", work / "no")
    assert "is no record" in err
