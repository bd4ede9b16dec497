"""Exact answers: moments, solves and the operator of Ghosted Layers."""

from __future__ import annotations

import pytest
import torch

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from ghostlayers.moments import BoundaryMoments, SplitMoments
from ghostlayers.operators.ghost import antisymmetric_share, fit_ghost, solve_ridge
from ghostlayers.plan import Boundary
from oracles import logits, random_ids, tiny_model

BOUNDARY = Boundary(2, 4)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments_of(x, y, held_out=0):
    size = x.shape[1]
    split = SplitMoments(BOUNDARY, BoundaryMoments.zeros(size), BoundaryMoments.zeros(size))
    cut = len(x) - held_out
    split.fit.add(x[:cut], y[:cut])
    if held_out:
        split.held_out.add(x[cut:], y[cut:])
    return split


def test_planted_map_is_recovered():
    x, planted = randn(500, 24), 0.3 * randn(24, 24, seed=1)
    fit = gl.fit_operator(moments_of(x, x + x @ planted, held_out=100))
    assert (fit.tensors["m"] - planted).abs().max() < 1e-8
    assert fit.diagnostics["error_after"] < 1e-6
    assert fit.diagnostics["held_out_error_after"] < 1e-6
    assert fit.diagnostics["error_before"] > 0.1
    assert fit.diagnostics["num_tokens"] == 500
    assert fit.diagnostics["hidden_size"] == 24
    assert not fit.warnings


def test_errors_equal_their_definition():
    x, y = randn(300, 16), randn(300, 16, seed=3)
    fit = fit_ghost(moments_of(x, y, held_out=60))
    m, held = fit.tensors["m"], slice(240, None)
    m_fit = torch.linalg.lstsq(x[:240], (y - x)[:240]).solution
    expected = {
        "error_before": (y - x).norm() / y.norm(),
        "error_after": (x + x @ m - y).norm() / y.norm(),
        "held_out_error_before": (y - x)[held].norm() / y[held].norm(),
        "held_out_error_after": (x + x @ m_fit - y)[held].norm() / y[held].norm(),
    }
    for name, value in expected.items():
        assert fit.diagnostics[name] == pytest.approx(float(value), rel=1e-9)
    assert fit.diagnostics["antisymmetric_share"] == pytest.approx(
        float(((m - m.T) / 2).norm() / m.norm())
    )


@pytest.mark.parametrize("num_tokens", [5, 20, 63])
def test_fewer_tokens_than_channels_gives_the_pseudoinverse(num_tokens):
    x = randn(num_tokens, 64)
    y = x + 0.1 * randn(num_tokens, 64, seed=2)
    fit = fit_ghost(moments_of(x, y))
    assert (fit.tensors["m"] - torch.linalg.pinv(x) @ (y - x)).abs().max() < 1e-6
    assert fit.diagnostics["rank"] == num_tokens
    assert any("calibration tokens for hidden size 64" in line for line in fit.warnings)


def test_one_large_channel_costs_the_others_no_digits():
    x = randn(400, 64)
    x[:, 7] *= 1e4
    planted = 0.1 * randn(64, 64, seed=1)
    fit = fit_ghost(moments_of(x, x + x @ planted))
    assert (fit.tensors["m"] - planted).abs().max() < 1e-8


def test_ridge_limits():
    x, delta = randn(200, 12), randn(200, 12, seed=4)
    gram, cross = x.T @ x, x.T @ delta
    least_squares = torch.linalg.lstsq(x, delta).solution
    assert torch.allclose(solve_ridge(gram, cross).m, least_squares, atol=1e-10)
    assert torch.allclose(solve_ridge(gram, cross, 1e-12).m, least_squares, atol=1e-8)
    assert solve_ridge(gram, cross, 1e12).m.abs().max() < 1e-9
    ridge = 0.3
    shift = ridge * torch.trace(gram) / 12 * torch.eye(12, dtype=torch.float64)
    expected = torch.linalg.solve(gram + shift, cross)
    assert torch.allclose(solve_ridge(gram, cross, ridge).m, expected, atol=1e-10)


def test_scaling_all_states_leaves_operator_and_errors():
    x, y = randn(200, 12), randn(200, 12, seed=4)
    one, two = (fit_ghost(moments_of(k * x, k * y, 40), ridge=0.1) for k in (1.0, 300.0))
    assert torch.allclose(one.tensors["m"], two.tensors["m"], atol=1e-10)
    assert one.diagnostics["error_after"] == pytest.approx(two.diagnostics["error_after"])


