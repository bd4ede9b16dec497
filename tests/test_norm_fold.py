"""Folds into maps behind an RMSNorm (Gemma, OLMo 2, GLM 4): found, fitted, saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import families
import ghostlayers as gl
from ghostlayers import fold_maps
from ghostlayers.decoder import decoder_layers
from ghostlayers.feature_moments import FeatureMoments
from ghostlayers.fold_maps import Change, FoldMap, equal_squares, shares
from ghostlayers.fold_sites import find_fold_sites
from ghostlayers.layer_probe import FoldSite
from ghostlayers.norm_behind import NormBehind
from ghostlayers.operators import OperatorFit
from ghostlayers.repairs import with_change
from ghostlayers.sweep import hidden_state
from oracles import logits, random_ids, reload, tiny_model, watched_ladders
from tiny_checkpoints import save_tiny

WINDOWS = random_ids(6, 128, seed=2)
UNTESTED = random_ids(3, 256, seed=2)  # too few windows for the guard
GEMMA = ("post_feedforward_layernorm", "post_attention_layernorm")
FOUND = {
    "gemma2": (*GEMMA, 1.0, 1e-6),
    "gemma3_text": (*GEMMA, 1.0, 1e-6),
    "olmo2": (*GEMMA, 0.0, 1e-5),
    "exaone4": (*GEMMA, 0.0, 1e-5),
    "glm4": ("post_mlp_layernorm", "post_self_attn_layernorm", 0.0, 1.5625e-7),
}


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scaled(model_type, **changes):
    """A tiny model whose norms have gains of their own, some of them negative."""
    model = families.tiny_model(model_type, **changes).double()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                parameter.add_(randn(*parameter.shape, seed=index) * 0.5)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", FOUND)
def test_norms_are_found(model_type, dtype):
    sites = find_fold_sites(families.tiny_model(model_type).to(dtype), 3)
    mlp, attention, offset, eps = FOUND[model_type]
    assert (sites.mlp.path, sites.attention.path) == ("mlp.down_proj", "self_attn.o_proj")
    for site, path in ((sites.mlp, mlp), (sites.attention, attention)):
        assert site.norm.weight == f"{path}.weight"
        assert site.norm.offset == offset
        assert site.norm.eps == pytest.approx(eps, rel=2e-2)


class CentredNorm(nn.Module):
    """Has one weight, as an RMSNorm has, and takes the mean off."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * nn.functional.layer_norm(x, x.shape[-1:])


def test_other_norms_and_biases_are_refused():
    model = families.tiny_model("olmo2")
    model.model.layers[3].post_feedforward_layernorm = CentredNorm(64)
    with pytest.raises(gl.UnsupportedModelError, match="as it is or behind an RMSNorm"):
        find_fold_sites(model, 3)
    model = families.tiny_model("olmo2")
    biased = nn.Linear(128, 64)
    model.model.layers[3].mlp.down_proj = biased
    with pytest.raises(gl.UnsupportedModelError, match="as it is or behind an RMSNorm"):
        find_fold_sites(model, 3)


def layer_output(model, index, ids):
    seen = {}
    layer = decoder_layers(model)[index]
    handle = layer.register_forward_hook(
        lambda _m, _a, out: seen.update(out=hidden_state(out).clone())
    )
    logits(model, ids)
    handle.remove()
    return seen["out"]


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2"])
def test_features_and_splits_are_those_of_the_layer(model_type):
    """What the layer adds is fV; any split of the same V adds it times the same number a token."""
    model, ids, seen = scaled(model_type), random_ids(2, 24), {}
    layer = decoder_layers(model)[3]
    site = find_fold_sites(model, 3).mlp
    own = FoldMap(layer, site, torch.device("cpu"))
    site.module(layer).register_forward_pre_hook(lambda _m, a: seen.update(z=a[0].flatten(0, 1)))
    norm = layer.get_submodule(site.norm.path)
    handle = norm.register_forward_hook(lambda _m, _a, out: seen.update(h=out.flatten(0, 1)))
    logits(model, ids)
    handle.remove()
    f, v = own.features(seen["z"]), own.a * own.gain
    assert torch.allclose(f @ v, seen["h"], atol=1e-5)
    d = 0.1 * randn(*v.shape)
    gain = own.gain * (1.0 + 0.2 * randn(len(own.gain), seed=1))
    changed = own.changed(d, gain)
    assert torch.allclose(changed.kept, d, atol=1e-6)
    with torch.no_grad():
        for path, value in changed.weights.items():
            layer.get_parameter(path).copy_(value)
    norm.register_forward_hook(lambda _m, _a, out: seen.update(new=out.flatten(0, 1)))
    logits(model, ids)
    ratio = seen["new"] / (f @ (v + d))
    assert torch.allclose(ratio, ratio.mean(dim=1, keepdim=True).expand_as(ratio), rtol=1e-4)


