"""The guard chooses the ridge: the ladder of ridges, how it is gone down, what it is scored on."""

from __future__ import annotations

import math

import pytest
import torch

import ghostlayers as gl
from ghostlayers import guard, guard_ladder
from ghostlayers.fit_ladder import HEAVIER, fit_ladder, ridges_of
from ghostlayers.guard_gain import Gain, balanced
from ghostlayers.guard_text import guard_scorer
from ghostlayers.operators import OperatorFit
from ghostlayers.plan import Boundary
from ghostlayers.repairs import with_parts_of
from ghostlayers.report_repairs import _errors_asked, _sides
from ghostlayers.sampling import written_ids
from oracles import random_ids, tiny_model
from test_robust import RULE, noisy, robust

BOUNDARY = Boundary(4, 6)
NONE = [[3.0] * 4, [5.0] * 4]
WOBBLE = (1.0, -1.0, 0.5, -0.5)


def moments(count: int = 400):
    x, y = noisy(count, 24)
    return robust(x, y, torch.zeros(count, dtype=torch.bool), held_out=count // 4)


def ridges(ladder):
    return [fit.diagnostics["ridge"] for fit in ladder]


def test_heavier_ridges_stand_below_the_one_of_the_state_error():
    ladder = fit_ladder(moments(), operator="ghost-robust", sinks=RULE)
    own, *heavier = ridges(ladder)
    assert heavier == [value for value in HEAVIER if value > 2 * own] != []
    for fit in ladder:
        alone = gl.fit_operator(
            moments(), operator="ghost-robust", ridge=fit.diagnostics["ridge"], sinks=RULE
        )
        assert fit.name == "ghost-robust"
        assert torch.allclose(fit.tensors["m"], alone.tensors["m"], rtol=0, atol=1e-12)
        assert torch.allclose(fit.fit_part["m"], alone.fit_part["m"], rtol=0, atol=1e-12)
        assert fit.diagnostics["ridge_errors"] == ladder[0].diagnostics["ridge_errors"] != {}
    norms = [float(fit.tensors["m"].norm()) for fit in ladder]
    assert norms == sorted(norms, reverse=True)


def test_one_fit_where_the_guard_has_no_choice():
    assert ridges(fit_ladder(moments(), operator="ghost-robust", ridge=0.5, sinks=RULE)) == [0.5]
    plain = gl.SplitMoments(BOUNDARY, moments().fit.ordinary, moments().held_out.ordinary)
    assert len(fit_ladder(plain, operator="ghost")) == 1
    untested = moments()
    empty = type(untested.held_out).zeros(24)
    untested = gl.SplitMoments(BOUNDARY, untested.total, empty)
    assert len(fit_ladder(untested, operator="ghost-robust", sinks=RULE)) == 1


def rung(ridge: float, name: str = "ghost-robust", value: float = 0.0) -> OperatorFit:
    part = {"m": torch.full((2, 2), value)}
    return OperatorFit(name, {}, {"ridge": ridge}, fit_part=part)


def go_down(gains, wanted=(0.0, 0.0), names=("ghost-robust",) * 4, noise=0.0):
    """Go down a ladder whose rungs have ridges 0, 1, 2, ...; gains on each of two texts."""
    ladder = [rung(index, name) for index, name in zip(range(len(gains)), names, strict=False)]
    asked = []

    def losses(choice):
        if not choice:
            return NONE
        index = int(choice[BOUNDARY].diagnostics["ridge"])
        asked.append(index)
        return [
            [loss - own + index * noise * way for loss, way in zip(text, WOBBLE, strict=True)]
            for text, own in zip(NONE, gains[index], strict=True)
        ]

    first = {BOUNDARY: ladder[0]}
    current = losses(first)
    chosen, _, entries = guard_ladder.go_down(
        {BOUNDARY: ladder}, first, NONE, current, losses, wanted
    )
    kept = chosen.get(BOUNDARY)
    return kept and kept.diagnostics["ridge"], asked, entries[BOUNDARY]["tried"]


def test_a_heavier_ridge_stands_if_it_gains_more():
    kept, _, tried = go_down([(0.6, 0.1), (0.5, 0.3), (0.2, 0.2)])
    assert kept == 1
    assert [(step["ridge"], step["against_ridge"], step["kept"]) for step in tried] == [
        (0, 1, False),
        (1, 2, True),
        (1, None, True),
    ]
    assert tried[0]["gain"] == pytest.approx(-0.05)
    assert [step["required_standard_errors"] for step in tried] == [-1.0, -1.0, 2.0]


def test_every_ridge_is_tried():
    kept, asked, _ = go_down([(0.6, 0.3), (0.5, 0.3), (0.9, 0.9)])
    assert (kept, asked) == (2, [0, 1, 2])


def test_a_heavier_ridge_must_gain_more_than_its_noise():
    assert Gain(-0.9, 1.0).exceeds(-1.0) and not Gain(-1.1, 1.0).exceeds(-1.0)
    assert not Gain(-0.1, 1.0).exceeds(0.0)
    assert not Gain(-math.inf, 0.0).exceeds(-1.0)
    gains = [(0.5, 0.5), (0.55, 0.55)]
    assert go_down(gains)[0] == go_down(gains, noise=0.05)[0] == 1
    assert go_down(gains, noise=0.2)[0] == 0  # 0.05 nats at a standard error of 0.065


def test_a_repair_that_harms_one_text_gives_way_to_one_that_does_not():
    kept, asked, _ = go_down([(0.9, -0.1), (0.8, -0.05), (0.4, 0.05)])
    assert (kept, asked) == (2, [0, 1, 2])
    assert go_down([(0.9, 0.1), (0.4, 0.3)], wanted=(0.0, 0.2))[0] == 1
    assert go_down([(0.9, 0.1), (0.4, 0.3)], wanted=(0.5, 0.2))[0] == 0  # neither reaches both
    # and what reaches both does not give way to what gains more, but on one of them
    assert go_down([(0.5, 0.2), (0.9, 0.05)], wanted=(0.25, 0.1))[0] == 0
    assert go_down([(0.5, 0.2), (0.2, 0.6)], wanted=(0.25, 0.1))[0] == 0


def test_other_methods_still_have_to_win_by_their_error():
    names = ("fold+ghost", "ghost-robust", "ghost-robust")
    kept, asked, tried = go_down([(0.6, 0.3), (0.5, 0.3), (0.9, 0.9)], names=names)
    assert (kept, asked) == (0, [0, 1])  # what lost to a method loses with every ridge
    assert tried[0]["required_standard_errors"] == 1.0
    assert go_down([(0.6, 0.3), (0.7, 0.3), (0.9, 0.9)], names=names)[0] == 2


def test_texts_have_equal_weight():
    both = balanced([Gain(0.4, 0.03), Gain(0.2, 0.04)])
    assert (both.mean, both.error) == (pytest.approx(0.3), pytest.approx(0.025))
    assert balanced([Gain(math.inf, 0.0), Gain(-math.inf, 0.0)]).mean == -math.inf


def test_parts_are_paired_by_ridge():
    ladder = [rung(0.5, "fold"), rung(1e-3), rung(0.03), rung(0.3)]
    others = [rung(0.1, "fold", 1.0), rung(0.3, value=2.0), rung(1e-3, value=3.0)]
    paired = with_parts_of(ladder, others)
    assert [float(fit.fit_part["m"][0, 0]) for fit in paired] == [1.0, 3.0, 0.0, 2.0]


@pytest.mark.parametrize("recover", ["ghost-robust", "fold+ghost"])
def test_a_sequential_fit_tests_the_ridges_that_it_uses(recover, monkeypatch):
    from ghostlayers import recovery

    seen = []

    def spy(ladder, others):
        seen.append((ridges_of(ladder), ridges_of(others)))
        return with_parts_of(ladder, others)

    monkeypatch.setattr(recovery, "with_parts_of", spy)
    gl.prune(
        tiny_model(),
        layers="1,3",
        recover=recover,
        fit="sequential",
        refine=0,
        windows=random_ids(8, 24),
        progress=False,
    )
    assert seen and all(own == other and own for own, other in seen)


def test_the_guard_does_not_test_on_text_that_a_refinement_reads():
    model, ids = tiny_model(), random_ids(8, 12)
    guarded = guard_scorer(model, ids, progress=False).written().ids
    refined = written_ids(model, ids, num_windows=16, window=12, seed=0, progress=False)
    assert guarded.shape == refined.shape
    assert not (guarded == refined).all(dim=1).any()


def test_a_dense_model_without_a_finite_loss_writes_no_text():
    model = tiny_model().half()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.8e5).clamp_(-6e4, 6e4)
    result = gl.prune(model, layers="2-3", windows=random_ids(8, 16), progress=False)
    assert result.fits == {}
    found = result.record["guard"]["written_text"]
    assert found == {"skipped": "the loss of the dense model is not finite"}
    with pytest.raises(gl.CalibrationError, match="a logit of the next token"):
        written_ids(model, random_ids(8, 16), num_windows=2, window=8, progress=False)


