"""The three oracles on five families and five removal sets, without and with operators."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from oracles import (
    FAMILIES,
    identity_reference,
    logits,
    random_ids,
    reload,
    step_error,
    tiny_model,
)

REMOVALS = {
    "first": [0],
    "last": [7],
    "middle": [3, 4],
    "scattered": [1, 4, 6],
    "all_but_two": [1, 2, 3, 5, 6, 7],
}
IDS = random_ids()


def prune_by_ghost(dense, layers):
    windows = random_ids(6, 48, seed=2)
    return gl.prune(dense, layers=layers, recover="ghost", windows=windows, ridge=1e-3)


@pytest.fixture(scope="module", params=FAMILIES)
def dense(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("removed", REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize("recover", ["none", "ghost", "linearpatch-rotate"])
def test_three_oracles(dense, removed, recover, tmp_path):
    before = logits(dense, IDS)
    result = gl.prune(
        dense,
        layers=",".join(map(str, removed)),
        recover=recover,
        ridge=1e-3,
        windows=random_ids(6, 48, seed=2),
    )
    pruned = result.model
    assert len(decoder_layers(pruned)) == 8 - len(removed) == pruned.config.num_hidden_layers
    operators = {boundary.stop: fit.tensors["m"] for boundary, fit in result.fits.items()}
    expected = identity_reference(dense, removed, IDS, operators)
    if recover != "none":  # the operators do something, or this test proves nothing
        assert len(operators) == len(result.plan.boundaries)
        assert (expected - identity_reference(dense, removed, IDS)).abs().max() > 1e-2
        assert (logits(pruned, IDS) - expected).abs().max() < 1e-4
    else:
        assert torch.equal(logits(pruned, IDS), expected)
    assert step_error(pruned, IDS) < 1e-4

    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out")
    assert torch.equal(logits(loaded, IDS), logits(pruned, IDS))
    assert step_error(loaded, IDS) < 1e-4

    # CASES 12: the dense model is as it was, cache included, without a second copy of weights.
    assert torch.equal(logits(dense, IDS), before)
    assert dense.config.num_hidden_layers == 8
    assert step_error(dense, IDS) < 1e-4
    own = {tensor.data_ptr() for tensor in dense.parameters()}
    extra = [name for name, p in pruned.named_parameters() if p.data_ptr() not in own]
    assert all(".ghost_" in name for name in extra)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_static_cache(family):
    dense = tiny_model(family)
    result = prune_by_ghost(dense, "2-3")
    cache = StaticCache(config=result.model.config, max_cache_len=64)
    assert step_error(result.model, IDS, cache=cache) < 1e-4


def test_removing_nothing_changes_nothing():
    model = tiny_model()
    before = logits(model, IDS)
    assert gl.remove_layers_(model, []) is model
    assert torch.equal(logits(model, IDS), before)
    assert model.config.num_hidden_layers == 8


def test_gemma_layer_types_are_filtered_by_kept_index():
    dense = tiny_model("gemma3", num_layers=12)
    types = list(dense.config.layer_types)
    result = gl.prune(dense, layers="5-6", recover="none")
    assert result.model.config.layer_types == [types[layer] for layer in result.plan.kept]
    assert result.model.config.layer_types != types[:10]  # cutting to length is another list
    assert dense.config.layer_types == types


def test_layer_index_is_renumbered_everywhere():
    result = gl.prune(tiny_model(), layers="2-4", recover="none")
    for index, layer in enumerate(decoder_layers(result.model)):
        found = {m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")}
        assert found == {index}


def test_unknown_per_layer_list_is_refused_before_anything_changes():
    model = tiny_model()
    model.config.layer_magic = list(range(8))
    with pytest.raises(gl.UnsupportedModelError, match="layer_magic"):
        gl.remove_layers_(model, [2])
    assert len(decoder_layers(model)) == 8


def test_tied_embeddings_stay_tied(tmp_path):
    dense = tiny_model("llama", tie_word_embeddings=True)
    result = prune_by_ghost(dense, "3-4")
    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out")
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    per_layer = sum(p.numel() for p in decoder_layers(dense)[3].parameters())
    operator = 64 * 64
    expected = sum(p.numel() for p in dense.parameters()) - 2 * per_layer + operator
    assert sum(p.numel() for p in loaded.parameters()) == expected
    assert torch.equal(logits(loaded, IDS), logits(result.model, IDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operator_has_the_dtype_of_the_model(dtype, tmp_path):
    tiny_model().to(dtype).save_pretrained(tmp_path / "dense")
    dense = reload(tmp_path / "dense", dtype="auto")  # `.to` alone also rounds rotary buffers
    result = prune_by_ghost(dense, "3-4")
    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded, IDS), logits(result.model, IDS))
    stored = loaded.model.layers[3].ghost_input.map.weight.T
    fit = next(iter(result.fits.values()))
    assert torch.equal(stored, fit.tensors["m"])  # the errors reported are after rounding


def test_encoder_is_refused():
    from transformers import BertConfig, BertLMHeadModel

    encoder = BertLMHeadModel(
        BertConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=99,
        )
    )
    with pytest.raises(gl.UnsupportedModelError, match="encoder"):
        gl.prune(encoder.eval(), layers="1", recover="none")
