"""`ghost-robust`: token classes, the weighted fit, the ridge and the guard."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ghostlayers as gl
from ghostlayers import guard
from ghostlayers.guard_text import guard_windows
from ghostlayers.moments import MomentAccumulator, RobustMoments, SplitMoments, held_out_windows
from ghostlayers.operators import OperatorFit
from ghostlayers.operators.ghost_robust import RIDGES, choose_ridge, fit_ghost_robust
from ghostlayers.plan import Boundary, PruningPlan
from ghostlayers.sweep import TokenRows
from ghostlayers.token_classes import (
    NormAccumulator,
    SinkRule,
    above_the_gap,
    cosines,
    place_threshold,
    sink_direction,
)
from oracles import (
    identity_reference,
    logits,
    random_ids,
    reload,
    step_error,
    tiny_model,
)

BOUNDARY = Boundary(2, 4)
RULE = SinkRule(torch.ones(24, dtype=torch.float64) / 24**0.5, 0.9, missed=0.0, false=0.0)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def robust(x, y, massive=None, held_out=0):
    massive = torch.zeros(len(x), dtype=torch.bool) if massive is None else massive
    size, cut = x.shape[1], len(x) - held_out
    split = SplitMoments(BOUNDARY, RobustMoments.zeros(size), RobustMoments.zeros(size))
    split.fit.add(x[:cut], y[:cut], massive[:cut])
    split.held_out.add(x[cut:], y[cut:], massive[cut:])
    return split


def noisy(count=600, size=24):
    x = randn(count, size) * (0.2 + randn(count, 1, seed=9).abs())
    return x, x + x @ (0.3 * randn(size, size, seed=1)) + 0.2 * randn(count, size, seed=2)


# --- token classes


def test_gap_rule_marks_only_what_stands_behind_a_gap():
    norms = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert not above_the_gap(norms).any()
    norms[[3, 500, 900]] = torch.tensor([80.0, 300.0, 90.0])
    assert above_the_gap(norms).nonzero().flatten().tolist() == [3, 500, 900]
    norms[:100], norms[500] = 100.0, 1.0  # a tenth of all tokens is no exception
    assert not above_the_gap(norms).any()
    assert not above_the_gap(torch.zeros(50)).any()
    assert not above_the_gap(torch.ones(1)).any()


def test_massive_in_any_state_is_massive_everywhere():
    accumulator = NormAccumulator(3)
    states = {layer: randn(50, 8, seed=layer).float() for layer in (1, 2, 3)}
    states[1][7] *= 300  # a sink that goes again
    states[3][20] *= 300  # and one that comes later
    accumulator.update(states, TokenRows(torch.zeros(50), torch.arange(50)))
    assert list(accumulator.states) == [1, 2, 3]
    assert accumulator.massive().nonzero().flatten().tolist() == [7, 20]
    with pytest.raises(gl.CalibrationError, match="no calibration tokens"):
        NormAccumulator(3).massive()


def test_direction_separates_planted_sinks_and_rejects_mixed_classes():
    x = randn(400, 16)
    sinks = 0.3 * randn(6, 16, seed=1) + 4 * torch.eye(16, dtype=torch.float64)[3]
    unit, other = (part / part.norm(dim=1, keepdim=True) for part in (x, sinks))
    u = sink_direction(unit.T @ unit, unit.sum(0), 400, other)
    assert float(u.norm()) == pytest.approx(1.0)
    rule = place_threshold(u, cosines(x, u), cosines(sinks, u), 400)
    assert rule.separates and (rule.missed, rule.false) == (0.0, 0.0)
    assert torch.equal(cosines(50 * x, u) > rule.cosine, cosines(x, u) > rule.cosine)
    mixed = place_threshold(u, cosines(x, u), cosines(x[:6] + 0.1, u), 400)
    assert not mixed.separates


# --- the fit


def test_scaling_states_changes_neither_weights_nor_ridge():
    x, y = noisy()
    one, two = (fit_ghost_robust(robust(k * x, k * y, held_out=150)) for k in (1.0, 300.0))
    assert one.diagnostics["ridge"] == two.diagnostics["ridge"] in RIDGES
    assert torch.allclose(one.tensors["m"], two.tensors["m"], rtol=1e-8, atol=1e-10)
    total = robust(300 * x, y).total.ordinary
    assert float(total.gram.trace()) == pytest.approx(len(x))  # the ridge's scale is N / C
    lone = x.clone()
    lone[5], y5 = 1000 * x[5], y.clone()
    y5[5] = 1000 * y[5]
    assert torch.allclose(robust(lone, y5).total.ordinary.gram, robust(x, y).total.ordinary.gram)


def test_fit_is_the_weighted_least_squares():
    x, y = noisy()
    weight = 1 / x.norm(dim=1, keepdim=True)
    expected = torch.linalg.lstsq(weight * x, weight * (y - x)).solution
    fit = fit_ghost_robust(robust(x, y), ridge=1e-13)
    assert (fit.tensors["m"] - expected).abs().max() < 1e-8
    after = (weight * (x + x @ expected - y)).norm() / (weight * y).norm()
    assert fit.diagnostics["error_after"] == pytest.approx(float(after))


def test_planted_sink_leaves_the_operator_on_ordinary_tokens():
    """CASES 39: one token 300 times larger, at both sides of the cut, through the whole fit."""
    windows, length, size = 8, 64, 24
    x, y = noisy(windows * length, size)
    x_sink, y_sink = x.clone(), y.clone()
    x_sink[70], y_sink[70] = 300 * x[70], 300 * randn(size, seed=7)
    fits = []
    for a, b in ((x, y), (x_sink, y_sink)):
        norms = NormAccumulator(4)
        rows = TokenRows(torch.arange(512) // length, torch.arange(512) % length)
        norms.update({1: a, 2: a, 3: b, 4: b}, rows)
        massive = norms.massive()
        accumulator = MomentAccumulator(
            [BOUNDARY], num_windows=windows, window=length, massive=massive
        )
        accumulator.update({2: a, 4: b}, rows)
        fits.append(fit_ghost_robust(accumulator.result()[BOUNDARY], sinks=RULE))
    clean, sink = fits
    assert sink.diagnostics["massive_tokens"] == 1
    assert sink.diagnostics["massive_rule"] == "direction"
    ordinary = torch.arange(512) != 70
    change = x[ordinary] @ (sink.tensors["m"] - clean.tensors["m"])
    assert change.norm() < 0.01 * (x[ordinary] @ clean.tensors["m"]).norm()
    assert torch.allclose(sink.tensors["shift"], y_sink[70] - x_sink[70])
    assert sink.spec == {"sink_cosine": 0.9}
    assert sink.diagnostics["error_after"] == pytest.approx(clean.diagnostics["error_after"], 0.01)
    published = gl.fit_operator(_plain(x_sink, y_sink)).tensors["m"]  # the fit serves one token
    clean_m = gl.fit_operator(_plain(x, y)).tensors["m"]
    assert (x @ (published - clean_m)).norm() > 0.05 * (x @ clean_m).norm()


def _plain(x, y):
    size = x.shape[1]
    split = SplitMoments(BOUNDARY, gl.BoundaryMoments.zeros(size), gl.BoundaryMoments.zeros(size))
    split.fit.add(x, y)
    return split


def test_without_a_usable_rule_massive_tokens_count_as_ordinary():
    x, y = noisy()
    massive = torch.zeros(len(x), dtype=torch.bool)
    massive[[3, 400]] = True
    every = fit_ghost_robust(robust(x, y, held_out=150))
    bad = SinkRule(RULE.direction, 0.0, missed=0.5, false=0.0)
    for rule in (None, bad):
        fit = fit_ghost_robust(robust(x, y, massive, held_out=150), sinks=rule)
        assert torch.allclose(fit.tensors["m"], every.tensors["m"], atol=1e-12)
        assert set(fit.tensors) == {"m"} and not fit.spec
        assert fit.diagnostics["massive_rule"] == "counted as ordinary"
        assert fit.diagnostics["num_tokens"] == len(x)


@pytest.mark.parametrize("num_tokens", [5, 20, 63])
def test_fewer_tokens_than_channels(num_tokens):
    """CASES 47: the pseudoinverse for a ridge towards 0, and a harmful fit is flagged."""
    x = randn(num_tokens, 64)
    y = x + 0.1 * randn(num_tokens, 64, seed=2)
    fit = fit_ghost_robust(robust(x, y))
    assert (fit.tensors["m"] - torch.linalg.pinv(x) @ (y - x)).abs().max() < 1e-6
    assert fit.diagnostics["rank"] == num_tokens
    assert any("calibration tokens for hidden size 64" in line for line in fit.warnings)
    if num_tokens == 20:
        assert fit.tensors["m"].abs().max() < 0.05
        split = fit_ghost_robust(robust(x, y, held_out=5), ridge=1e-9)
        assert any("no better than none" in line for line in split.warnings)
        assert any("ridge 1e-09. Use at least 256 tokens." in line for line in split.warnings)
        assert any("more windows or a ridge above 1e-09." in line for line in split.warnings)


def test_channel_ten_thousand_times_larger():
    """CASES 48: moments of float32 states are formed in float64."""
    x = randn(20, 64).float()
    x[:, 7] *= 1e4
    delta = 0.1 * randn(20, 64, seed=2).float()
    fit = fit_ghost_robust(robust(x, x + delta), ridge=0.0)
    exact = torch.linalg.pinv(x.double()) @ ((x + delta).double() - x.double())
    assert (fit.tensors["m"] - exact).abs().max() < 1e-6


def test_ridge_is_the_smallest_within_two_percent_of_the_best():
    x, y = noisy(100, 64)
    split = robust(x, y, held_out=25)
    parts = split.fit.ordinary, split.held_out.ordinary
    ridge, m, errors = choose_ridge(*parts)
    best = min(errors.values())
    assert list(errors) == list(RIDGES)
    assert ridge > RIDGES[0]
    for value, error in errors.items():
        solved = fit_ghost_robust(robust(x[:75], y[:75]), ridge=value).tensors["m"]
        assert error == pytest.approx(parts[1].relative_error(solved), rel=1e-6)
        assert value >= ridge or error > 1.02 * best
        if value == ridge:
            assert torch.allclose(m, solved, atol=1e-8)


# --- in a model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("removed", [[3, 4], [1, 4, 6]], ids=str)
def test_three_oracles(family, removed, tmp_path):
    dense, ids = tiny_model(family), random_ids()
    layers = ",".join(map(str, removed))
    result = gl.prune(
        dense, layers=layers, recover="ghost-robust", windows=random_ids(3, 96, seed=2)
    )
    assert any("3 calibration windows are too few" in line for line in result.warnings)
    assert result.record["guard"] == {"skipped": "fewer than 4 windows"}
    operators = {boundary.stop: fit.tensors["m"] for boundary, fit in result.fits.items()}
    assert len(operators) == len(result.plan.boundaries)
    expected = identity_reference(dense, removed, ids, operators)
    assert (logits(result.model, ids) - expected).abs().max() < 1e-4
    assert step_error(result.model, ids) < 1e-4
    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out")
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))
    assert step_error(loaded, ids) < 1e-4


def model_with_sinks(token: int = 5):
    """A tiny model in which one token id has a state 200 times longer from layer 2 on."""
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[token] = 0.0
        model.model.embed_tokens.weight[token, 0] = 3.0
        for layer in model.model.layers[:2]:  # no other token has anything in channel 0
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        mlp = model.model.layers[1].mlp
        mlp.gate_proj.weight[0] = 0.0
        mlp.gate_proj.weight[0, 0] = 5.0
        mlp.up_proj.weight[0] = mlp.gate_proj.weight[0]
        mlp.down_proj.weight[:, 0] = 0.0
        mlp.down_proj.weight[1, 0] = 1.0
    return model


def test_sinks_in_a_model_get_their_shift(tmp_path):
    dense, windows = model_with_sinks(), random_ids(3, 200, seed=2)
    windows[windows == 5] = 6
    windows[:, 0] = 5
    batches = list(windows.split(2))
    massive = gl.find_massive_tokens(dense, batches)
    assert massive.nonzero().flatten().tolist() == [0, 200, 400]
    result = gl.prune(dense, layers="3-4", recover="ghost-robust", windows=windows)
    entry = result.record["boundaries"][0]
    assert (entry["massive_tokens"], entry["massive_rule"]) == (3, "direction")
    assert (entry["massive_missed"], entry["massive_false"]) == (0.0, 0.0)
    assert entry["num_tokens"] == 597
    operator = result.model.model.layers[3].ghost_input
    seen = []
    operator.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    logits(result.model, windows)
    x, y = (part.flatten(0, 1) for part in seen[0])
    sink = (y - x - operator.shift).abs().max(dim=1).values < 1e-3
    assert torch.equal(sink, massive)
    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out")
    assert loaded.config.ghost_operators[0]["sink_cosine"] == entry["sink_cosine"]
    assert torch.equal(logits(loaded, windows), logits(result.model, windows))


def test_selection_and_norms_share_a_sweep(monkeypatch):
    from ghostlayers import steps

    names, sweep = [], steps.sweep
    monkeypatch.setattr(
        steps, "sweep", lambda *a, **k: (names.append(k["description"]), sweep(*a, **k))
    )
    windows = random_ids(3, 96, seed=2)
    gl.prune(tiny_model(), num_remove=2, recover="ghost-robust", windows=windows)
    gl.prune(tiny_model(), layers="3", recover="ghost-robust", windows=windows)
    assert names == ["similarity", "moments", "token norms", "moments"]


# --- the guard


def test_gain_is_paired():
    found = guard.gain([3.0, 5.0, 4.0], [2.0, 3.5, 3.5])
    assert found.mean == pytest.approx(1.0)
    assert found.error == pytest.approx(0.5 / 3**0.5)
    assert found.is_sure
    assert not guard.gain([3.0, 3.0], [1.0, 4.9]).is_sure
    assert guard.gain([math.inf], [3.0]).is_sure
    assert not guard.gain([3.0], [math.nan]).is_sure
    assert not guard.gain([3.0], [3.0]).is_sure


def test_guard_windows_are_held_out():
    ids = torch.arange(128)[:, None].expand(128, 4)
    found = guard_windows(ids)[:, 0].tolist()
    assert len(found) == 8
    assert set(found) <= set(held_out_windows(128))
    assert guard_windows(ids[:5])[:, 0].tolist() == [3]


class Judged:
    """Guard with planted losses: each operator lowers the loss by what `gains` says."""

    def __init__(self, monkeypatch, gains, *, dense=2.0, none=4.0, windows=16, written=None):
        self.plan = PruningPlan(12, (1, 4, 7))
        self.fits = {
            boundary: (OperatorFit("ghost-robust", {}, {}, fit_part={"m": torch.zeros(2, 2)}),)
            for boundary in self.plan.boundaries
        }
        noise = [0.1, -0.1, 0.05, -0.05]

        class Trial:
            def __init__(self, scorer, _bare):
                self.none = [none + n for n in noise]
                self.written = scorer.ids is Written.ids

            def losses(self, choice):
                gained = sum(gains[boundary.start] for boundary in choice)
                if self.written:
                    gained = written if written is not None else gained
                return [none - gained + n / 10 for n in noise] if choice else self.none

        class Scorer:
            ids = random_ids(4, 8)

            def dense_losses(self, _states):
                return [dense + n for n in noise]

            def suffix(self, pruned, _plan, _start):
                return pruned

            def written(self):
                return Written()

        class Written(Scorer):
            ids = random_ids(4, 6)

        monkeypatch.setattr(guard, "_Trial", Trial)
        ids = random_ids(windows, 8)
        self.verdict = guard.judge_repairs(
            "dense", "pruned", self.plan, self.fits, ids, scorer=Scorer()
        )
        self.kept = [boundary.start for boundary in self.verdict.kept]


def test_guard_drops_what_hurts_and_keeps_the_rest(monkeypatch):
    judged = Judged(monkeypatch, {1: 0.5, 4: -0.3, 7: 0.4})
    assert judged.kept == [1, 7]
    verdict = judged.verdict
    assert verdict.record["recovered_share"] == pytest.approx(0.45)
    assert verdict.boundaries[Boundary(4, 5)]["gain"] == pytest.approx(-0.3)
    assert [entry["kept"] for entry in verdict.boundaries.values()] == [True, False, True]
    assert "no repair at [4, 5)" in verdict.warnings[0]


def test_guard_wants_a_quarter_of_the_damage_back(monkeypatch):
    assert Judged(monkeypatch, {1: 0.1, 4: 0.2, 7: 0.1}).kept == []
    assert Judged(monkeypatch, {1: 0.2, 4: 0.2, 7: 0.2}).kept == [1, 4, 7]
    assert Judged(monkeypatch, {1: 0.2, 4: 0.2, 7: 0.2}, none=2.0).kept == []  # no damage
    assert Judged(monkeypatch, {1: math.nan, 4: 0.9, 7: 0.9}, windows=3).kept == [1, 4, 7]


def test_a_repair_must_help_on_text_that_the_dense_model_writes(monkeypatch):
    """What a few documents teach may hold for them alone: the log's Gemma layer 12."""
    gains = {1: 0.5, 4: 0.5, 7: 0.5}
    judged = Judged(monkeypatch, gains, written=-0.01)
    assert judged.kept == []
    text = judged.verdict.record["written_text"]
    assert (text["kept"], text["windows"], text["window"]) == (False, 4, 6)
    assert text["gain"] == pytest.approx(-0.01)
    warned = "fitted on 128 calibration tokens wins back -0.5 % of what the cut loses on text that"
    assert warned in judged.verdict.warnings[0]
    judged = Judged(monkeypatch, gains, written=0.19)  # of 2 nats lost there
    assert judged.kept == []
    assert judged.verdict.record["written_text"]["recovered_share"] == pytest.approx(0.095)
    assert Judged(monkeypatch, gains, written=0.21).kept == [1, 4, 7]


