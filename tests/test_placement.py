"""The flags that say where weights and states go."""

from __future__ import annotations

import json

import pytest
import torch

import ghostlayers as gl
from ghostlayers.loading import load_model, locate
from ghostlayers.offload import is_offloaded
from ghostlayers.placement import Placement, parse_device_map, parse_max_memory
from oracles import logits, random_ids
from tiny_checkpoints import listing

FAULTS = {
    "memory alone": (["--max-memory", "cpu=1GiB"], "without `device_map`"),
    "folder alone": (["--offload-folder", "x"], "without `device_map`"),
    "two places": (["--device-map", "auto", "--device", "cpu"], "`device` is 'cpu'"),
    "no file": (["--device-map", "nowhere.json"], "'nowhere.json' is no plan and no file"),
    "no JSON": (["--device-map", "{model: cpu}"], "is not JSON"),
    "empty": (["--device-map", "{}"], "holds no places"),
    "place": (["--device-map", '{"": 1.5}'], "puts '' on 1.5"),
    "no such device": (["--device-map", '{"": "cuda:99"}'], "`device_map` 'cuda:99'"),
    "unknown place": (["--device-map", '{"": "tape"}'], "`device_map` 'tape'"),
    "unknown part": (["--device-map", '{"": "cpu", "model.layer.1": "cpu"}'], "'model.layer.1'"),
    "overlap": (["--device-map", '{"": "cpu", "model.layers.1": "disk"}'], "which is inside it"),
    "size": (["--device-map", "auto", "--max-memory", "cpu=lots"], "'cpu=lots'"),
    "no size": (["--device-map", "auto", "--max-memory", "4GiB"], "'4GiB'"),
    "unit": (["--device-map", "auto", "--max-memory", "cpu=4XB"], "'cpu=4XB'"),
    "twice": (["--device-map", "auto", "--max-memory", "cpu=1GB,cpu=2GB"], "'cpu' twice"),
    "both": (["--device-map", '{"": "cpu"}', "--max-memory", "cpu=1GB"], "names every place"),
    "no GPU": (["--device-map", "auto", "--max-memory", "99=1GB"], "'cuda:99'"),
    "spill file": (["--spill-folder", "{work}/t.txt"], "is a file"),
    "offload file": (["--device-map", "auto", "--offload-folder", "{work}/t.txt"], "is a file"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(work, refuse, name):
    flags, message = FAULTS[name]
    flags = [flag.replace("{work}", str(work)) for flag in flags]
    common = ["--calibration", work / "t.txt", "--num-windows", "4", "--window", "32"]
    command = ["prune", work / "m", "-o", work / "x", "--num-remove", "1", *common]
    assert message in refuse(work, *command, *flags)


@pytest.mark.parametrize("verb", ["analyze", "eval"])
def test_other_verbs_know_the_flags(work, refuse, verb):
    assert "'cpu=lots'" in refuse(
        work, verb, work / "m", "--device-map", "auto", "--max-memory", "cpu=lots"
    )


def test_sizes():
    assert parse_max_memory("0=20GiB, cpu=1.5MB,1=7") == {
        0: 20 * 2**30,
        "cpu": 1_500_000,
        1: 7,
    }


def test_a_map_comes_from_a_file_or_the_text(tmp_path):
    places = {"model.layers.0": 0, "model.layers.1": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(places))
    assert parse_device_map(str(tmp_path / "map.json")) == places
    assert parse_device_map(json.dumps(places)) == places
    assert parse_device_map("auto") == "auto"


def test_the_rest_goes_to_disk(work, tmp_path):
    before = listing(tmp_path)
    placement = Placement("auto", {"cpu": 400_000})
    model = load_model(locate(str(work / "m")), placement=placement)
    places = set(model.hf_device_map.values())
    assert places == {"cpu", "disk"}
    assert is_offloaded(model) and any(not p.is_meta for p in model.parameters())
    assert listing(tmp_path) == before


def test_commands_on_a_model_on_disk(work, run, tmp_path):
    common = [
        "--device-map",
        "auto",
        "--max-memory",
        "cpu=400000",
        "--spill-folder",
        tmp_path / "s",
    ]
    settings = ["--calibration", work / "t.txt", "--num-windows", 8, "--window", 32]
    settings += ["--num-remove", 2, "--recover", "ghost", "--ridge", "0.01", "--batch-size", 3]
    records = []
    for name, more in (("disk", common), ("memory", [])):
        out = tmp_path / name
        status, _, err = run("prune", work / "m", "-o", out, *settings, *more)
        assert status == 0, err
        records.append(json.loads((out / "ghostlayers.json").read_text()))
    assert records[0]["removed"] == records[1]["removed"]
    assert records[0]["config"] == records[1]["config"]
    assert not any("offload" in name or "device_map" in name for name in records[0]["config"])
    texts = ["--perplexity", work / "t.txt", "--window", 32, "--num-windows", 4]
    status, out, err = run("eval", work / "m", tmp_path / "disk", *texts, *common, "--json", "-")
    assert status == 0, err
    ours = json.loads(out)["results"]
    status, out, _ = run("eval", work / "m", tmp_path / "memory", *texts, "--json", "-")
    theirs = json.loads(out)["results"]
    assert [r["perplexity"] for r in ours] == pytest.approx([r["perplexity"] for r in theirs])
    scores = [work / "t.txt", "--num-windows", 8, "--window", 32, "--json", "-"]
    reports = [
        json.loads(run("analyze", work / "m", "--calibration", *scores, *more)[1])
        for more in (common, [])
    ]
    for ours, theirs in zip(*(report["similarity"] for report in reports), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert not list((tmp_path / "s").iterdir())


def test_operators_on_disk(work, run, tmp_path):
    settings = ["--calibration", work / "t.txt", "--num-windows", 8, "--window", 32]
    out = tmp_path / "out"
    flags = ["--layers", "3-4", "--recover", "ghost", "--ridge", "0.01", *settings]
    assert run("prune", work / "m", "-o", out, *flags)[0] == 0
    kept = gl.load_pruned(out, device="cpu").model
    moved = gl.load_pruned(out, placement=Placement({"": "disk"})).model
    assert all(parameter.is_meta for parameter in moved.parameters())
    assert torch.allclose(logits(moved, random_ids()), logits(kept, random_ids()), atol=1e-4)


def test_gguf_is_refused(tmp_path, refuse):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(gl.GhostlayersError, match="is a GGUF file and `device_map` is given"):
        load_model(locate(str(tmp_path / "m.gguf")), placement=Placement("auto"))
