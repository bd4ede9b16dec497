"""Entry 65 of the list of cases: a record read back gives the same checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ghostlayers.fingerprint import fingerprint
from ghostlayers.loading import load_model, locate
from ghostlayers.placement import Placement

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


@pytest.fixture(scope="module")
def others(work):
    """Models with the tokenizer of `m`: other weights; the same weights and another config."""
    for name in ("weights", "config"):
        shutil.copytree(work / "m", work / f"other-{name}")
    file = work / "other-weights" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    file = work / "other-config" / "config.json"
    config = json.loads(file.read_text())
    config["rms_norm_eps"] *= 2
    file.write_text(json.dumps(config))
    return work


@pytest.mark.parametrize("part", ["weights", "config"])
def test_another_model_is_refused_before_it_is_measured(others, first, refuse, monkeypatch, part):
    monkeypatch.setattr("ghostlayers.pipeline.prune", None)
    record = json.loads((first / "ghostlayers.json").read_text())["fingerprint"]
    own = fingerprint(load_model(locate(str(others / f"other-{part}"))))
    assert [name for name in own if own[name] != record[name]] == [f"{part}_sha256"]
    err = refuse(others, "prune", others / f"other-{part}", "--like", first, "-o", others / "no")
    assert f"another model: {part} sha256 {record[f'{part}_sha256'][:12]}" in err
    assert own[f"{part}_sha256"][:12] in err


def test_configs_of_two_releases_are_not_compared(others, first, run, tmp_path):
    record = json.loads((first / "ghostlayers.json").read_text())
    record["versions"]["transformers"] = "5.9.0"
    (tmp_path / "old.json").write_text(json.dumps(record))
    args = ["prune", others / "other-config", "--like", tmp_path / "old.json"]
    status, _, err = run(*args, "-o", tmp_path / "out")
    assert status == 0 and "--like" not in err


def test_a_record_without_hashes_is_used_with_a_note(others, first, run, tmp_path):
    record = json.loads((first / "ghostlayers.json").read_text())
    record.pop("fingerprint")
    (tmp_path / "old.json").write_text(json.dumps(record))
    args = ["prune", others / "other-weights", "--like", tmp_path / "old.json"]
    status, _, err = run(*args, "-o", tmp_path / "out")
    assert status == 0
    assert err.count("--like: the record has no hash of the dense model's weights") == 1


def test_the_fingerprint_is_of_the_dense_model(work, first):
    record = json.loads((first / "ghostlayers.json").read_text())
    assert record["fingerprint"] == fingerprint(load_model(locate(str(work / "m"))))


def test_offloaded_weights_are_hashed_where_they_lie(work, monkeypatch):
    from accelerate.hooks import AlignDevicesHook

    source = locate(str(work / "m"))
    model = load_model(source, placement=Placement({"": "disk"}))
    monkeypatch.setattr(AlignDevicesHook, "pre_forward", None)  # it would fetch whole modules
    assert fingerprint(model) == fingerprint(load_model(source))


def test_other_layers_are_refused(work, first, refuse):
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


WRONG = {
    "removed": ({"removed": None}, "`removed` is None, not a list"),
    "boundaries": ({"boundaries": 3}, "`boundaries` is 3, not a list"),
    "no operator": ({"boundaries": [{}]}, "`boundaries[0].operator` is None, not text"),
    "calibration": ({"calibration": []}, "`calibration` is [], not an object"),
    "fingerprint": ({"fingerprint": [1]}, "`fingerprint` is [1], not an object"),
    "hash": (
        {"fingerprint": {"config_sha256": "0", "weights_sha256": 7}},
        "`fingerprint.weights_sha256` is 7, not text",
    ),
    "versions": ({"versions": None}, "`versions` is None, not an object"),
    "format": ({"format_version": 99}, "format version 99"),
    "budget": ({"config": {"num_remove": "2"}}, "`num_remove` '2'; allowed: a whole number"),
    "window": ({"config": {"window": [24]}}, "`window` [24]; allowed: a whole number or null"),
}


@pytest.mark.parametrize("name", WRONG)
def test_edited_record(work, first, refuse, name):
    changes, said = WRONG[name]
    record = json.loads((first / "ghostlayers.json").read_text())
    config = {**record["config"], **changes.get("config", {})}
    (work / "edited.json").write_text(json.dumps({**record, **changes, "config": config}))
    err = refuse(work, "prune", work / "m", "--like", work / "edited.json", "-o", work / "no")
    assert said in err
