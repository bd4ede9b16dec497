"""`--rank`: the best map of a rank in the metric of the data."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import ghostlayers as gl
from ghostlayers.moments import BoundaryMoments, SplitMoments
from ghostlayers.operators.ghost import fit_ghost
from ghostlayers.operators.low_rank import dense_map, stored_ranks
from ghostlayers.plan import Boundary
from oracles import identity_reference, logits, random_ids, reload, tiny_model
from test_fold import planted, randn
from test_robust import model_with_sinks

WINDOWS = random_ids(3, 128, seed=2)


def split_of(x, y, held_out):
    parts = [BoundaryMoments.zeros(x.shape[1]) for _ in range(2)]
    cut = len(x) - held_out
    parts[0].add(x[:cut], y[:cut])
    parts[1].add(x[cut:], y[cut:])
    return SplitMoments(Boundary(1, 3), *parts)


def correlated(rows=300, size=16):
    """Channels of very different lengths: there the truncated SVD of M goes wrong."""
    x = randn(rows, size) @ torch.diag(10.0 ** torch.linspace(-2, 1, size).double())
    x = x @ torch.linalg.qr(randn(size, size, seed=1)).Q
    return x, x + x @ randn(size, size, seed=2) + 0.3 * randn(rows, size, seed=3)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("rank", [1, 3, 7, 16])
def test_reduced_rank_regression_is_the_projection_of_the_fitted_values(rank, ridge):
    """Oracle: the leading right singular vectors of XM, ridge as rows added to X."""
    x, y = correlated()
    shift = (ridge * float(x.square().sum()) / 16) ** 0.5
    rows = torch.cat([x, shift * torch.eye(16).double()])
    target = torch.cat([y - x, torch.zeros(16, 16).double()])
    m = torch.linalg.lstsq(rows, target).solution
    leading = torch.linalg.svd(rows @ m).Vh[:rank].T
    fit = fit_ghost(split_of(x, y, 0), ridge=ridge, rank=rank)
    assert fit.tensors["down"].shape == (16, rank) and fit.tensors["up"].shape == (rank, 16)
    assert fit.spec == {"rank": rank} and fit.diagnostics["map_rank"] == rank
    found = dense_map(fit.tensors)
    assert torch.allclose(found, m @ leading @ leading.T, atol=1e-7)

    def error(m):
        return float((rows @ m - target).norm())

    u, s, v = torch.linalg.svd(m)
    truncated = (u[:, :rank] * s[:rank]) @ v[:rank]
    if rank < 16:
        assert error(found) < (0.9 if ridge == 0.0 else 1.0) * error(truncated)
    plain = float((x + x @ found - y).norm() / y.norm())
    assert fit.diagnostics["error_after"] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_error_by_rank_is_that_of_the_fits(ridge):
    x, y = correlated()
    split = split_of(x, y, 60)
    whole = fit_ghost(split, ridge=ridge).diagnostics
    assert list(whole["error_by_rank"]) == ["1", "2", "4", "8", "16"]
    for key in ("error", "held_out_error"):
        for rank, error in whole[f"{key}_by_rank"].items():
            one = fit_ghost(split, ridge=ridge, rank=int(rank)).diagnostics
            assert one[f"{key}_after"] == pytest.approx(error, rel=1e-6)
    errors = list(whole["error_by_rank"].values())
    assert errors[-1] == pytest.approx(whole["error_after"], rel=1e-9)
    if ridge == 0.0:
        assert errors == sorted(errors, reverse=True) and errors[0] < whole["error_before"]


def test_stored_ranks():
    assert stored_ranks(1) == [1] and stored_ranks(64) == [1, 2, 4, 8, 16, 32, 64]
    assert stored_ranks(576)[-2:] == [512, 576]


def test_nothing_to_repair_has_no_rank():
    zeros = torch.zeros(20, 4).double()
    fit = fit_ghost(split_of(zeros, zeros, 5), rank=2)
    assert not dense_map(fit.tensors).any() and fit.diagnostics["error_by_rank"] == {}


@pytest.mark.parametrize("recover", ["ghost", "ghost-robust"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_planted_map_of_rank_3(recover, family):
    low = 0.3 * randn(64, 3) @ randn(3, 64, seed=1) / 8
    dense = planted(tiny_model(family), lambda x, m, a: x @ low)
    settings = {"layers": "3-4", "recover": recover, "windows": WINDOWS, "ridge": 1e-12}
    exact = gl.prune(dense, rank=3, **settings)
    assert (dense_map(exact.fits[Boundary(3, 5)].tensors) - low).abs().max() < 1e-6
    ids = random_ids()
    assert (logits(exact.model, ids) - logits(dense, ids)).abs().max() < 1e-6
    less = gl.prune(dense, rank=2, **settings).record["boundaries"][0]
    entry = exact.record["boundaries"][0]
    assert entry["error_after"] < 1e-6 < 1e-3 < less["error_after"] < less["error_before"]
    assert entry["error_by_rank"]["4"] < 1e-6 < entry["error_by_rank"]["2"]
    assert less["error_after"] == pytest.approx(entry["error_by_rank"]["2"], rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", ["0,3-4,7", "5"])
def test_stored_as_two_factors(tmp_path, dtype, layers):
    tiny_model().to(getattr(torch, dtype)).save_pretrained(tmp_path / "dense")
    dense = reload(tmp_path / "dense", dtype="auto")
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    result = gl.prune(dense, layers=layers, recover="ghost", rank=5, ridge=1e-3, windows=WINDOWS)
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())
    out, ids = gl.save_pruned(result, tmp_path / "out"), random_ids()
    shapes = {
        name.rpartition("ghost_")[2]: tuple(tensor.shape)
        for name, tensor in load_file(out / "model.safetensors").items()
        if "ghost_" in name
    }
    assert shapes.pop("input.down.weight") == (5, 64) and shapes.pop("input.up.weight") == (64, 5)
    assert set(shapes) <= {"output.down.weight", "output.up.weight"}
    loaded = reload(out, dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))
    if dtype == "float32":
        maps = {b.stop: dense_map(fit.tensors).float() for b, fit in result.fits.items()}
        expected = identity_reference(dense, list(result.plan.removed), ids, maps)
        assert (logits(loaded, ids) - expected).abs().max() < 1e-4


def test_massive_tokens_keep_their_shift(tmp_path):
    dense, windows = model_with_sinks(), random_ids(3, 200, seed=2)
    windows[windows == 5] = 6
    windows[:, 0] = 5
    result = gl.prune(dense, layers="3", recover="ghost-robust", rank=4, windows=windows)
    entry = result.record["boundaries"][0]
    assert entry["massive_rule"] == "direction" and entry["map_rank"] == 4
    operator = result.model.model.layers[3].ghost_input
    assert operator.rank == 4 and operator.shift is not None
    out = gl.save_pruned(result, tmp_path / "out")
    assert torch.equal(logits(reload(out), windows), logits(result.model, windows))


def test_refusals(refuse, work, tmp_path):
    for fault, match in (
        ({"rank": 0}, "`rank` is 0; allowed: 1 or more"),
        ({"rank": 4, "recover": "fold"}, "`rank` is 4 and `recover` is fold; rank works with"),
        ({"rank": 4, "recover": "none"}, "`recover` is none"),
    ):
        with pytest.raises(gl.GhostlayersError, match=match):
            gl.PruneConfig(num_remove=1, **fault)
    line = refuse(
        tmp_path, "prune", work / "m", "--layers", 3, "--rank", 65, "--out", tmp_path / "out"
    )
    assert "`rank` is 65" in line and "Allowed: 1 to 64." in line


def test_command_line(work, run, tmp_path):
    status, printed, err = run(
        *("prune", work / "m", "--layers", "2,4-5", "--rank", 4, "--recover", "ghost"),
        *("--out", tmp_path / "out"),
        *("--calibration", work / "t.txt", "--num-windows", 4, "--window", 64, "--ridge", "1e-3"),
    )
    assert status == 0, err
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    assert record["config"]["rank"] == 4
    status, shown, _ = run("info", tmp_path / "out")
    assert status == 0
    for text in (printed, shown):
        table = text[text.index("error by rank of the map:") :].splitlines()
        assert table[1].split("  ")[-2:] == ["[2, 3)", "[4, 6)"]
        cells = [line.split() for line in table[3:10]]
        assert [row[0] for row in cells] == ["1", "2", "4", "8", "16", "32", "64"]
        expected = record["boundaries"][1]["held_out_error_by_rank"]
        assert [float(row[2]) for row in cells] == pytest.approx(list(expected.values()), abs=1e-4)