def test_equal_squares_keep_every_channel():
    z, a, gain = randn(200, 12), randn(12, 8, seed=1), randn(8, seed=2)
    a[:, 2], gain[3] = 0.0, 0.0  # a dead channel, a closed one
    v = a * gain + 0.5 * randn(12, 8, seed=3)
    v[:, 4] = 0.0
    g = equal_squares(*((z @ each).square().sum(dim=0) for each in (v, a)), gain)
    new, old = (z @ (v / g)).square().mean(dim=0), (z @ a).square().mean(dim=0)
    kept = [0, 1, 3, 5, 6, 7]
    assert torch.allclose(new[kept], old[kept])
    assert (g[kept][gain[kept] != 0].sign() == gain[kept][gain[kept] != 0].sign()).all()
    assert torch.isfinite(v / g).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["gemma2", "olmo2"])
def test_gains_that_rounding_would_close_stay_open(model_type, dtype):
    """Next to 1 + w = 0 a bfloat16 w has steps of 2^-8; a float16 one ends at 6e-8."""
    model = families.tiny_model(model_type).to(dtype)
    own = FoldMap(decoder_layers(model)[3], find_fold_sites(model, 3).mlp, torch.device("cpu"))
    gain, d = own.gain.clone(), torch.zeros_like(own.a)
    for channel, value in enumerate((1e-5, -1e-5, 1e-9, -1e-9)):
        gain[channel] = value
        d[:, channel] = (value - own.gain[channel]) * own.a[:, channel]  # V stays A times g'
    changed = own.changed(d, gain)
    weight = changed.weights[own.site.norm.weight].double() + own.site.norm.offset
    assert (weight.sign() == gain.sign()).all()
    assert all(torch.isfinite(value).all() for value in changed.weights.values())
    assert torch.allclose(changed.kept, d, atol=1e-2)


def moments_of(rows):
    moments, one = FeatureMoments.zeros(rows.shape[1], 1), torch.ones(len(rows), 1).double()
    moments.add(rows, one, one)
    return moments


def test_shares_keep_what_the_norm_divides_by(monkeypatch):
    """Channels that follow another course than before carry less of it."""
    monkeypatch.setattr(fold_maps, "PULL", 1e-9)
    size, u = 16, randn(4000, 16).square()
    u = u / u.sum(dim=1, keepdim=True)  # shares of 16 channels: their sum is 1
    moved = u.clone()
    moved[:, :4] = u[:, :4] * (1.0 + randn(4000, 1, seed=1).square())
    b = shares(moments_of(moved))
    assert b.min() >= fold_maps.LEAST
    before, after = (each.log().std() for each in (moved.sum(dim=1), moved @ b))
    assert after < 0.7 * before
    assert b[:4].max() < 0.5 < b[4:].min()
    # Where nothing is to be known from the tokens, every channel keeps its mean square.
    monkeypatch.setattr(fold_maps, "PULL", 1e6)
    assert torch.allclose(shares(moments_of(moved)), torch.ones(size).double(), atol=1e-3)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2"])
