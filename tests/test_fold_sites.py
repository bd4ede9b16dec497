"""Output maps of decoder layers, found by probing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import families
import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from ghostlayers.fold_sites import find_fold_sites, layer_before
from ghostlayers.plan import Boundary
from ghostlayers.sweep import hidden_state
from oracles import random_ids, tiny_model

FOUND = {
    "llama": ("mlp.down_proj", "self_attn.o_proj"),
    "gpt2": ("mlp.c_proj", "attn.c_proj"),  # Conv1D, biases
    "opt": ("fc2", "self_attn.out_proj"),  # biases, no module for the MLP
    "granite": ("mlp.down_proj", "self_attn.o_proj"),
    "gpt_neox": ("mlp.dense_4h_to_h", "attention.dense"),  # parallel residual
    "falcon": ("mlp.dense_4h_to_h", "self_attention.dense"),  # the same, added in place
    "gptj": ("mlp.fc_out", "attn.out_proj"),
    "bamba": ("feed_forward.down_proj", "mamba.out_proj"),  # a token mixer is no attention
    "falcon_h1": ("feed_forward.down_proj", None),  # two mixers side by side
    "mamba": ("mixer.out_proj", None),  # one sublayer
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", FOUND)
def test_maps_are_found(model_type, dtype):
    changes = {"residual_multiplier": 0.22} if model_type == "granite" else {}
    model = families.tiny_model(model_type, **changes).to(dtype)
    sites = find_fold_sites(model, 3)
    mlp, attention = FOUND[model_type]
    assert sites.mlp.path == mlp
    assert (sites.attention.path if sites.attention else None) == attention
    assert bool(sites.why_no_attention) == (attention is None)
    assert sites.mlp.transposed == (model_type == "gpt2")
    assert sites.mlp.scale == (pytest.approx(0.22, rel=1e-2) if changes else 1.0)


@pytest.mark.parametrize("model_type", ["gpt2", "granite", "falcon"])
def test_a_changed_map_moves_the_state_by_its_input(model_type):
    """state after the layer += c · m · D, exactly, when D is added to the weight."""
    changes = {"residual_multiplier": 0.22} if model_type == "granite" else {}
    model, ids, seen = families.tiny_model(model_type, **changes), random_ids(), {}
    layer = decoder_layers(model)[3]
    site = find_fold_sites(model, 3).mlp
    module = site.module(layer)
    module.register_forward_pre_hook(lambda _m, args: seen.update(m=args[0].clone()))
    layer.register_forward_hook(lambda _m, _a, out: seen.update(out=hidden_state(out).clone()))
    with torch.no_grad():
        model(ids)
        before = seen["out"]
        d = torch.randn(module.weight.shape[:: 1 if site.transposed else -1])
        module.weight.add_(site.stored(d))
        model(ids)
    expected = before + site.scale * (seen["m"] @ d).view(before.shape)
    assert torch.allclose(seen["out"], expected, rtol=1e-4, atol=1e-4)


def test_probing_leaves_the_model_as_it_is():
    model = tiny_model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_fold_sites(model, 2)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma4_text", "beside 'per_layer_projection'"),
        ("flex_olmo", "mixture of experts"),
        ("mixtral", "mixture of experts"),
        ("qwen3_moe", "mixture of experts"),
        ("deepseek_v4", "does not run once on a"),
        ("deepseek_v3", "beside 'mlp.shared_experts.down_proj'"),
    ],
)
def test_refusals(model_type, reason):
    with pytest.raises(gl.UnsupportedModelError, match=reason) as caught:
        find_fold_sites(families.tiny_model(model_type), 4)
    line = str(caught.value)
    assert "layer 4" in line and "Use `recover` ghost-robust" in line and "\n" not in line


class LowBit(nn.Linear):
    """Holds its weight as int8, as bitsandbytes does."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) / 100)


def test_low_bit_and_shared_weights_are_refused():
    model = tiny_model()
    mlp = model.model.layers[2].mlp
    low = LowBit(128, 64, bias=False)
    codes = (100 * mlp.down_proj.weight.detach()).round().clamp(-127, 127).to(torch.int8)
    low.weight = nn.Parameter(codes, requires_grad=False)
    mlp.down_proj = low
    with pytest.raises(gl.UnsupportedModelError, match="low-bit weights"):
        find_fold_sites(model, 2)
    shared = tiny_model()
    shared.model.layers[4].mlp.down_proj.weight = shared.model.layers[2].mlp.down_proj.weight
    with pytest.raises(gl.UnsupportedModelError, match="shares its weight"):
        find_fold_sites(shared, 2)


def test_a_cut_at_the_start_has_no_layer_before_it():
    assert layer_before(Boundary(3, 5)) == 2
    with pytest.raises(gl.UnsupportedModelError, match="starts at layer 0"):
        layer_before(Boundary(0, 2))