@pytest.fixture(scope="module")
def spoken():
    """A tiny model and windows that it samples itself: on them it is the best model there is."""
    model = tiny_model(num_layers=6)
    with torch.no_grad():
        model.lm_head.weight *= 5
    draw = torch.Generator().manual_seed(0)
    ids = random_ids(32, 1, seed=3)
    while ids.shape[1] < 64:
        shares = logits(model, ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(shares, 1, generator=draw)], dim=1)
    return model, ids


@pytest.mark.parametrize("layers", ["2-3", "2,4"])
def test_helpful_operators_are_kept(spoken, layers):
    dense, windows = spoken
    result = gl.prune(dense, layers=layers, recover="ghost-robust", windows=windows)
    found = result.record["guard"]
    assert list(result.fits) == list(result.plan.boundaries)
    assert found["windows"] == 8
    assert found["loss_dense"] < found["loss_chosen"] < found["loss_none"]
    assert found["recovered_share"] > 0.25
    assert all(entry["operator"] == "ghost-robust" for entry in result.record["boundaries"])
    assert not any(fit.fit_part for fit in result.fits.values())


def test_harmful_operator_is_dropped_and_the_checkpoint_is_stock(spoken, tmp_path, monkeypatch):
    from ghostlayers import fit_ladder

    dense, windows = spoken
    fit = fit_ladder.fit_operator

    def harmful(*args, **keywords):
        found = fit(*args, **keywords)
        found.tensors["m"].neg_().mul_(3)
        found.fit_part["m"].neg_().mul_(3)
        return found

    monkeypatch.setattr(fit_ladder, "fit_operator", harmful)
    result = gl.prune(dense, layers="2-3", recover="ghost-robust", windows=windows)
    entry = result.record["boundaries"][0]
    assert result.fits == {}
    assert (entry["operator"], entry["guard"]["candidate"]) == ("none", "ghost-robust")
    assert entry["guard"]["kept"] is False
    assert "error_after" not in entry and "layer" not in entry
    assert entry["guard"]["fit"]["error_before"] == entry["error_before"]
    assert entry["guard"]["gain"] < 0
    assert result.record["guard"]["windows"] == 8
    assert any("no repair at [2, 4)" in line for line in result.warnings)
    none = gl.prune(dense, layers="2-3", recover="none").model
    assert torch.equal(logits(result.model, windows), logits(none, windows))
    out = gl.save_pruned(result, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    card = (out / "README.md").read_text()
    assert "No repair was kept" in card and "trust_remote_code" not in card
    assert reload(out).config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("factor", [10.0, 1000.0])
def test_a_sink_that_is_left_out_does_not_move_the_ridge(factor):
    """CASES 48: the ridge is relative to the ordinary tokens alone."""
    x, y = noisy(400, 24)
    x[7], y[7] = 100.0 * x[7], 100.0 * y[7]
    marked = torch.zeros(400, dtype=torch.bool)
    marked[7] = True
    larger = x.clone()
    larger[7] *= factor
    fits = [
        fit_ghost_robust(robust(each, y, marked), ridge=0.1, sinks=RULE) for each in (x, larger)
    ]
    assert fits[0].diagnostics["massive_rule"] == "direction"
    assert torch.equal(fits[0].tensors["m"], fits[1].tensors["m"])
    scaled = gl.fit_operator(_plain(larger, y), operator="ghost", ridge=0.1).tensors["m"]
    assert (scaled - gl.fit_operator(_plain(x, y), ridge=0.1).tensors["m"]).norm() > 0.1
