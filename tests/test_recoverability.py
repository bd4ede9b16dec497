"""The recoverability of contiguous cuts: exact answers, tokens, the heat map."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import ghostlayers as gl
from ghostlayers import recoverability
from ghostlayers.decoder import decoder_layers
from ghostlayers.recoverability import RIDGES, RecoverabilityAccumulator, repair_errors
from ghostlayers.sweep import TokenRows
from ghostlayers.tables import heat_map
from oracles import random_ids, tiny_model

ALLOWED = (1, 2, 3, 4, 5, 6)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def feed(accumulator, states, batch):
    """Feed (L+1, N, C) states, `batch` tokens at a time."""
    for first in range(0, states.shape[1], batch):
        part = states[:, first : first + batch]
        count = torch.arange(part.shape[1])
        accumulator.update(dict(enumerate(part)), TokenRows(count, count))
    return accumulator


def reference(x, y, fit, test, ridge):
    """Weighted ridge least squares in NumPy float64."""
    x, y = x.double().numpy(), y.double().numpy()
    weight = 1 / np.linalg.norm(x, axis=1, keepdims=True)
    u, delta = x * weight, (y - x) * weight
    gram = u[fit].T @ u[fit]
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    m = np.linalg.solve(gram, u[fit].T @ delta[fit])
    size = np.linalg.norm((y * weight)[test])
    return (
        np.linalg.norm(delta[test]) / size,
        np.linalg.norm(u[test] @ m - delta[test]) / size,
    )


def test_errors_are_those_of_a_weighted_ridge_fit():
    x = randn(400, 16) * (1 + 10 * torch.rand(400, 1, generator=torch.Generator().manual_seed(1)))
    targets = [x + 0.3 * (x @ randn(16, 16, seed=s)) + randn(400, 16, seed=s + 9) for s in (2, 3)]
    fit, test = np.arange(300), np.arange(300, 400)
    states = [x, *targets]
    ridge, errors = repair_errors([s[:300] for s in states], [s[300:] for s in states])
    wanted = {r: reference(x, targets[1], fit, test, r)[1] for r in RIDGES}
    assert ridge == min(wanted, key=wanted.get)
    for target, pair in zip(targets, errors, strict=True):
        assert pair == pytest.approx(reference(x, target, fit, test, ridge), rel=1e-4)


def test_fewer_tokens_than_channels():
    ridge, ((before, after),) = repair_errors(
        [randn(10, 32), randn(10, 32, seed=1)], [randn(5, 32, seed=2), randn(5, 32, seed=3)]
    )
    assert ridge in RIDGES and math.isfinite(before) and math.isfinite(after)


def test_a_linear_layer_is_recoverable_and_noise_is_not():
    states = [randn(2048, 16)]
    states.append(states[0] @ torch.linalg.qr(randn(16, 16, seed=1))[0])  # a rotation
    states.append(randn(2048, 16, seed=2))
    states.append(states[2])
    accumulator = RecoverabilityAccumulator(3, 16, num_windows=16, window=128)
    found = feed(accumulator, torch.stack(states), 256).result((0, 1, 2))
    ratio = found.ratio
    assert ratio[0, 1] < 0.01 < 0.7 < ratio[1, 2]  # √½: of Δ = y − x the part −x is known
    assert ratio[2, 3] == 0.0 and found.error_before[2, 3] == 0.0
    assert math.isnan(ratio[0, 2])  # leaves one layer of three
    assert (found.num_tokens, found.held_out_tokens) == (1536, 512)


def test_any_batch_size_keeps_the_same_tokens(monkeypatch):
    monkeypatch.setattr(recoverability, "MIN_TOKENS", 100)
    states, found = randn(4, 512, 8).cumsum(0), []
    for batch in (512, 96, 7):
        accumulator = RecoverabilityAccumulator(3, 8, num_windows=8, window=64, seed=3)
        feed(accumulator, states, batch)
        assert accumulator.filled == len(accumulator.tokens) == 100
        assert torch.equal(accumulator.kept, states[:, accumulator.tokens])
        found.append(accumulator.result((1,)))
    assert found[0].error_after[1, 2] == found[1].error_after[1, 2] == found[2].error_after[1, 2]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(recoverability, "MAX_BYTES", 4 * 9 * 64 * 50)
    accumulator = RecoverabilityAccumulator(8, 64, num_windows=32, window=512)
    assert accumulator.kept.shape == (9, 50, 64)
    monkeypatch.undo()
    large = RecoverabilityAccumulator(8, 2000, num_windows=64, window=512)
    assert large.kept.shape == (9, 8000, 2000)


def test_massive_tokens_are_left_out():
    states = randn(4, 1024, 8).cumsum(0)
    tokens = [RecoverabilityAccumulator(3, 8, num_windows=8, window=128) for _ in range(2)]
    plain = feed(tokens[0], states, 128).result((1,))
    states[:, ::128] *= 300
    found = feed(tokens[1], states, 128).result((1,))
    assert found.num_tokens == plain.num_tokens - 6
    assert found.held_out_tokens == plain.held_out_tokens - 2
    assert found.error_after[1, 2] == pytest.approx(plain.error_after[1, 2], rel=0.02)


@pytest.mark.parametrize("windows", [1, 2, 5])
def test_few_windows(windows):
    model = tiny_model()
    found = gl.analyze(model, windows=random_ids(windows, 64)).recoverability
    assert found.num_tokens + found.held_out_tokens == windows * 64
    assert found.held_out_tokens == {1: 16, 2: 64, 5: 64}[windows]


def test_too_few_tokens_give_none():
    assert gl.analyze(tiny_model(), windows=random_ids(1, 3)).recoverability is None


def test_analysis_of_a_model_with_an_identity_layer():
    model = tiny_model()
    layer = decoder_layers(model)[3]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    windows = random_ids(8, 64)
    found = gl.analyze(model, windows=windows, protect_first=1, protect_last=1).recoverability
    assert found.error_before[3, 4] == 0.0
    known = {tuple(pair) for pair in np.argwhere(~np.isnan(found.ratio))}
    assert known == {(s, e) for s in ALLOWED for e in range(s + 1, 8) if e - s <= 6}
    assert (found.ratio[2, 4], found.ratio[3, 5]) == pytest.approx(
        (found.ratio[2, 3], found.ratio[4, 5]), rel=1e-3
    )
    again = gl.analyze(model, windows=windows, batch_size=3).recoverability
    assert np.allclose(found.ratio, again.ratio, equal_nan=True, atol=1e-4)


# --- what a user sees


def triangle(depth):
    ratio = np.full((depth + 1, depth + 1), np.nan)
    for start in range(1, depth - 1):
        ratio[start, start + 1 : depth] = 1 - 1 / np.arange(2, depth - start + 1)
    return ratio.tolist()


def test_heat_map_of_thirty_layers_fits_and_can_be_read():
    lines = heat_map(triangle(30)).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) == 31
    assert lines[1].split() == ["layer", *map(str, range(1, 29))]
    assert lines[2].split()[:4] == ["1", "50", "67", "75"]
    assert lines[29].split() == ["28", "50"]
    assert "percent" in lines[30]
    assert heat_map(triangle(30)).isascii()


def test_heat_map_of_a_deeper_model_is_shaded():
    lines = heat_map(triangle(80)).splitlines()
    assert lines[2].split() == ["1", "▒▓▓" + "█" * 75]
    assert "· 0-20, " in lines[-1] and lines[-1].endswith("█ 80-100")


def test_heat_map_without_cuts():
    assert heat_map([[math.nan]]) == "no layer may be removed"


def test_analyze_prints_and_writes_it(work, run, tmp_path):
    flags = ["--calibration", work / "t.txt", "--num-windows", 4, "--window", 32]
    status, out, err = run("analyze", work / "m", *flags, "--json", tmp_path / "a.json")
    assert (status, err) == (0, "")
    found = json.loads((tmp_path / "a.json").read_text())["recoverability"]
    assert set(found) == {
        "ratio", "error_before", "error_after", "tokens", "held_out_tokens", "ridge",
    }  # fmt: skip
    assert (found["tokens"], found["held_out_tokens"]) == (96, 32)
    assert [len(row) for row in found["ratio"]] == [9] * 9
    assert found["ratio"][0] == [None] * 9 and found["ratio"][1][2] > 0
    assert list(found["ridge"]) == ["1", "2", "3", "4", "5", "6"]
    percent = min(round(100 * found["error_after"][6][7]), 99)
    assert f"     6 {percent:3d}\n" in out and "layers removed" in out
    assert "auto" not in out  # only selectors that read similarities are listed