@pytest.mark.parametrize("maps", ["both", "mlp"])
def test_a_linear_effect_is_folded_exactly(model_type, maps, monkeypatch):
    """The removed layers mix the channels of the MLP so that its norm divides by the same."""
    monkeypatch.setattr(fold_maps, "PULL", 1e-12)
    model, seen = scaled(model_type), {}
    layers = decoder_layers(model)
    site = find_fold_sites(model, 2).mlp
    own = FoldMap(layers[2], site, torch.device("cpu"))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    change = (own.a[:, order] - own.a) * own.gain
    module = site.module(layers[2])
    module.register_forward_pre_hook(lambda _m, args: seen.update(z=args[0].flatten(0, 1)))

    class Planted(nn.Module):
        def __deepcopy__(self, memo):
            return self

        def forward(self, hidden_states, *_args, **_kwargs):
            moved = own.features(seen["z"]) @ change
            return hidden_states + moved.view_as(hidden_states)

    layers[3] = Planted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = gl.prune(
        model, layers="3", recover="fold", fold_maps=maps, windows=UNTESTED, ridge=1e-13
    )
    entry = result.record["boundaries"][0]
    assert entry["error_before"] > 0.1
    assert entry["error_after"] < 1e-4
    norms = [path for path in entry["maps"] if "norm" in path]
    assert len(norms) == len(entry["maps"]) // 2 == (2 if maps == "both" else 1)
    assert (logits(result.model, UNTESTED[:1]) - logits(model, UNTESTED[:1])).abs().max() < 1e-3
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("recover", ["fold", "fold+ghost"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_survive_a_reload(tmp_path, recover, dtype):
    from ghostlayers.loading import load_model, load_tokenizer, locate

    source = locate(str(save_tiny(tmp_path / "dense", "gemma3")))
    dense = load_model(source, dtype=dtype)
    result = gl.prune(
        dense, load_tokenizer(source), layers="2-3,5", recover=recover, windows=WINDOWS[:3]
    )
    entries = result.record["boundaries"]
    assert [entry["operator"] for entry in entries] == [recover] * 2
    assert all(0.0 < entry["error_after"] < entry["error_before"] for entry in entries)
    assert not any("error_by_rank" in entry for entry in entries)  # `rank` is refused
    out = gl.save_pruned(result, tmp_path / "out", source=source, dtype=dtype)
    loaded, ids = reload(out), random_ids()
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))
    if recover == "fold":
        assert type(loaded).__name__ == type(dense).__name__


@pytest.mark.parametrize("recover", ["fold", "fold+ghost"])
def test_the_guard_sees_what_has_never_seen_the_held_out_windows(monkeypatch, recover):
    dense, windows = tiny_model("gemma3"), random_ids(8, 96, seed=2)
    seen = watched_ladders(monkeypatch)
    for seed in (3, 4):
        windows[[3, 7]] = random_ids(2, 96, seed=seed)
        gl.prune(dense, layers="3", recover=recover, windows=windows, ridge=0.1, refine=0)
    parts = [[ladder[0].weights_part for ladder in ladders] for ladders in seen]
    for one, two in zip(*parts, strict=True):
        assert len(one) == (4 if recover == "fold" else 2)
        for name, value in one.items():
            assert torch.allclose(value, two[name], atol=1e-5), name


def test_errors_are_those_of_the_changed_layer():
    """Not those of the linear model of it: they are measured behind the new weights."""
    dense = scaled("gemma2").float()
    result = gl.prune(dense, layers="3", recover="fold", windows=UNTESTED, ridge=0.1)
    pruned, x, y = result.model, [], []
    for window in UNTESTED:
        x.append(layer_output(pruned, 2, window[None])[0])
        y.append(layer_output(dense, 3, window[None])[0])
    x, y = torch.cat(x).double(), torch.cat(y).double()
    weight = 1.0 / torch.maximum(x.norm(dim=1), y.norm(dim=1)).square()
    error = (weight @ (y - x).square().sum(dim=1)) / (weight @ y.square().sum(dim=1))
    entry = result.record["boundaries"][0]
    assert entry["error_after"] == pytest.approx(float(error.sqrt()), rel=1e-5)


