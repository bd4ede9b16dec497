"""Selectors that run the model: planted answers, plain-autograd and naive-loop oracles."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import families
import ghostlayers as gl
from ghostlayers import removal_losses, vocabulary_bound
from ghostlayers.decoder import decoder_layers, remove_layers_, share_tensors
from ghostlayers.evaluation import window_losses
from ghostlayers.greedy_removal import remove_greedily
from ghostlayers.plan import PruningPlan
from ghostlayers.suffix import SuffixScorer
from ghostlayers.weight_scores import taylor_scores
from oracles import random_ids, tiny_model
from tiny_checkpoints import tiny_tokenizer

IDS = random_ids(6, 24, seed=5)
KINDS = ["llama", "gpt2", "gemma2", "qwen3_moe", "gpt_neox", "opt"]
# The last maps of both branches, by the names of the families above.
OUTPUTS = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "dense_4h_to_h", "attention.dense")


@torch.no_grad()
def make_identity_(model, *layers):
    """Zero what a layer adds to the residual stream: it becomes an exact identity."""
    for index in layers:
        for name, parameter in decoder_layers(model)[index].named_parameters():
            if any(output in name for output in OUTPUTS):
                parameter.zero_()
    return model


@torch.no_grad()
def own_text(model, count=4, length=24):
    """Windows of the tokens that the model finds likeliest: any damage raises their loss."""
    ids = random_ids(count, 4, seed=11)
    while ids.shape[1] < length:
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def snapshot(model):
    """Everything about a dense model that a selector must leave as it is."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [(id(p), p.requires_grad, None if p.grad is None else p.grad.clone(), p._version)
         for p in model.parameters()],
        [(name, module.training, len(module._forward_hooks)) for name, module in
         model.named_modules()],
        model.config.to_dict(),
    )  # fmt: skip


def assert_unchanged(model, before):
    after = snapshot(model)
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    for (one, flag, grad, version), (two, old_flag, old, old_version) in zip(
        after[1], before[1], strict=True
    ):
        assert (one, flag, version) == (two, old_flag, old_version)
        assert (grad is None) == (old is None) and (grad is None or torch.equal(grad, old))
    assert after[2:] == before[2:]


def prune(model, select, k, ids=IDS, **settings):
    return gl.prune(model, num_remove=k, select=select, recover="none", windows=ids, **settings)


# Shortened LLaMA: perplexity.


def naive_losses(model, layers, ids=IDS):
    found = {}
    for layer in layers:
        losses = window_losses(remove_layers_(share_tensors(model), [layer]), ids)
        found[layer] = sum(losses) / len(losses)
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_ppl_is_that_of_the_whole_model(kind):
    model = families.tiny_model(kind)
    depth = len(decoder_layers(model))
    result = prune(model, "shortened-ppl", 2, batch_size=2)
    scores = {entry["layer"]: entry for entry in result.record["selection"]["scores"]}
    wanted = naive_losses(model, range(1, depth - 1))
    assert {layer: e["loss"] for layer, e in scores.items()} == pytest.approx(wanted, abs=1e-5)
    assert scores[1]["perplexity"] == pytest.approx(math.exp(wanted[1]), rel=1e-4)
    assert result.record["removed"] == sorted(sorted(wanted, key=wanted.get)[:2])
    assert result.record["rls"] is None and result.record["selector"] == "shortened-ppl"


def test_ppl_with_a_bound_on_kept_states(monkeypatch):
    model, kept = tiny_model(), []
    limit, original = 3 * IDS.numel() * 64 * 4, removal_losses.kept_states

    def bounded(*arguments):
        kept.append(original(*arguments, limit=limit))
        return kept[-1]

    monkeypatch.setattr(removal_losses, "kept_states", bounded)
    result = prune(model, "shortened-ppl", 2)
    assert kept == [[1, 3, 5]]
    found = {entry["layer"]: entry["loss"] for entry in result.record["selection"]["scores"]}
    assert found == pytest.approx(naive_losses(model, range(1, 7)), abs=1e-5)


def test_only_the_first_tokens_of_the_first_windows_are_read():
    model = tiny_model()
    settings = {"score_windows": 3, "score_window": 10}
    result = prune(model, "shortened-ppl", 1, **settings)
    selection = result.record["selection"]
    assert (selection["windows"], selection["window"]) == (3, 10)
    wanted = naive_losses(model, range(1, 7), IDS[:3, :10])
    found = {entry["layer"]: entry["loss"] for entry in selection["scores"]}
    assert found == pytest.approx(wanted, abs=1e-5)
    assert result.record["config"]["score_windows"] == 3


# Planted identities.


