"""`linearpatch-diag` and `linearpatch-rotate`: planted patches, moments, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ghostlayers as gl
from ghostlayers.channel_moments import ChannelMoments, rotation_of
from ghostlayers.moments import SplitMoments
from ghostlayers.operators.linearpatch import fit_linearpatch
from ghostlayers.plan import Boundary
from oracles import logits, random_ids, reload, step_error, tiny_model
from test_fold import planted, randn
from test_sequential import state

METHODS = ("linearpatch-diag", "linearpatch-rotate")
WINDOWS = random_ids(4, 64, seed=2)


def turn(method):
    """An independent normalised Hadamard matrix of order 64, or the identity."""
    if method == "linearpatch-diag":
        return torch.eye(64, dtype=torch.float64)
    bits = [[bin(i & j).count("1") % 2 for j in range(64)] for i in range(64)]
    return torch.tensor(1.0 - 2.0 * np.array(bits)) / 8.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_planted_patch_is_found(method, family):
    """y = xH diag(d) Hᵀ: the patch is exactly that map."""
    h, d = turn(method), 0.5 + 2.0 * randn(64).abs()
    patch = h @ d.diag() @ h.T
    eye = torch.eye(64).double()
    dense = planted(tiny_model(family), lambda x, m, a: x @ (patch - eye))
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    result = gl.prune(dense, layers="3-4", recover=method, windows=WINDOWS, progress=False)
    fit = result.fits[Boundary(3, 5)]
    assert (fit.tensors["m"] - (patch - eye)).abs().max() < 1e-9
    entry = result.record["boundaries"][0]
    assert entry["error_after"] < 1e-6 < entry["error_before"]
    assert entry["held_out_error_after"] < 1e-6 and entry["held_out_tokens"] == 64
    for key, value in (("mean", d.mean()), ("min", d.min()), ("max", d.max())):
        assert entry[f"scale_{key}"] == pytest.approx(float(value), rel=1e-9)
    assert result.record["guard"] is None
    ids = random_ids()
    assert (logits(result.model, ids) - logits(dense, ids)).abs().max() < 1e-8
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scale_is_the_ratio_of_means_over_all_counted_tokens(method, batch_size):
    dense, boundary, h = tiny_model(), Boundary(2, 5), turn(method)
    split = gl.collect_moments(dense, list(WINDOWS.split(batch_size)), [boundary], operator=method)
    moments, x, y = split[boundary], *(state(dense, WINDOWS, index) for index in (2, 5))
    expected = (y @ h).abs().mean(dim=0) / (x @ h).abs().mean(dim=0)
    assert torch.allclose(moments.total.scale(), expected, rtol=1e-5)
    part = torch.arange(256) // 64 < 3  # the last of four windows is held out
    expected = (y[part] @ h).abs().mean(dim=0) / (x[part] @ h).abs().mean(dim=0)
    assert torch.allclose(moments.fit.scale(), expected, rtol=1e-5)
    fit = gl.fit_operator(moments, operator=method, dtype=torch.bfloat16)
    assert fit.name == method and fit.tensors["m"].dtype == torch.bfloat16
    error = (x + x @ fit.tensors["m"].double() - y).norm() / y.norm()
    assert fit.diagnostics["error_after"] == pytest.approx(float(error), rel=1e-4)
    error = ((x + x @ fit.fit_part["m"].double() - y)[~part]).norm() / y[~part].norm()
    assert fit.diagnostics["held_out_error_after"] == pytest.approx(float(error), rel=1e-4)


def test_padding_is_not_counted():
    dense, boundary = tiny_model(), Boundary(2, 5)
    mask = torch.ones_like(WINDOWS)
    mask[:, 40:] = 0
    padded = [{"input_ids": WINDOWS, "attention_mask": mask}]
    found, expected = (
        gl.collect_moments(dense, batches, [boundary], operator="linearpatch-diag")[boundary].total
        for batches in (padded, [WINDOWS[:, :40]])
    )
    assert found.num_tokens == expected.num_tokens == 160
    assert torch.allclose(found.scale(), expected.scale(), rtol=1e-5)


def test_dead_channels_are_left_alone():
    x, y = randn(40, 8), randn(40, 8, seed=1)
    x[:, 3] = 0.0
    parts = [ChannelMoments.zeros(8) for _ in range(2)]
    parts[0].add(x[:30], y[:30])
    parts[1].add(x[30:], y[30:])
    fit = fit_linearpatch(SplitMoments(Boundary(1, 2), *parts))
    assert fit.diagnostics["dead_channels"] == 1 and fit.tensors["m"][3, 3] == 0.0
    assert torch.isfinite(fit.tensors["m"]).all() and torch.isfinite(fit.fit_part["m"]).all()
    assert fit.diagnostics["scale_max"] < 10


def test_rotation_is_orthogonal_and_shared():
    rotation = rotation_of(96)
    assert (rotation @ rotation.T - torch.eye(96)).abs().max() < 1e-12
    boundaries = [Boundary(2, 3), Boundary(5, 6)]
    found = gl.collect_moments(tiny_model(), [WINDOWS], boundaries, operator="linearpatch-rotate")
    kept = [m for b in boundaries for m in (found[b].fit.rotation, found[b].held_out.rotation)]
    assert all(rotation is kept[0] for rotation in kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded(tmp_path, dtype):
    tiny_model().to(getattr(torch, dtype)).save_pretrained(tmp_path / "dense")
    dense, ids = reload(tmp_path / "dense", dtype="auto"), random_ids()
    result = gl.prune(dense, layers="0,3-4,7", recover="linearpatch-rotate", windows=WINDOWS)
    out = gl.save_pruned(result, tmp_path / "out")
    loaded = reload(out, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))
    if dtype == "float32":
        assert step_error(loaded, ids) < 1e-4
    names = [name for name in load_file(out / "model.safetensors") if "ghost_" in name]
    assert len(names) == 3


def test_a_search_scores_with_the_patch_itself():
    dense = tiny_model(num_layers=4)
    result = gl.prune(
        dense, num_remove=1, select="auto", recover="linearpatch-diag", windows=WINDOWS
    )
    assert result.record["search"]["operator"] == "linearpatch-diag"
    assert {entry["operator"] for entry in result.record["boundaries"]} == {"linearpatch-diag"}