def test_repairs_that_written_text_drops_leave_its_numbers(monkeypatch):
    monkeypatch.setattr(guard, "MIN_WRITTEN", 2.0)
    monkeypatch.setattr(guard, "MIN_RECOVERED", -math.inf)
    monkeypatch.setattr(guard.Gain, "exceeds", lambda self, errors: True)
    result = gl.prune(tiny_model(), layers="3", windows=random_ids(16, 32), progress=False)
    text = result.record["guard"]["written_text"]
    assert result.fits == {}
    assert (text["kept"], text["required_share"]) == (False, 2.0)
    for key in ("loss_dense", "loss_none", "loss_all_operators", "loss_chosen", "gain"):
        assert math.isfinite(text[key])
    assert text["gain"] == pytest.approx(text["loss_none"] - text["loss_chosen"], abs=1e-9)
    won = f"wins back {100 * text['recovered_share']:.1f} % of what the cut loses on text that"
    assert won in result.warnings[0]


def test_the_record_says_which_ridge_is_used():
    result = gl.prune(
        tiny_model(), layers="3", recover="ghost-robust", windows=random_ids(16, 32), progress=False
    )
    tried = result.record["boundaries"][0]["guard"]["tried"]
    assert tried[0]["ridge"] is not None
    assert tried[-1]["against"] == "none" and tried[-1]["against_ridge"] is None


def test_the_report_names_the_ridges_and_the_errors_asked():
    tried = {"operator": "ghost-robust", "against": "ghost-robust", "ridge": 1e-4}
    tried |= {"against_ridge": 0.03, "required_standard_errors": -1.0}
    assert _sides(tried) == ("ghost-robust, ridge 0.0001", "ridge 0.03")
    assert _errors_asked(tried) == 1.0
    old = {"operator": "fold+ghost", "against": "ghost-robust", "ridge": 1.0, "against_ridge": 0.1}
    assert _sides(old) == ("fold+ghost", "ghost-robust")
    assert _errors_asked(old) == 1.0
