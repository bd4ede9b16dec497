"""Losses from cached hidden states are the whole model's losses, without its lower layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import families
import ghostlayers as gl
from ghostlayers import suffix as suffixes
from ghostlayers.decoder import decoder_layers, remove_layers_, share_tensors
from ghostlayers.evaluation import window_losses
from ghostlayers.operators import OperatorFit
from ghostlayers.plan import PruningPlan
from ghostlayers.repairs import apply_repairs_
from ghostlayers.steps import attach_operators_
from ghostlayers.suffix import SuffixScorer, first_state
from oracles import FAMILIES, random_ids, tiny_model

PLANS = [(3, 4), (1, 4, 6), (5, 6, 7), (2, 7), (0, 1), (0, 3), (1, 2, 3, 4, 5, 6, 7)]
IDS = random_ids(5, 24, seed=7)


def random_fits(plan, size=64):
    draw = torch.Generator().manual_seed(3)
    return {
        boundary: OperatorFit("ghost", {"m": 0.1 * torch.randn(size, size, generator=draw)}, {})
        for boundary in plan.boundaries
    }


def compare(dense, removed, ids=IDS):
    """Losses without and with operators; returns the suffix."""
    plan = PruningPlan(len(decoder_layers(dense)), removed)
    pruned = remove_layers_(share_tensors(dense), removed)
    scorer = SuffixScorer(dense, ids, batch_size=2)
    assert scorer.dense_losses([first_state(plan)]) == window_losses(dense, ids, batch_size=2)
    suffix, fits = scorer.suffix(pruned, plan), random_fits(plan)
    wanted = window_losses(pruned, ids, batch_size=2)
    assert scorer.losses(suffix) == pytest.approx(wanted, abs=1e-5)
    whole = attach_operators_(share_tensors(pruned), plan, fits)
    repaired = window_losses(whole, ids, batch_size=2)
    assert scorer.losses(suffix.with_operators(fits)) == pytest.approx(repaired, abs=1e-5)
    assert repaired != pytest.approx(wanted, abs=1e-3)
    assert scorer.losses(suffix) == pytest.approx(wanted, abs=1e-5)
    return suffix


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("removed", PLANS, ids=str)
def test_losses_are_those_of_the_whole_model(family, removed):
    dense = tiny_model(family)
    suffix = compare(dense, removed)
    start = first_state(PruningPlan(8, removed))
    assert suffix.start == (start or None)
    assert len(decoder_layers(suffix.model)) == 8 - len(removed) - start
    assert len(decoder_layers(dense)) == 8


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma2", "gpt_neo", "cohere2", "mamba", "bloom"])
def test_other_kinds_of_models(kind):
    compare(families.tiny_model(kind), (3, 4))


def test_first_state():
    states = [first_state(PruningPlan(8, removed)) for removed in PLANS]
    assert states == [3, 1, 4, 2, 0, 0, 0]
    assert first_state(PruningPlan(8, ())) == 7


def test_lower_layers_run_once():
    dense, calls = tiny_model(), []
    plan = PruningPlan(8, (3, 4))
    pruned = remove_layers_(share_tensors(dense), plan.removed)
    scorer = SuffixScorer(dense, IDS, batch_size=2)
    scorer.keep([3])
    for layer in decoder_layers(dense):  # the pruned model shares the layers' parameters only
        layer.register_forward_hook(lambda *_: calls.append(1))
    scorer.keep([3])
    suffix = scorer.suffix(pruned, plan)
    scorer.losses(suffix)
    assert not calls
    assert set(scorer.states) == {3}
    assert [part.shape for part in scorer.states[3]] == [(2, 24, 64), (2, 24, 64), (1, 24, 64)]


def test_states_have_the_dtype_of_the_model():
    dense = tiny_model().to(torch.bfloat16)
    plan = PruningPlan(8, (3, 4))
    scorer = SuffixScorer(dense, IDS, batch_size=2)
    suffix = scorer.suffix(remove_layers_(share_tensors(dense), plan.removed), plan)
    assert suffix.start == 3
    assert scorer.states[3][0].dtype == torch.bfloat16
    whole = window_losses(remove_layers_(share_tensors(dense), plan.removed), IDS, batch_size=2)
    assert scorer.losses(suffix) == pytest.approx(whole, abs=2e-2)


def test_refused_suffix_runs_the_whole_model(monkeypatch):
    dense, plan = tiny_model(), PruningPlan(8, (3, 4))
    pruned = remove_layers_(share_tensors(dense), plan.removed)

    def refuse(*_):
        raise gl.UnsupportedModelError("no.")

    monkeypatch.setattr(suffixes, "remove_layers_", refuse)
    scorer = SuffixScorer(dense, IDS)
    suffix = scorer.suffix(pruned, plan)
    assert suffix.start is None and suffix.model is pruned
    assert scorer.losses(suffix) == pytest.approx(window_losses(pruned, IDS), abs=1e-6)


def test_layers_that_share_more_than_a_state_run_the_whole_model():
    """A suffix that does not give the whole model's logits is not used."""
    dense, plan = tiny_model(), PruningPlan(8, (3, 4))
    pruned, seen = remove_layers_(share_tensors(dense), plan.removed), {}
    layers = decoder_layers(pruned)

    def add_first(_module, args, output):
        first = seen.get("first")
        return output if first is None else output + first[:, : output.shape[1]]

    layers[0].register_forward_hook(lambda _m, _a, out: seen.__setitem__("first", out))
    layers[3].register_forward_hook(add_first)
    pruned.register_forward_hook(lambda *_: seen.clear())
    scorer = SuffixScorer(dense, IDS)
    suffix = scorer.suffix(pruned, plan)
    assert suffix.start is None and suffix.model is pruned
    assert scorer.losses(suffix) == pytest.approx(window_losses(pruned, IDS), abs=1e-6)


def test_a_changed_layer_below_the_cut_runs_again():
    dense, plan = tiny_model(), PruningPlan(8, (3, 4))
    pruned = remove_layers_(share_tensors(dense), plan.removed)
    scorer = SuffixScorer(dense, IDS, batch_size=2)
    suffix = scorer.suffix(pruned, plan, 2)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    fit = OperatorFit("fold", {}, {}, weights={"mlp.down_proj.weight": weight})
    changed = {}
    for name, (model, cut) in {
        "whole": (pruned, plan),
        "suffix": (suffix.model, suffix.plan),
    }.items():
        changed[name] = share_tensors(model)
        apply_repairs_(changed[name], cut, {plan.boundaries[0]: fit})
    wanted = window_losses(changed["whole"], IDS, batch_size=2)
    found = scorer.losses(replace(suffix, model=changed["suffix"]))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert wanted != pytest.approx(window_losses(pruned, IDS, batch_size=2), abs=1e-3)
