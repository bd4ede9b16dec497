"""Text that the dense model writes: from fair first tokens, reproducible, and without traces."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ghostlayers.guard_text import WRITTEN_TOKENS, WRITTEN_WINDOWS, guard_scorer, guard_windows
from ghostlayers.sampling import written_ids
from oracles import logits, random_ids, tiny_model


def sharp():
    """A model whose text is easy to tell from random ids."""
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    return model


def loss(model, ids):
    """Cross-entropy of the tokens after the first, in nats."""
    found = logits(model, ids)[:, :-1].flatten(0, 1)
    return float(F.cross_entropy(found, ids[:, 1:].flatten()))


def test_written_text_is_the_models_own():
    model, like = sharp(), random_ids(4, 16)
    ids = written_ids(model, like, num_windows=20, window=24, progress=False)
    assert ids.shape == (20, 24)
    assert ids.dtype == torch.int64
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=logits(model, ids)[:, :-1]).entropy()
    assert abs(loss(model, ids) - float(entropy.mean())) < 0.25  # sampled at temperature 1
    assert loss(model, random_ids(20, 24, seed=5)) > loss(model, ids) + 2.0


def test_first_tokens_are_those_of_the_given_windows():
    model, like = sharp(), random_ids(4, 16)
    with_bos = torch.cat([torch.full((4, 1), 1), like], dim=1)
    assert set(written_ids(model, with_bos, num_windows=6, window=3)[:, 0].tolist()) == {1}
    starts = set(written_ids(model, like, num_windows=30, window=3)[:, 0].tolist())
    assert len(starts) > 5
    assert starts <= set(like.flatten().tolist())


def test_one_seed_gives_one_text_and_leaves_no_trace():
    model, like = sharp().train(), random_ids(4, 16)
    state, config = torch.random.get_rng_state(), model.generation_config
    one, two, other = (
        written_ids(model, like, num_windows=3, window=12, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert model.generation_config is config


def test_the_guard_writes_once_and_never_longer_windows_than_it_is_given():
    model, ids = tiny_model(), random_ids(8, 20)
    scorer = guard_scorer(model, ids, progress=False)
    written = scorer.written()
    assert scorer.written() is written
    assert written.ids.shape == (WRITTEN_WINDOWS, 20)
    assert torch.equal(scorer.ids, guard_windows(ids))
    assert all(map(math.isfinite, written.dense_losses([2])))
    written.keep([2])
    scorer.forget()
    assert not written.states
    long = guard_scorer(model, random_ids(4, WRITTEN_TOKENS + 2), progress=False)
    assert long.written().ids.shape[1] == WRITTEN_TOKENS


def test_nothing_is_written_with_offloaded_weights():
    model = tiny_model()
    model.lm_head.to("meta")
    assert guard_scorer(model, random_ids(8, 20), progress=False).written() is None