@pytest.mark.parametrize(
    ("kind", "select"),
    [
        ("llama", "shortened-ppl"),
        ("gpt2", "greedy-ppl"),
        *((kind, "shortened-taylor") for kind in ("llama", "gpt2", "gemma2")),
    ],
)
def test_identities_are_found(kind, select):
    model = make_identity_(families.tiny_model(kind), 2, 5)
    ids, before = own_text(model), snapshot(model)
    result = prune(model, select, 2, ids, plus=False)
    assert result.record["removed"] == [2, 5]
    assert_unchanged(model, before)
    if select == "greedy-ppl":
        dense = sum(window_losses(model, ids)) / len(ids)
        order = result.record["selection"]["order"]
        assert [entry["loss"] for entry in order] == pytest.approx([dense, dense], abs=1e-5)
    if select == "shortened-taylor":
        scores = {e["layer"]: e["score"] for e in result.record["selection"]["scores"]}
        assert scores[2] == scores[5] == 0.0 and min(scores[k] for k in (1, 3, 4, 6)) > 0


def test_magnitude_finds_the_smallest_weights_and_reads_no_text():
    model = tiny_model(num_layers=10)
    with torch.no_grad():
        for layer, factor in ((5, 0.5), (7, 0.1), (1, 0.01)):
            for parameter in decoder_layers(model)[layer].parameters():
                parameter.mul_(factor)
    before = snapshot(model)
    result = gl.prune(model, num_remove=2, select="shortened-magnitude", recover="none")
    assert result.record["removed"] == [5, 7]  # "+" keeps 0 to 3 and 8, 9
    assert result.record["calibration"] is None
    assert_unchanged(model, before)
    scores = {e["layer"]: e["score"] for e in result.record["selection"]["scores"]}
    weights = [p for p in decoder_layers(model)[7].parameters() if p.ndim > 1]
    wanted = sum(float(p.detach().double().abs().sum()) for p in weights)
    assert sorted(scores) == [4, 5, 6, 7] and scores[7] == pytest.approx(wanted, rel=1e-6)
    free = gl.prune(model, num_remove=2, select="shortened-magnitude", recover="none", plus=False)
    assert free.record["removed"] == [1, 7]


# Shortened LLaMA: Taylor.


def autograd_scores(model, parts):
    """Σ |Σ_batches θ·g| over the matrices of each layer, by plain autograd on everything."""
    model = copy.deepcopy(model).requires_grad_(True)
    sums, tokens = {}, sum(part.shape[0] * (part.shape[1] - 1) for part in parts)
    for part in parts:
        model.zero_grad()
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum")
        (loss / tokens).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.detach() * p.grad
    own = {id(p): name for name, p in model.named_parameters()}
    return [
        sum(float(sums[own[id(p)]].abs().sum()) for p in layer.parameters()
            if p.ndim > 1 and own[id(p)] in sums)
        for layer in decoder_layers(model)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_taylor_is_plain_autograd(kind):
    model = families.tiny_model(kind)
    before, wanted = snapshot(model), autograd_scores(model, [IDS])
    layers = range(len(wanted))
    for batch_size, limit in ((6, 1), (1, 2**30), (2, 1), (4, 300_000)):
        found = taylor_scores(model, IDS, layers, batch_size=batch_size, max_sums_bytes=limit)
        assert list(found.values()) == pytest.approx(wanted, rel=1e-3)
        assert list(found) == list(layers)
    assert_unchanged(model, before)
    each = [autograd_scores(model, [part]) for part in IDS.split(1)]
    absolute_first = [sum(scores) / len(IDS) for scores in zip(*each, strict=True)]
    assert all(a > 1.05 * b for a, b in zip(absolute_first, wanted, strict=True))


def test_taylor_leaves_flags_gradients_and_mode():
    model = tiny_model().train()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
        if index % 4 == 0:
            parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    with torch.no_grad():
        found = taylor_scores(model, IDS, [3, 4], batch_size=2)
    assert_unchanged(model, before)
    assert model.training
    assert found == pytest.approx(taylor_scores(model.eval(), IDS, [3, 4], batch_size=6), rel=1e-4)


def test_taylor_in_bfloat16_sums_in_float32():
    model = tiny_model().to(torch.bfloat16)
    found = taylor_scores(model, IDS, range(8), batch_size=3)
    wanted = autograd_scores(model.float(), [IDS])
    assert list(found.values()) == pytest.approx(wanted, rel=0.1)


def test_taylor_refuses_what_is_not_finite():
    model = tiny_model()
    with torch.no_grad():
        decoder_layers(model)[3].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(gl.CalibrationError, match=r"layers \[.*3"):
        taylor_scores(model, IDS, range(8))
    with pytest.raises(gl.CalibrationError, match=r"the weights of layers \[3\]"):
        prune(model, "shortened-magnitude", 1, plus=False)


# Greedy.


def naive_greedy(model, ids, k, allowed):
    """Remove, measure the whole model, repeat."""
    removed, losses = [], []
    for _ in range(k):
        trials = {}
        for layer in sorted(set(allowed) - set(removed)):
            pruned = remove_layers_(share_tensors(model), [*removed, layer])
            found = window_losses(pruned, ids)
            trials[layer] = sum(found) / len(found)
        best = min(trials, key=lambda layer: (trials[layer], layer))
        removed.append(best)
        losses.append(trials[best])
    return removed, losses


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_greedy_is_the_naive_loop(kind):
    model = families.tiny_model(kind)
    before = snapshot(model)
    allowed = range(1, len(decoder_layers(model)) - 1)
    order, losses = naive_greedy(model, IDS, 2, allowed)
    steps = remove_greedily(model, IDS, allowed, 2, batch_size=4)
    assert [step.layer for step in steps] == order
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-5)
    assert_unchanged(model, before)


