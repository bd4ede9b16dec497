"""`replaceme-lstsq` and `replaceme-cosine`: planted transforms, folding, refusals, checkpoints."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
import ghostlayers as gl
from ghostlayers import fold_plan, replacing
from ghostlayers.decoder import decoder_layers
from ghostlayers.fold_sites import find_fold_sites
from ghostlayers.operators.replaceme import TokenStates, fit_cosine
from ghostlayers.pipeline import check_quantized
from ghostlayers.plan import Boundary
from ghostlayers.replacing import kept_tokens, transformed_map
from oracles import identity_reference, logits, random_ids, reload, step_error, tiny_model
from test_fold import planted, randn
from test_sequential import state
from tiny_checkpoints import save_tiny

METHODS = ("replaceme-lstsq", "replaceme-cosine")
WINDOWS = random_ids(4, 96, seed=2)
IDS = random_ids()
EYE = torch.eye(64).double()


def model_of(family):
    """A tiny model, by family; `llama+bias` has biases in its MLP."""
    if family == "llama+bias":
        return families.tiny_model("llama", mlp_bias=True)
    if family == "granite":
        return families.tiny_model("granite", residual_multiplier=0.22)
    return families.tiny_model(family)


def site_of(model, index):
    layer = decoder_layers(model)[index]
    site = find_fold_sites(model, index).mlp
    return layer, site, site.module(layer)


# --- folding a transform: entry 56 of the cases


@pytest.mark.parametrize(
    "family", ["llama", "llama+bias", "phi", "gpt_neox", "gpt2", "opt", "granite"]
)
def test_a_transform_of_the_mlp_branch_is_folded(family):
    model = model_of(family)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * randn(len(parameter), seed=5).float())
    layer, site, module = site_of(model, 3)
    t = EYE + 0.3 * randn(64, 64)
    handle = module.register_forward_hook(lambda _m, _a, out: out @ t.float())
    expected = logits(model, IDS)
    handle.remove()
    assert (expected - logits(model, IDS)).abs().max() > 0.1
    merged = transformed_map(layer, site, t)
    has_bias = getattr(module, "bias", None) is not None
    assert len(merged) == 1 + has_bias
    assert has_bias == (family in ("llama+bias", "phi", "gpt_neox", "gpt2", "opt"))

    def folded(paths):
        twin = copy.deepcopy(model)
        for path in paths:
            decoder_layers(twin)[3].get_parameter(path).data.copy_(merged[path])
        return float((logits(twin, IDS) - expected).abs().max())

    assert folded(merged) < 1e-4
    if has_bias:  # the weight alone is another function
        assert folded([site.weight]) > 0.01


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "a norm .* follows 'mlp.down_proj'"),
        ("gemma3_text", "a norm .* follows 'mlp.down_proj'"),
        ("olmo2", "a norm .* follows 'mlp.down_proj'"),
        ("mixtral", "mixture of experts"),
        ("qwen3_moe", "mixture of experts"),
    ],
)
def test_refused_where_nothing_can_be_folded(method, family, reason):
    with pytest.raises(gl.UnsupportedModelError, match=reason) as caught:
        gl.prune(families.tiny_model(family), layers="4", recover=method, windows=WINDOWS)
    assert str(caught.value).endswith("Use `recover` ghost.")


def test_other_refusals(refuse, work, tmp_path):
    with pytest.raises(gl.UnsupportedModelError, match="starts at layer 0.*`recover` ghost\\."):
        gl.prune(tiny_model(), layers="0", recover="replaceme-lstsq", windows=WINDOWS)
    config = tiny_model().config
    config.quantization_config = {"quant_method": "fp8"}
    asked = gl.PruneConfig(layers="3", recover="replaceme-lstsq")
    with pytest.raises(gl.UnsupportedModelError, match="quantized .fp8. and `recover`"):
        check_quantized(asked, config)
    save_tiny(tmp_path / "gemma", "gemma3")
    line = refuse(
        tmp_path,
        *("prune", tmp_path / "gemma", "--layers", "3", "--recover", "replaceme-cosine"),
        *("--out", tmp_path / "out", "--calibration", work / "t.txt", "--window", 64),
    )
    assert "a norm ('post_feedforward_layernorm') follows 'mlp.down_proj'" in line
    assert "Use `recover` ghost." in line


# --- fits


@pytest.mark.parametrize(
    "family", ["llama", "llama+bias", "gpt2", "opt", "granite", "gpt_neox", "phi"]
)
def test_planted_transform_is_found(family):
    """y = (x − m) + mT with the contribution m of the layer before the cut."""
    model = model_of(family).double()
    _, site, module = site_of(model, 2)
    change = 0.3 * randn(64, 64)
    a = site.stored(module.weight.detach())
    bias = getattr(module, "bias", None)
    shift = 0.0 if bias is None else bias.detach()

    def effect(x, m, a=a, **_):
        return (site.scale * (m @ a + shift) @ change).view(x.shape)

    dense = planted(model, lambda x, m, a: effect(x, m))
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    result = gl.prune(dense, layers="3-4", recover="replaceme-lstsq", windows=WINDOWS)
    entry = result.record["boundaries"][0]
    assert entry["error_after"] < 1e-7 < 1e-3 < entry["error_before"]
    assert entry["held_out_error_after"] < 1e-7 and entry["rank"] == 64
    assert entry["frobenius_norm"] == pytest.approx(float((EYE + change).norm()), rel=1e-6)
    assert (entry["operator"], entry["attached"]) == ("replaceme-lstsq", False)
    assert entry["changed_layer"] == 2 and result.record["guard"] is None
    assert entry["weights"] == [site.weight] + ([] if bias is None else [f"{site.path}.bias"])
    assert (logits(result.model, IDS) - logits(dense, IDS)).abs().max() < 1e-6
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def test_lstsq_is_the_published_problem():
    """T = argmin ‖mT − (y − x + m)‖²; a ridge pulls towards the identity."""
    dense, found = tiny_model(), {}
    layer, site, module = site_of(dense, 2)
    module.register_forward_hook(lambda _m, _a, out: found.update(m=out.flatten(0, 1).double()))
    x, y = (state(dense, WINDOWS, index) for index in (3, 5))
    m = found["m"]
    for ridge in (0.0, 0.1):
        shift = (ridge * float(m.square().sum()) / 64) ** 0.5
        rows, target = torch.cat([m, shift * EYE]), torch.cat([y - x + m, shift * EYE])
        expected = torch.linalg.lstsq(rows, target).solution
        settings = {"layers": "3-4", "windows": WINDOWS, "ridge": ridge}
        result = gl.prune(dense, recover="replaceme-lstsq", **settings)
        weight = result.model.model.layers[2].mlp.down_proj.weight
        assert torch.allclose(weight.double(), expected.T @ module.weight.double(), atol=1e-5)
        entry = result.record["boundaries"][0]
        error = float((x - m + m @ expected - y).norm() / y.norm())
        assert entry["error_after"] == pytest.approx(error, rel=1e-4)


def test_cosine_finds_a_planted_transform():
    m, rest, t = randn(2000, 8).float(), randn(2000, 8, seed=1).float(), randn(8, 8, seed=2)
    t = torch.eye(8) + 0.3 * t.float()
    length = 0.1 + 10 * randn(2000, 1, seed=3).abs().float()  # the cosine does not see it
    y = length * (rest + m @ t)
    fit = fit_cosine(
        TokenStates(m[:1500], rest[:1500], y[:1500]), TokenStates(m[1500:], rest[1500:], y[1500:])
    )
    assert (fit.t - t).abs().max() < 1e-2 and (fit.t_part - t).abs().max() < 1e-2
    assert fit.diagnostics["held_out_cosine_distance_after"] < 1e-4
    assert fit.diagnostics["held_out_cosine_distance_before"] > 1e-2


def test_cosine_stops_where_the_held_out_tokens_say_so():
    """With noise and few tokens, more iterations only fit the noise."""
    m, rest, noise = (randn(60, 24, seed=seed).float() for seed in range(3))
    parts = [
        TokenStates(*(part[rows] for part in (m, rest, rest + m + noise)))
        for rows in (slice(40), slice(40, 60))
    ]
    found = fit_cosine(*parts).diagnostics
    assert found["iterations"] < 100 and found["optimised_tokens"] == 60
    alone = fit_cosine(parts[0] + parts[1], TokenStates(*(part[:0] for part in (m, rest, noise))))
    assert alone.t_part is None and alone.diagnostics["iterations"] == 100
    assert alone.diagnostics["held_out_cosine_distance_after"] is None
    assert alone.diagnostics["cosine_distance_after"] < found["cosine_distance_after"]


def test_gradient_of_the_distance_is_that_of_one_batch(monkeypatch):
    from ghostlayers.operators import replaceme

    states = TokenStates(*(randn(50, 6, seed=seed) for seed in range(3)))
    monkeypatch.setattr(replaceme, "CHUNK", 7)
    t = (torch.eye(6) + 0.1 * randn(6, 6, seed=4)).requires_grad_()
    value = states.distance(t)
    twin = t.detach().clone().requires_grad_()
    whole = 1 - torch.cosine_similarity(states.m @ twin + states.rest, states.y, dim=1).mean()
    whole.backward()
    assert torch.allclose(value, whole) and torch.allclose(t.grad, twin.grad)


def test_cosine_lowers_the_distance_in_a_model():
    dense = tiny_model()
    result = gl.prune(dense, layers="3-4", recover="replaceme-cosine", windows=WINDOWS)
    entry = result.record["boundaries"][0]
    assert entry["cosine_distance_after"] < entry["cosine_distance_before"]
    x, y = state(result.model, WINDOWS, 3), state(dense, WINDOWS, 5)
    distance = 1 - torch.cosine_similarity(x, y, dim=1).mean()
    assert entry["cosine_distance_after"] == pytest.approx(float(distance), rel=1e-3)
    error = float((x - y).norm() / y.norm())
    assert entry["error_after"] == pytest.approx(error, rel=1e-3)


def test_kept_tokens_are_bounded_and_drawn_by_the_seed(monkeypatch):
    monkeypatch.setattr(replacing, "MAX_TOKENS", 100)
    weights = []
    for seed in (0, 0, 1):
        result = gl.prune(
            tiny_model(), layers="3", recover="replaceme-cosine", windows=WINDOWS, seed=seed
        )
        assert result.record["boundaries"][0]["optimised_tokens"] == 100
        assert result.record["boundaries"][0]["num_tokens"] == 384
        weights.append(result.model.model.layers[2].mlp.down_proj.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    monkeypatch.setattr(replacing, "MAX_BYTES", 12 * 64 * 30)
    assert len(kept_tokens(384, 64, 0)) == 30
    assert torch.equal(kept_tokens(20, 64, 0), torch.arange(20))


def test_states_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(fold_plan, "available_bytes", lambda device: 250_000)
    monkeypatch.setattr(fold_plan, "gram_bytes", lambda features, size: 200_000)
    with pytest.raises(gl.CalibrationError, match="replaceme-cosine need about .* on cpu"):
        gl.prune(tiny_model(), layers="3", recover="replaceme-cosine", windows=WINDOWS)


# --- in a model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("removed", [[7], [1, 3, 4, 6]], ids=str)
def test_oracles(method, family, removed, tmp_path):
    """O1 with the folded weights in the dense model, O2 and O3."""
    dense = tiny_model(family)
    before = logits(dense, IDS)
    result = gl.prune(
        dense, layers=",".join(map(str, removed)), recover=method, windows=WINDOWS, ridge=1e-3
    )
    assert type(result.model) is type(dense)
    twin = copy.deepcopy(dense)
    for boundary, fit in result.fits.items():
        layer = decoder_layers(twin)[boundary.start - 1]
        for path, value in fit.weights.items():
            layer.get_parameter(path).data.copy_(value)
    expected = identity_reference(twin, removed, IDS)
    assert torch.equal(logits(result.model, IDS), expected)
    assert (expected - identity_reference(dense, removed, IDS)).abs().max() > 1e-3
    assert step_error(result.model, IDS) < 1e-4
    loaded = reload(gl.save_pruned(result, tmp_path / "out"))
    assert type(loaded) is type(dense)
    assert torch.equal(logits(loaded, IDS), expected)
    assert torch.equal(logits(dense, IDS), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_as_a_stock_checkpoint(tmp_path, dtype):
    from ghostlayers.loading import load_model, load_tokenizer, locate

    source = locate(str(save_tiny(tmp_path / "dense", "gpt2")))
    dense = load_model(source, dtype=dtype)
    result = gl.prune(
        dense, load_tokenizer(source), layers="3-4,6", recover="replaceme-lstsq", windows=WINDOWS
    )
    out = gl.save_pruned(result, tmp_path / "out", source=source, dtype=dtype)
    stored = load_file(out / "model.safetensors")
    dense_names = set(load_file(tmp_path / "dense" / "model.safetensors"))
    gone = tuple(f"transformer.h.{layer}." for layer in (5, 6, 7))
    assert set(stored) == {name for name in dense_names if not name.startswith(gone)}
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["model_type"] == "gpt2"
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(logits(loaded, IDS), logits(result.model, IDS))
    paths = ("mlp.c_proj.weight", "mlp.c_proj.bias")
    assert result.changed == {f"transformer.h.{i}.{path}" for i in (2, 3) for path in paths}
    assert set(result.fits) == {Boundary(3, 5), Boundary(6, 7)}


@pytest.mark.parametrize("method", METHODS)
def test_command_line(work, run, tmp_path, method):
    status, _, err = run(
        *("prune", work / "m", "--layers", "3", "--recover", method, "--out", tmp_path / "out"),
        *("--calibration", work / "t.txt", "--num-windows", 4, "--window", 64),
    )
    assert status == 0, err
    reload(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "this is a stock checkpoint" in card
    assert ("found by an optimiser" in card) == (method == "replaceme-cosine")
    status, printed, _ = run("info", tmp_path / "out")
    assert status == 0 and method in printed