def test_zero_gram_gives_zero_operator():
    solution = solve_ridge(*(torch.zeros(4, 4, dtype=torch.float64) for _ in range(2)))
    assert solution.rank == 0
    assert solution.m.abs().max() == 0


def test_harmful_operator_is_reported():
    x, y = randn(300, 64), randn(300, 64, seed=5)
    split = moments_of(x[:70], x[:70] + y[:70], held_out=6)
    assert any("no better than none" in line for line in fit_ghost(split).warnings)


def test_antisymmetric_share():
    a = randn(8, 8)
    assert antisymmetric_share(a - a.T) == pytest.approx(1.0)
    assert antisymmetric_share(a + a.T) == pytest.approx(0.0, abs=1e-12)
    assert antisymmetric_share(torch.zeros(3, 3)) == 0.0


@torch.no_grad()
def test_identity_layers_give_no_operator_and_equal_logits():
    dense = tiny_model()
    for layer in decoder_layers(dense)[3:5]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    ids = random_ids()
    result = gl.prune(dense, layers="3-4", recover="ghost", windows=random_ids(4, 48))
    fit = result.fits[Boundary(3, 5)]
    assert fit.tensors["m"].abs().max() == 0.0
    assert fit.diagnostics["error_before"] == 0.0
    assert torch.equal(logits(result.model, ids), logits(dense, ids))


def _states(model, ids, index):
    kept = []
    layers = decoder_layers(model)
    layer = layers[min(index, len(layers) - 1)]
    if index < len(layers):
        handle = layer.register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    else:
        handle = layer.register_forward_hook(lambda _m, _a, out: kept.append(out))
    logits(model, ids)
    handle.remove()
    return kept[0].flatten(0, 1).double()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("boundary", [Boundary(0, 2), Boundary(3, 5), Boundary(6, 8)])
def test_streamed_moments_equal_one_shot_moments(batch_size, boundary):
    dense, ids = tiny_model(), random_ids(8, 40)
    moments = gl.collect_moments(dense, list(ids.split(batch_size)), [boundary])[boundary]
    x, y = _states(dense, ids, boundary.start), _states(dense, ids, boundary.stop)
    total = moments.total
    assert total.num_tokens == 320
    assert moments.held_out.num_tokens == 80
    assert torch.allclose(total.gram, x.T @ x, rtol=1e-5, atol=1e-5)
    assert torch.allclose(total.cross, x.T @ (y - x), rtol=1e-5, atol=1e-5)
    assert total.target_squares == pytest.approx(float(y.square().sum()), rel=1e-6)
    assert total.delta_squares == pytest.approx(float((y - x).square().sum()), rel=1e-5)
    held = torch.zeros(8, 40, dtype=torch.bool)
    held[3::4] = True
    assert torch.allclose(
        moments.held_out.gram, x[held.flatten()].T @ x[held.flatten()], rtol=1e-5, atol=1e-5
    )


def test_moments_are_exact_in_float64():
    dense, ids = tiny_model().double(), random_ids(4, 40)
    boundary = Boundary(3, 5)
    total = gl.collect_moments(dense, list(ids.split(1)), [boundary])[boundary].total
    x = torch.cat([_states(dense, row, 3) for row in ids.split(1)])
    assert torch.allclose(total.gram, x.T @ x, rtol=1e-13, atol=1e-12)


def test_single_window_is_split_by_position():
    boundary = Boundary(3, 5)
    moments = gl.collect_moments(tiny_model(), [random_ids(1, 40)], [boundary])[boundary]
    assert (moments.fit.num_tokens, moments.held_out.num_tokens) == (30, 10)


def test_moments_add():
    x, y = randn(50, 8), randn(50, 8, seed=1)
    one, parts = BoundaryMoments.zeros(8), [BoundaryMoments.zeros(8) for _ in range(2)]
    one.add(x, y)
    parts[0].add(x[:20], y[:20])
    parts[1].add(x[20:], y[20:])
    total = parts[0] + parts[1]
    assert torch.allclose(total.gram, one.gram, atol=1e-12)
    assert torch.allclose(total.cross, one.cross, atol=1e-12)
    assert (total.num_tokens, one.num_tokens) == (50, 50)
    assert total.delta_squares == pytest.approx(one.delta_squares)