def test_a_norm_may_not_follow_a_published_transform():
    model = families.tiny_model("gemma2")
    with pytest.raises(gl.UnsupportedModelError, match="a norm .* follows 'mlp.down_proj'"):
        gl.prune(model, layers="3", recover="replaceme-lstsq", windows=UNTESTED)


def test_changes_that_are_nothing_change_nothing():
    model = scaled("gemma2")
    own = FoldMap(decoder_layers(model)[3], find_fold_sites(model, 3).mlp, torch.device("cpu"))
    change = Change(torch.zeros_like(own.a), torch.eye(own.width).double())
    gain = equal_squares(change.squares(own.a * own.gain), change.squares(own.a), own.gain)
    assert torch.allclose(gain, own.gain)


def test_the_steps_move_maps_and_leave_their_norms(monkeypatch):
    seen = watched_ladders(monkeypatch)
    with torch.no_grad():
        dense = tiny_model("gemma3")
        dense.get_output_embeddings().weight.mul_(4.0)
    windows = random_ids(12, 64, seed=5)
    result = gl.prune(dense, layers="3", recover="fold", refine=8, windows=windows, batch_size=3)
    assert result.record["refinement"]["used"]
    (((top, *rest),),) = seen
    assert top.name == "fold-refined"
    (start,) = (fit for fit in rest if fit.name == top.diagnostics["errors_of"])
    present = decoder_layers(dense)[2]
    for path, weight in top.weights.items():
        before = start.weights.get(path, present.get_parameter(path))
        assert torch.equal(weight, before) == ("norm" in path), path
    assert len(top.weights) == 4


@pytest.mark.parametrize("transposed", [False, True])
def test_a_change_has_the_same_effect_behind_another_gain(transposed):
    """The steps move the repair fitted without the held-out windows, whose gain is its own."""
    path, norm, inputs, size = "map.weight", "norm.weight", 5, 4
    site = FoldSite("map", 1.0, transposed, NormBehind("norm", 1.0, 1e-6))
    a = {"part": randn(inputs, size, seed=1), "whole": randn(inputs, size, seed=2)}
    gains = {"part": torch.tensor([1.5, -2.0, 0.03, 0.0]), "whole": torch.tensor([1.0, -3.0, 4, 0])}
    fit = OperatorFit("fold", {}, {}, sites={path: site})
    fit.weights.update({path: site.stored(a["whole"]), norm: gains["whole"].double() - 1.0})
    fit.weights_part.update({path: site.stored(a["part"]), norm: gains["part"].double() - 1.0})
    new = with_change(fit, path, site.stored(randn(inputs, size, seed=3)))
    effects = [
        (site.stored(new_weights[path]) - a[name]) * (1.0 + new_weights[norm])
        for name, new_weights in (("part", new.weights_part), ("whole", new.weights))
    ]
    assert effects[0].norm() > 1.0
    torch.testing.assert_close(effects[1], effects[0], rtol=1e-6, atol=1e-6)
    assert torch.isfinite(new.weights[path]).all()


@pytest.mark.parametrize("recover", ["fold", "fold+ghost"])
def test_fits_say_which_norms_their_maps_stand_before(monkeypatch, recover):
    seen = watched_ladders(monkeypatch)
    model = families.tiny_model("gemma3_text")
    gl.prune(model, layers="3-4", recover=recover, windows=WINDOWS, refine=1, progress=False)
    (ladder,) = seen[-1]
    folds = [fit for fit in ladder if fit.weights]
    assert len(folds) > 1 or recover == "fold+ghost"
    for fit in folds:
        maps = {path for path, weight in fit.weights.items() if weight.ndim == 2}
        assert {path for path in fit.sites if path in fit.weights} == maps
        assert all(fit.sites[path].norm.weight in fit.weights for path in maps)
