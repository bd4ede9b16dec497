"""`ghost-norm`: planted maps come back, its fit is relative, the module computes its formula."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ghostlayers as gl
from ghostlayers import modeling_ghostlayers as mg
from ghostlayers.moments import SplitMoments
from ghostlayers.norm_moments import NormMoments, norm_epsilon
from ghostlayers.operators import get_operator
from ghostlayers.plan import Boundary
from oracles import logits, random_ids, reload, tiny_model

C, EPS = 16, 1e-3


def draw(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normalised(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """Divide each row by its root mean square, row by row."""
    rows = [row / math.sqrt(float(row.square().mean()) + eps) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape)


def moments_of(x: torch.Tensor, y: torch.Tensor) -> NormMoments:
    moments = NormMoments.zeros(C, norm_eps=EPS)
    moments.add(x[:100], y[:100])
    moments.add(x[100:], y[100:])
    return moments


def fit(x, y, **settings):
    parts = moments_of(x[::2], y[::2]), moments_of(x[1::2], y[1::2])
    split = SplitMoments(Boundary(1, 2), *parts)
    return get_operator("ghost-norm")(split, **settings)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e3])
def test_planted_map_comes_back(scale):
    x, planted = draw(600, C) * scale, draw(C, C, seed=1)
    found = fit(x, x + normalised(x) @ planted, ridge=1e-12)
    assert torch.allclose(found.tensors["m"], planted, atol=1e-6)
    assert found.spec == {"norm_eps": EPS} and found.diagnostics["norm_eps"] == EPS
    assert found.diagnostics["held_out_error_after"] < 1e-6 < found.diagnostics["error_before"]
    # The weighted objective in one least-squares problem.
    y = x + normalised(x) @ planted + draw(600, C, seed=2) * scale
    weight = 1 / torch.maximum(x.norm(dim=1), y.norm(dim=1))[:, None]
    wanted = torch.linalg.lstsq(weight * normalised(x), weight * (y - x)).solution
    assert torch.allclose(fit(x, y, ridge=1e-13).tensors["m"], wanted, atol=1e-6)


def test_one_massive_token_moves_the_fit_little():
    x, planted = draw(600, C), draw(C, C, seed=1)
    y = x + normalised(x) @ planted
    y[7] = 1e6 * draw(C, seed=3)
    found = fit(x, y, ridge=1e-12).tensors["m"]
    assert float((found - planted).norm() / planted.norm()) < 0.05


def test_ridge_is_chosen_and_zero_states_count_nothing():
    x = draw(600, C)
    found = fit(x, x + draw(600, C, seed=5))
    assert found.diagnostics["ridge"] > 1e-6 and len(found.diagnostics["ridge_errors"]) > 5
    zero = NormMoments.zeros(C, norm_eps=EPS)
    zero.add(torch.zeros(3, C), torch.zeros(3, C))
    assert zero.num_tokens == 3 and float(zero.gram.abs().sum()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [None, 3])
def test_module_computes_the_formula(dtype, rank):
    spec = {"layer": 0, "side": "input", "rank": rank, "norm_eps": EPS}
    operator = mg.GhostOperator(C, spec, dtype=dtype)
    for index, parameter in enumerate(operator.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=index))
    weights = [p.double() for p in operator.parameters()]
    m = weights[0].T if rank is None else weights[0].T @ weights[1].T
    x = draw(2, 5, C, seed=9).to(dtype)
    expected = x.double() + normalised(x.double()) @ m
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    found = operator(x)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("eps", [0, -1.0, "1e-6", math.inf, True])
def test_wrong_eps_is_refused(eps):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="norm_eps must be None or a positive finite number"):
        mg.attach_operators_(
            model, [{"layer": 1, "side": "input", "norm_eps": eps}], decoder_path="layers"
        )


def test_checkpoints_of_before_keep_loading(tmp_path):
    result = gl.prune(tiny_model("llama"), windows=random_ids(3), layers="3-4", recover="ghost")
    folder = gl.save_pruned(result, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    for spec in config["ghost_operators"]:
        assert spec.pop("norm_eps") is None
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(reload(folder), random_ids()), logits(result.model, random_ids()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "opt"])
def test_prune_save_reload(tmp_path, family):
    model = tiny_model(family)
    result = gl.prune(model, windows=random_ids(3), layers="3-4,7", recover="ghost-norm")
    assert [fit.name for fit in result.fits.values()] == ["ghost-norm", "ghost-norm"]
    assert norm_epsilon(model.config) == 1e-6
    bare = gl.prune(model, windows=random_ids(3), layers="3-4,7", recover="none")
    dense = logits(model, random_ids(3))
    before, after = (logits(r.model, random_ids(3)) - dense for r in (bare, result))
    assert float(after.norm()) < float(before.norm())  # on the tokens that it was fitted on
    folder = gl.save_pruned(result, tmp_path / "m")
    assert torch.equal(logits(reload(folder), random_ids()), logits(result.model, random_ids()))


def test_eps_is_the_model_s_own():
    model = tiny_model("llama", rms_norm_eps=1e-3)
    result = gl.prune(model, windows=random_ids(3), layers="3-4", recover="ghost-norm")
    assert result.model.model.layers[3].ghost_input.norm_eps == 1e-3


def test_guard_drops_a_fit_that_does_not_help():
    windows = random_ids(8)
    result = gl.prune(
        tiny_model("llama"), windows=windows, layers="3-4", recover="ghost-norm", ridge=1e9
    )
    assert result.fits == {} and result.record["guard"]["windows"] == 2
