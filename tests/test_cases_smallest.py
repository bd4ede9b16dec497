"""Smallest inputs of CASES that no other file has: 1, 4, 5, 6, 9, 10, 42 and 66."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, StaticCache

import ghostlayers as gl
from families import tiny_model as family_model
from ghostlayers.moments import MomentAccumulator
from ghostlayers.similarity import SimilarityAccumulator
from ghostlayers.sweep import sweep
from oracles import COMMON, identity_reference, logits, random_ids, redraw_, step_error, tiny_model
from test_cases import check_oracles

IDS = random_ids()


def test_1_the_layers_that_stay_are_numbered_anew():
    dense = tiny_model()
    pruned = gl.prune(dense, layers="2-4", recover="none", progress=False).model
    numbers = [module.layer_idx for module in pruned.modules() if hasattr(module, "layer_idx")]
    assert numbers == [0, 1, 2, 3, 4]
    assert torch.equal(logits(pruned, IDS), identity_reference(dense, [2, 3, 4], IDS))
    for cache in (
        DynamicCache(config=pruned.config),
        StaticCache(config=pruned.config, max_cache_len=64),
    ):
        assert step_error(pruned, IDS, cache=cache) < 1e-4


def gemma(layer_types=None, depth=12):
    """Gemma 3 as the case has it: every sixth layer sees all, windows of 8, ids of 40."""
    config = Gemma3TextConfig(
        num_hidden_layers=depth,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
        layer_types=layer_types,
        **COMMON,
    )
    return redraw_(AutoModelForCausalLM.from_config(config))


def test_4_and_5_kinds_of_attention_follow_their_layers(tmp_path):
    dense = gemma()
    kinds = list(dense.config.layer_types)
    result = check_oracles(dense, "5-6", tmp_path)
    found = result.model.config.layer_types
    assert found == kinds[:5] + kinds[7:] and len(found) == 10 != len(kinds)
    cut_to_length = gemma(kinds[:10], depth=10)  # the fault, with the same weights
    cut_to_length.load_state_dict(result.model.state_dict())
    assert (logits(cut_to_length, IDS) - logits(result.model, IDS)).abs().max() > 0.1


@pytest.mark.parametrize("family", ["mellum", "cohere2_moe"])
def test_6_kinds_of_mlp_follow_their_layers(family, tmp_path):
    dense = family_model(family)
    kinds = list(dense.config.mlp_layer_types)
    assert len(set(kinds)) == 2
    found = check_oracles(dense, "0", tmp_path).model.config.mlp_layer_types
    assert found == kinds[1:] != kinds[:7]


@pytest.mark.parametrize("layer", [2, 5, 8])
def test_9_per_layer_embeddings_and_borrowed_keys(layer):
    dense = family_model("gemma3n_text", num_layers=10, num_kv_shared_layers=4)
    names = "num_kv_shared_layers|hidden_size_per_layer_input"
    with pytest.raises(gl.UnsupportedModelError, match=names):
        gl.prune(dense, layers=str(layer), recover="none", progress=False)


def test_10_no_shared_layers_are_none(tmp_path):
    changes = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    dense = family_model("gemma3n_text", **changes)
    result = check_oracles(dense, "7", tmp_path)
    assert result.model.config.num_kv_shared_layers == 0


def test_42_a_last_batch_that_is_not_full_counts():
    ids = random_ids(3, 24)
    result = gl.prune(
        tiny_model(), layers="3", recover="ghost", windows=ids, batch_size=8, progress=False
    )
    assert result.record["boundaries"][0]["num_tokens"] == 72
    assert result.record["calibration"]["tokens"] == 72


def test_66_what_is_kept_does_not_grow_with_the_batches():
    model, cut = tiny_model(), gl.Boundary(3, 5)
    sizes = []
    for count in (4, 400):
        batches = list(random_ids(count, 4).split(1))
        moments = MomentAccumulator([cut], num_windows=count, window=4)
        kept = [SimilarityAccumulator(8), moments]
        sweep(model, batches, kept, progress=False)
        tensors = [tensor for each in kept for tensor in each.parts.tensors().values()]
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        assert moments.result()[cut].total.num_tokens == 4 * count
    square = 64 * 64 * 8
    assert sizes[0] == sizes[1] < 1.1 * (2 * 2 * 2 * square)  # 2 sums, 2 parts, 2 halves each
