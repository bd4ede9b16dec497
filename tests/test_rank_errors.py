"""`analyze --rank-errors`: what a rank of the map costs, before anything is pruned."""

from __future__ import annotations

import json

import pytest

import ghostlayers as gl
from oracles import random_ids, tiny_model
from test_fold import planted, randn

WINDOWS = random_ids(3, 128, seed=2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_planted_map_of_rank_3_needs_rank_4_of_those_shown(family):
    low = 0.3 * randn(64, 3) @ randn(3, 64, seed=1) / 8
    dense = planted(tiny_model(family), lambda x, m, a: x @ low)
    found = gl.analyze(dense, windows=WINDOWS, rank_errors="3-4", progress=False)
    (entry,) = found.rank_errors
    assert (entry["start"], entry["stop"], entry["operator"]) == (3, 5, "ghost")
    for key in ("error", "held_out_error"):
        errors = entry[f"{key}_by_rank"]
        assert list(errors) == ["1", "2", "4", "8", "16", "32", "64"]
        assert errors["4"] < 1e-6 < 1e-3 < errors["2"] < errors["1"] < entry[f"{key}_before"]


def test_errors_are_those_that_prune_reaches():
    dense = tiny_model()
    found = gl.analyze(dense, windows=WINDOWS, rank_errors=["2-3,6", "2"], progress=False)
    cuts = [(entry["start"], entry["stop"]) for entry in found.rank_errors]
    assert cuts == [(2, 4), (6, 7), (2, 3)]
    for rank in (1, 8):
        result = gl.prune(dense.double(), layers="2-3", recover="ghost", rank=rank, windows=WINDOWS)
        reached = result.record["boundaries"][0]
        errors = found.rank_errors[0]
        assert reached["error_after"] == pytest.approx(errors["error_by_rank"][str(rank)], rel=1e-4)
        assert reached["held_out_error_after"] == pytest.approx(
            errors["held_out_error_by_rank"][str(rank)], rel=1e-4
        )


def test_command_line(work, run, tmp_path):
    flags = ("--calibration", work / "t.txt", "--num-windows", 4, "--window", 64)
    flags += ("--rank-errors", "2-3,6", "--rank-errors", "2-3", "--json", tmp_path / "a.json")
    status, out, err = run("analyze", work / "m", *flags)
    assert (status, err) == (0, "")
    entries = json.loads((tmp_path / "a.json").read_text())["rank_errors"]
    assert [(entry["start"], entry["stop"]) for entry in entries] == [(2, 4), (6, 7)]
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    assert "[2, 4)" in lines[head] and "[6, 7)" in lines[head]
    row = lines[head + 2].split()
    assert row == ["1", *(f"{e['held_out_error_by_rank']['1']:.4f}" for e in entries)]


def test_nothing_is_measured_unless_asked(work, run, tmp_path):
    flags = ("--calibration", work / "t.txt", "--num-windows", 2, "--window", 32)
    status, out, _ = run("analyze", work / "m", *flags, "--json", tmp_path / "a.json")
    assert status == 0 and "by rank" not in out
    assert json.loads((tmp_path / "a.json").read_text())["rank_errors"] == []


@pytest.mark.parametrize("layers", ["8", "3-", "0-7"])
def test_wrong_cuts_are_refused_before_weights_are_loaded(work, refuse, tmp_path, layers):
    line = refuse(tmp_path, "analyze", work / "m", "--rank-errors", layers)
    assert f"`rank_errors` {layers!r}: " in line
