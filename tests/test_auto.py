"""`--select auto`: planted answers, and never worse than the best single selector."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import ghostlayers as gl
from ghostlayers import search
from ghostlayers.candidates import (
    Candidate,
    best_blocks,
    eigengap_clusters,
    starting_candidates,
    swaps,
)
from ghostlayers.decoder import decoder_layers
from ghostlayers.evaluation import window_losses
from ghostlayers.guard_text import guard_windows
from ghostlayers.moments import held_out_windows
from ghostlayers.scored_cut import Scored, choose
from ghostlayers.selectors import SELECTORS, SelectionContext
from ghostlayers.similarity import Similarity
from oracles import logits, random_ids, tiny_model

ALLOWED = (1, 2, 3, 4, 5, 6)


def speak(model, windows=24, length=48):
    """Windows that a model samples itself: on them it is the best model there is."""
    draw = torch.Generator().manual_seed(0)
    ids = random_ids(windows, 1, seed=3)
    while ids.shape[1] < length:
        shares = logits(model, ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(shares, 1, generator=draw)], dim=1)
    return ids


def adds_a_constant_(layer, constant) -> None:
    """Make a GPT-2 layer x → x + constant."""
    with torch.no_grad():
        for linear in (layer.attn.c_proj, layer.mlp.c_proj):
            linear.weight.zero_()
            linear.bias.zero_()
        layer.mlp.c_proj.bias.copy_(constant)


def gpt2():
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(3)
    return model


@pytest.fixture(scope="module")
def hidden():
    """Layers 2 and 5 add a multiple of the ones vector, which every LayerNorm takes out again.

    Without both nothing changes, but the cosine of their input and output is low.
    """
    model = gpt2()
    for layer, size in ((2, 2.0), (5, -2.0)):
        adds_a_constant_(decoder_layers(model)[layer], torch.full((64,), size))
    return model, speak(model, 16, 40)


@pytest.fixture(scope="module")
def spoken():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight *= 5
    return model, speak(model, 16, 40)


def auto(model, ids, num_remove, **settings):
    settings = {"recover": "none", "batch_size": 4, **settings}
    return gl.prune(model, num_remove=num_remove, select="auto", windows=ids, **settings)


@pytest.fixture(scope="module")
def found(spoken):
    """Results of searches on the model of `spoken`, each made once."""
    made = {}

    def search_once(recover, num_remove):
        key = recover, num_remove
        if key not in made:
            made[key] = auto(*spoken, num_remove, recover=recover)
        return made[key]

    return search_once


# --- planted answers


def test_swaps_find_layers_that_no_selector_proposes(hidden):
    model, ids = hidden
    for selector in SELECTORS:
        plan = gl.prune(model, num_remove=2, select=selector, recover="none", windows=ids).plan
        assert plan.removed != (2, 5)
    result = auto(model, ids, 2)
    assert result.plan.removed == (2, 5)
    found = result.record["search"]
    best = found["candidates"][0]
    assert best["source"] == "swap" and best["layers"] == found["taken"]
    assert best["gain"] > 2 * best["gain_standard_error"]
    assert best["loss"] == pytest.approx(found["loss_dense"], abs=1e-5)
    assert found["rounds"] == 2


def test_candidates_are_scored_after_their_repair():
    """Layer 4 adds a vector that a linear map can add: channel 0 of its input is constant."""
    model = gpt2()
    layers = decoder_layers(model)
    with torch.no_grad():
        model.transformer.wte.weight[:, 0], model.transformer.wpe.weight[:, 0] = 1.0, 0.0
        for layer in layers[:4]:
            for linear in (layer.attn.c_proj, layer.mlp.c_proj):
                linear.weight[:, 0], linear.bias[0] = 0.0, 0.0
    vector = torch.randn(64, generator=torch.Generator().manual_seed(5))
    adds_a_constant_(layers[4], 2 * vector)
    ids = speak(model, 16, 40)
    found = auto(model, ids, 1, recover="ghost").record["search"]
    entries = {tuple(entry["layers"]): entry for entry in found["candidates"]}
    assert entries[4,]["loss"] == pytest.approx(found["loss_dense"], abs=1e-4)
    assert entries[4,]["loss_none"] > found["loss_dense"] + 0.3
    assert min(entries, key=lambda cut: entries[cut]["loss_none"]) != next(iter(entries))


# --- against the selectors


def scored(source, *losses, none=9.0):
    return Scored(Candidate((1,), source), (none,) * len(losses), losses)


STEADY = scored("streamline, block", 3.0, 4.0, 5.0, 6.0)


@pytest.mark.parametrize(
    ("other", "better"),
    [
        (scored("swap", 2.9, 3.9, 4.9, 5.9), True),
        (scored("block", 2.9, 3.9, 4.9, 5.9), True),
        (scored("swap", 2.0, 4.1, 5.1, 6.1), False),  # 0.175 ± 0.275
        (scored("swap", 2.9, 3.9, 5.0, 6.0), False),  # 0.05 ± 0.029; 2.35 errors are asked for
        (scored("swap", 2.8, 3.9, 4.9, 6.0), True),  # 0.1 ± 0.041
        (scored("swap", 2.8, math.inf, 4.8, 5.8, none=math.inf), False),
        (scored("shortgpt", 2.0, 4.1, 5.1, 6.1), True),  # of selectors the lowest
        (scored("swap", 9.9, 9.9, 9.9, 9.9, none=2.5), True),  # its repair would not be used
    ],
)
def test_what_is_no_selectors_must_be_better_by_more_than_its_noise(other, better):
    ranked = sorted([STEADY, other], key=lambda item: item.loss)
    choice = choose(ranked)
    assert choice.taken is (other if better else STEADY)
    assert choice.selected is (other if other.candidate.is_selected else STEADY)
    entry = other.to_dict(choice.selected)
    assert (entry["gain"] is None) == (other.loss == math.inf)


def test_the_best_of_those_that_are_sure_is_taken():
    ranked = [
        scored("swap", 1.0, 4.1, 5.1, 6.1),
        scored("swap", 2.7, 3.8, 4.8, 5.8),
        scored("block", 2.9, 3.9, 4.9, 5.9),
        STEADY,
        scored("lorp K=2", 3.5, 4.5, 5.5, 6.5),
    ]
    choice = choose(ranked)
    assert (choice.selected, choice.taken) == (ranked[3], ranked[1])
    assert choice.errors == pytest.approx(3.74, abs=0.01)  # t of 3 degrees of freedom, 0.05 / 3
    choice = choose(ranked[:1])  # no selector has an answer
    assert choice.selected is choice.taken is ranked[0]


def test_more_cuts_need_a_larger_gain():
    """The lowest of many cuts is low by chance."""
    rival = scored("swap", 2.8, 3.9, 4.9, 6.0)
    same = [STEADY, *(scored("swap", *STEADY.losses) for _ in range(20))]
    assert choose([rival, STEADY]).taken is rival
    assert choose([rival, *same]).taken is STEADY


def test_one_window_says_nothing_about_chance():
    one = [scored("swap", 1.0), scored("lorp K=2", 5.0)]
    assert choose(one).taken is one[1]
    bad = scored("lorp K=2", math.inf, none=math.inf)
    assert choose([one[0], bad]).taken is one[0]


@pytest.mark.parametrize(
    ("recover", "num_remove"), [("none", 3), ("ghost", 1), ("ghost-robust", 2)]
)
def test_never_worse_than_the_best_selector(spoken, found, recover, num_remove):
    model, ids = spoken
    result = found(recover, num_remove)
    entries = {tuple(e["layers"]): e for e in result.record["search"]["candidates"]}
    held_out = guard_windows(ids)
    for selector in SELECTORS:
        single = gl.prune(
            model, num_remove=num_remove, select=selector, recover="none", windows=ids
        )
        entry = entries[single.plan.removed]
        assert entries[result.plan.removed]["loss"] <= entry["loss"] <= entry["loss_none"]
        losses = window_losses(single.model, held_out)
        assert entry["loss_none"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_repaired_loss_is_of_operators_fitted_without_the_held_out_windows(spoken, found):
    from ghostlayers.operators import OperatorFit
    from ghostlayers.steps import attach_operators_

    model, ids = spoken
    result = found("ghost", 1)
    for entry in result.record["search"]["candidates"][:3]:
        text = ",".join(map(str, entry["layers"]))
        bare = gl.prune(model, layers=text, recover="none")
        moments = gl.collect_moments(model, list(ids.split(4)), bare.plan.boundaries)
        fits = {
            boundary: gl.fit_operator(split, operator="ghost", dtype=torch.float32)
            for boundary, split in moments.items()
        }
        parts = {b: OperatorFit("ghost", fit.fit_part, {}) for b, fit in fits.items()}
        attach_operators_(bare.model, bare.plan, parts)
        losses = window_losses(bare.model, guard_windows(ids))
        wanted = min(sum(losses) / len(losses), entry["loss_none"])
        assert entry["loss"] == pytest.approx(wanted, abs=1e-4)


def test_same_input_same_search(spoken, found):
    results = [found("ghost-robust", 2), auto(*spoken, 2, recover="ghost-robust")]
    records = [result.record for result in results]
    assert records[0]["search"] == records[1]["search"]
    assert records[0]["removed"] == records[1]["removed"]


def test_layers_given_are_not_searched(spoken):
    model, ids = spoken
    result = gl.prune(model, layers="2", select="auto", recover="ghost", windows=ids[:1])
    assert result.plan.removed == (2,)
    assert (result.record["search"], result.record["selector"]) == (None, "layers")


def test_each_boundary_is_measured_once_in_groups_that_fit_in_memory(spoken, found, monkeypatch):
    seen, collect = [], search.collect_moments

    def counting(model, batches, boundaries, **keywords):
        seen.append(list(boundaries))
        return collect(model, batches, boundaries, **keywords)

    monkeypatch.setattr(search, "collect_moments", counting)
    monkeypatch.setattr(search, "MAX_MOMENTS_BYTES", 3 * 8 * 8 * 64**2)
    result = auto(*spoken, 1, recover="ghost")
    every = [boundary for group in seen for boundary in group]
    assert len(every) == len(set(every)) and max(map(len, seen)) == 3
    assert result.record["search"] == found("ghost", 1).record["search"]


def test_refused_cuts_are_left_out(spoken, found, monkeypatch):
    model, ids = spoken
    best = found("none", 3).plan.removed
    cut = search.cut

    def refusing(model, plan):
        if plan.removed == best:
            raise gl.UnsupportedModelError("not this one.")
        return cut(model, plan)

    monkeypatch.setattr(search, "cut", refusing)
    result = auto(model, ids, 3)
    assert result.plan.removed != best
    assert {"layers": list(best), "reason": "not this one."} in result.record["search"]["refused"]

    def refuse(_model, plan):
        raise gl.UnsupportedModelError(f"never {len(plan.removed)}.")

    monkeypatch.setattr(search, "cut", refuse)
    with pytest.raises(gl.UnsupportedModelError, match="never 3"):
        auto(model, ids, 3)


def test_operators_that_are_no_boundary_operator_are_scored_as_robust():
    names = ("none", "ghost", "ghost-robust", "some-fold")
    assert [search.scoring_operator(name) for name in names] == [
        "none", "ghost", "ghost-robust", "ghost-robust",
    ]  # fmt: skip


# --- candidates


def similarity_of(rows) -> Similarity:
    return Similarity(np.asarray(rows, dtype=float), num_tokens=1)


def context_of(matrix, num_remove, allowed=ALLOWED, num_clusters=None):
    return SelectionContext(similarity_of(matrix), num_remove, allowed, num_clusters)


def decaying(depth=8, rate=0.1):
    return np.exp(-rate * np.abs(np.subtract.outer(np.arange(depth + 1), np.arange(depth + 1))))


@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 3), (2, 3, 4, 3)])
def test_eigengap_counts_planted_groups(sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    matrix = np.where(group[:, None] == group, 0.95, -0.9)
    np.fill_diagonal(matrix, 1.0)
    assert eigengap_clusters(matrix) == len(sizes)


def test_eigengap_of_small_models():
    for size in (1, 2, 3, 4):
        assert eigengap_clusters(np.eye(size)) == 2


def test_starting_candidates_name_their_sources():
    found = starting_candidates(context_of(decaying(), 2))
    assert len({candidate.removed for candidate in found}) == len(found)
    sources = ", ".join(candidate.source for candidate in found)
    for name in ("streamline", "shortgpt", "lorp K=2", "lorp K=3", "lorp K=4", "block"):
        assert name in sources
    forced = starting_candidates(context_of(decaying(), 2, num_clusters=5))
    names = [part for c in forced for part in c.source.split(", ") if part.startswith("lorp")]
    assert names == ["lorp K=5"]


def test_selectors_without_an_answer_are_left_out():
    found = starting_candidates(context_of(decaying(), 2, allowed=(1, 3, 5)))
    assert found and not any("streamline" in c.source or "block" in c.source for c in found)


def test_swaps_are_ranked_by_distance():
    matrix = decaying()
    matrix[5, 6] = matrix[6, 5] = 0.999
    context = context_of(matrix, 2)
    found = [swap.removed for swap in swaps(context, (2, 3))]
    assert len(found) == len(set(found)) == 2 * 4
    assert found[0] == (2, 5)
    assert best_blocks(context)[0] == (1, 2)


@pytest.mark.parametrize("count", [4, 5, 31, 32, 33, 64, 100, 128])
def test_search_windows_keep_the_held_out_pattern(count):
    chosen = search.search_windows(count)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(count, 32)
    held_out = [chosen[index] for index in held_out_windows(len(chosen))]
    assert set(held_out) <= set(held_out_windows(count))
    assert not set(chosen) - set(held_out) & set(held_out_windows(count))


# --- what a user sees


def test_prune_prints_the_search(work, run, tmp_path):
    flags = ["--calibration", work / "t.txt", "--num-windows", 8, "--window", 32, "--batch-size", 4]
    flags += ["--num-remove", 2, "--select", "auto", "--recover", "ghost-robust", "--seed", 1]
    status, out, err = run("prune", work / "m", "-o", tmp_path / "o", *flags, "--json", "-")
    assert status == 0
    printed = json.loads(out)
    record = json.loads((tmp_path / "o" / "ghostlayers.json").read_text())
    assert printed == {"out": str(tmp_path / "o"), **record}
    found = record["search"]
    assert record["selector"] == "auto" and record["removed"] == found["taken"]
    assert (found["operator"], found["windows"], found["held_out_windows"]) == (
        "ghost-robust",
        8,
        2,
    )
    losses = [entry["loss"] for entry in found["candidates"]]
    assert losses == sorted(losses) and len(losses) > 8
    for entry in found["candidates"]:
        assert set(entry) == {
            *("layers", "source", "loss", "perplexity", "loss_none"),
            *("gain", "gain_standard_error"),
        }
        assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
    assert err.index("held-out loss") < err.index("removed 2 of 8") < err.index("error before")
    assert "streamline" in err and f"{losses[0]:.4f}" in err and "dense model: loss" in err


def test_bad_input_is_one_line(work, refuse, tmp_path):
    flags = ["--calibration", work / "t.txt", "--window", 32, "--select", "auto"]

    def fails(*more):
        return refuse(tmp_path, "prune", work / "m", "-o", tmp_path / "o", *flags, *more)

    assert "`num_remove` is 7" in fails("--num-remove", 7)
    assert "`num_windows` is 3" in fails("--num-remove", 2, "--num-windows", 3)
    assert "Did you mean 'auto'" in fails("--num-remove", 2, "--select", "autp")


def test_too_few_windows_given():
    with pytest.raises(gl.CalibrationError, match="there are 3 calibration windows"):
        auto(tiny_model(), random_ids(3, 32), 2)


def test_similarity_alone_is_not_enough():
    with pytest.raises(gl.GhostlayersError, match="needs the model"):
        gl.select_layers(similarity_of(decaying()), selector="auto", num_remove=2)