def test_greedy_can_remove_all_that_may_go():
    result = prune(tiny_model(num_layers=4), "greedy-ppl", 2)
    assert result.record["removed"] == [1, 2]
    whole = prune(tiny_model(num_layers=4), "greedy-ppl", 3, protect_first=0, protect_last=0)
    assert len(whole.record["selection"]["order"]) == 3


def test_greedy_runs_about_half_of_the_layers():
    model, calls = tiny_model(num_layers=8), [0]

    def count(module, args, output):
        calls[0] += output.shape[1] >= IDS.shape[1]  # not the probes on a few tokens

    for layer in decoder_layers(model):  # copies of the model carry the hooks on
        layer.register_forward_hook(count)
    remove_greedily(model, IDS, range(1, 7), 2)
    ours, calls[0] = calls[0], 0
    naive_greedy(model, IDS, 2, range(1, 7))
    assert calls[0] == len(IDS) * (6 * 7 + 5 * 6)
    assert ours < 0.72 * calls[0]  # half, and one pass per round for the states


FEW = torch.randint(3, 60, (6, 24), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "cohere", "gpt_neox"])
def test_a_part_of_the_vocabulary_bounds_the_loss(kind, monkeypatch):
    monkeypatch.setattr(vocabulary_bound, "MIN_VOCABULARY", 0)
    model = families.tiny_model(kind)
    before = snapshot(model)
    scorer = SuffixScorer(model, FEW, batch_size=4)
    bound = vocabulary_bound.vocabulary_bound(scorer, [2])
    assert bound is not None and set(scorer.states) == {2}
    assert 32 <= bound.head.out_features < 128
    plan = PruningPlan(len(decoder_layers(model)), (2,))
    pruned = remove_layers_(share_tensors(model), plan.removed)
    wanted = window_losses(pruned, FEW, batch_size=4)
    bounded = bound.lower(scorer, scorer.suffix(pruned, plan))
    assert all(low < high - 0.01 for low, high in zip(bounded.lower, wanted, strict=True))
    assert bound.exact(scorer, bounded) == pytest.approx(wanted, abs=1e-5)
    assert scorer.losses(scorer.suffix(pruned, plan)) == pytest.approx(wanted, abs=1e-5)
    assert_unchanged(model, before)


@pytest.mark.parametrize("kind", ["gemma2"])
def test_greedy_with_bounds_is_the_naive_loop(kind, monkeypatch):
    monkeypatch.setattr(vocabulary_bound, "MIN_VOCABULARY", 0)
    exact, original = [], vocabulary_bound.VocabularyBound.exact
    monkeypatch.setattr(
        vocabulary_bound.VocabularyBound,
        "exact",
        lambda *arguments: exact.append(1) or original(*arguments),
    )
    model = families.tiny_model(kind)
    allowed = range(1, len(decoder_layers(model)) - 1)
    order, losses = naive_greedy(model, FEW, 2, allowed)
    steps = remove_greedily(model, FEW, allowed, 2, batch_size=4)
    assert [step.layer for step in steps] == order
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-5)
    assert 2 <= len(exact) <= 2 * len(allowed) - 1


def test_heads_that_cannot_be_cut_are_run_whole(monkeypatch):
    model = tiny_model()
    assert vocabulary_bound.vocabulary_bound(SuffixScorer(model, FEW), []) is None  # small
    monkeypatch.setattr(vocabulary_bound, "MIN_VOCABULARY", 0)
    model.lm_head.register_forward_hook(lambda _m, _a, out: out - out.mean(-1, keepdim=True))
    assert vocabulary_bound.vocabulary_bound(SuffixScorer(model, FEW), []) is None


# Protection by "+".


def test_plus_protects_the_first_four_and_the_last_two_layers():
    with pytest.raises(gl.PlanError, match=r"--no-plus") as caught:
        prune(tiny_model(), "shortened-taylor", 3)
    assert "2 may be removed" in str(caught.value)
    assert prune(tiny_model(), "shortened-taylor", 2).record["removed"] == [4, 5]
    free = prune(tiny_model(), "shortened-taylor", 6, plus=False)
    assert free.record["removed"] == [1, 2, 3, 4, 5, 6]


def test_operators_can_follow():
    result = gl.prune(
        tiny_model(),
        num_remove=1,
        select="shortened-ppl",
        recover="ghost-robust",
        windows=random_ids(8, 40),
    )
    assert result.record["boundaries"][0]["start"] == result.record["removed"][0]
    assert result.record["calibration"]["windows"] == 8


def test_a_budget_by_perplexity_calibrates_whatever_the_selector():
    """The selector reads no window, the budget does."""
    result = gl.prune(
        tiny_model(),
        tiny_tokenizer(),
        max_ppl_ratio=1e6,
        select="shortened-magnitude",
        recover="none",
        plus=False,
        num_windows=4,
        window=16,
        progress=False,
    )
    assert len(result.plan.removed) == 6
    assert result.record["calibration"]["windows"] == 4
