"""Section C of the list of cases: hooks, devices, offload (entries 32, 34, 35, 37)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from ghostlayers.loading import load_model, locate
from ghostlayers.placement import Placement
from ghostlayers.sweep import capture, hidden_state
from oracles import logits, random_ids, tiny_model

IDS = random_ids()
WINDOWS = random_ids(4, 40, seed=2)


@pytest.fixture
def placed(tmp_path):
    """A tiny model whose layers 2 to 5 are on disk, and the same in memory."""
    dense = tiny_model()
    dense.save_pretrained(tmp_path / "m")
    parts = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    places = dict.fromkeys(parts, "cpu")
    places |= {f"model.layers.{i}": "disk" if 2 <= i < 6 else "cpu" for i in range(8)}
    return load_model(locate(str(tmp_path / "m")), placement=Placement(places)), dense


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list"])
def test_32_states_of_any_kind_of_output(kind):
    class Layer(nn.Module):
        def forward(self, hidden_states):
            out = hidden_states + 1.0
            return {"tensor": out, "tuple": (out, None), "list": [out, None]}[kind]

    layers, seen = nn.ModuleList([Layer(), Layer()]), {}
    state = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))
    with capture(layers, [0, 1, 2], lambda index, found: seen.update({index: found})):
        out = state
        for layer in layers:
            out = hidden_state(layer(out))
    assert [tuple(seen[index].shape) for index in range(3)] == [(2, 40, 64)] * 3
    for index in range(3):
        assert torch.equal(seen[index], state + index if index < 2 else state + 1.0 + 1.0)


def test_32_batches_of_one_and_two_agree(placed):
    for model in placed:
        one, two = (gl.measure_similarity(model, WINDOWS.split(size)) for size in (1, 2))
        assert one.matrix == pytest.approx(two.matrix, abs=1e-6)
        assert one.num_tokens == two.num_tokens == WINDOWS.numel()


def test_34_a_copy_runs_its_own_weights(placed):
    model, _ = placed
    before = logits(model, IDS)
    for twin in (copy.deepcopy(model), gl.share_tensors(model)):
        for layer in decoder_layers(twin):
            layer.mlp.forward = torch.zeros_like
        assert not torch.allclose(logits(twin, IDS), before, atol=1e-2)
        assert torch.equal(logits(model, IDS), before)


def test_35_an_operator_is_where_its_layer_computes(placed):
    model, dense = placed
    cut = {"layers": "3-4", "recover": "ghost", "ridge": 1e-2, "windows": WINDOWS}
    result, expected = (gl.prune(net, progress=False, **cut) for net in (model, dense))
    layer = decoder_layers(result.model)[3]
    assert next(layer.mlp.parameters()).is_meta  # layer 5 of the dense model is on disk
    assert layer.ghost_input.map.weight.device == torch.device("cpu")
    found, wanted = logits(result.model, IDS), logits(expected.model, IDS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(found, logits(model, IDS), atol=1e-2)


def test_37_a_repaired_model_is_what_it_was(placed, tmp_path):
    model, _ = placed
    settings = {"recover": "ghost", "ridge": 1e-2, "windows": WINDOWS, "progress": False}
    result = gl.prune(model, layers="3-4", **settings)
    assert isinstance(result.model, PreTrainedModel) and isinstance(result.model, type(model))
    gl.save_pruned(result, tmp_path / "out", source=locate(str(tmp_path / "m")))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from tiny_checkpoints import tiny_tokenizer

    wrapped = HFLM(pretrained=loaded, tokenizer=tiny_tokenizer(), backend="causal")
    assert wrapped.model is loaded and str(wrapped.device) == "cpu"
