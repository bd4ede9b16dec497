"""Refinement: the repairs follow the divergence from the dense model, and only where that helps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import families
import ghostlayers as gl
from ghostlayers import guard, guard_text, refinement
from ghostlayers.decoder import decoder_layers, share_tensors
from ghostlayers.fold_sites import find_fold_sites
from ghostlayers.guard_text import GuardScorer, guard_scorer, guard_windows
from ghostlayers.operators import OperatorFit
from ghostlayers.plan import Boundary, PruningPlan
from ghostlayers.refinement import refine_repairs
from ghostlayers.refinement_steps import Steps
from ghostlayers.refinement_windows import RefinementWindows, windows_to_follow
from ghostlayers.repairs import apply_repairs_
from ghostlayers.steps import cut
from ghostlayers.trained_maps import ChannelSquares, TrainedMap, recording, take_gradients_
from oracles import logits, random_ids, tiny_model


class Adds(nn.Module):
    """Stands for a removed layer: adds a linear map of what enters it."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def __deepcopy__(self, memo):
        return self

    def forward(self, hidden_states, *_args, **_kwargs):
        return hidden_states + hidden_states @ self.matrix


def planted(family="llama", strength=0.03, **changes):
    """Make the effect of layers 3 and 4 a linear map of the state that enters them.

    The head is sharp, so that what the model samples depends on it.
    """
    model = tiny_model(family, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    layers = decoder_layers(model)
    generator = torch.Generator().manual_seed(0)
    size = model.config.hidden_size
    layers[3] = Adds(torch.zeros(size, size))
    layers[4] = Adds(strength * torch.randn(size, size, generator=generator))
    return model


@torch.no_grad()
def sampled(model, count, length=32, seed=0):
    """Text that the model samples: its loss there is the lowest of all models."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 200, (count, 1), generator=generator)
    while ids.shape[1] < length:
        p = model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], dim=1)
    return ids


def pruned(model, **settings):
    settings = {"layers": "3-4", "recover": "ghost-robust", **settings}
    if "windows" not in settings:
        settings["windows"] = sampled(model, 16)
    return gl.prune(model, progress=False, **settings)


def divergence(model, dense):
    """KL(dense || model) over the whole vocabulary, nats per position, on other windows."""
    ids = sampled(dense, 4, seed=9)
    found, wanted = (F.log_softmax(logits(m, ids).double(), dim=-1) for m in (model, dense))
    return float(F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1).mean())


def refined(dense, *fits, **settings):
    """Refine a ladder of the boundary [3, 5); return the outcome, and the model with its repair."""
    plan = PruningPlan(8, (3, 4))
    bare, ids = cut(dense, plan), sampled(dense, 32, length=48)
    settings = {"steps": 30, "batch_size": 24, "progress": False, **settings}
    ladders = {plan.boundaries[0]: fits}
    outcome = refinement.Refined(ladders, None)
    if settings["steps"]:
        outcome = refine_repairs(dense, bare, plan, ladders, ids, **settings)
    model = share_tensors(bare)
    apply_repairs_(model, plan, {b: ladder[0] for b, ladder in outcome.ladders.items()})
    return outcome, model


def operator(m):
    return OperatorFit("ghost-robust", {"m": m}, {}, fit_part={"m": m.clone()})


def folded(dense):
    """The layer before the cut as it is: a fold that changes nothing yet."""
    path = find_fold_sites(dense, 2).mlp.weight
    weight = decoder_layers(dense)[2].get_parameter(path).detach()
    same = {path: weight.clone()}
    return OperatorFit("fold", {}, {}, weights=same, weights_part=dict(same))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_map_that_is_shrunk_to_nothing_is_won_back(family):
    """Least squares under a heavy ridge leaves nothing; the divergence asks for the effect."""
    dense = planted(family)
    size = dense.config.hidden_size
    _, plain = refined(dense, operator(torch.zeros(size, size)), steps=0)
    outcome, model = refined(dense, operator(torch.zeros(size, size)), steps=40)
    assert divergence(model, dense) < 0.8 * divergence(plain, dense)
    record = outcome.record
    assert record["used"] and (record["steps"], record["windows"]) == (40, 24)
    assert record["held_out_divergence_after"] < 0.8 * record["held_out_divergence_before"]
    ((first, second),) = outcome.ladders.values()
    assert (first.name, second.name) == ("ghost-robust-refined", "ghost-robust")
    assert torch.equal(first.tensors["m"], first.fit_part["m"])  # they started alike
    # What was found is the planted map, as far as so few steps go.
    wanted = decoder_layers(dense)[4].matrix
    cosine = F.cosine_similarity(first.tensors["m"].flatten(), wanted.flatten(), dim=0)
    assert cosine > 0.1  # by chance its standard deviation is 1/64


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_fold_is_refined(family):
    dense = planted(family)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    _, plain = refined(dense, folded(dense), steps=0)
    outcome, model = refined(dense, folded(dense))
    assert divergence(model, dense) < 0.9 * divergence(plain, dense)
    ((first, second),) = outcome.ladders.values()
    assert first.name == "fold-refined" and first.weights.keys() == second.weights.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def test_steps_are_deterministic_by_seed():
    dense = planted()
    fit, boundary = operator(torch.zeros(64, 64)), Boundary(3, 5)
    runs = [
        refined(dense, fit, steps=5, batch_size=6, seed=seed)[0].ladders[boundary]
        for seed in (3, 3, 4)
    ]
    m = [ladder[0].tensors["m"] for ladder in runs]
    assert torch.equal(m[0], m[1]) and not torch.equal(m[0], m[2])


def test_what_does_not_lower_the_held_out_divergence_is_dropped(monkeypatch):
    """Steps a thousand times too long destroy the model: nothing of them may stay."""
    dense, fit = planted(), operator(torch.zeros(64, 64))
    for rates in ((10.0,), (10.0, 20.0), (float("inf"),)):
        for steps in (6, 10):  # the end and the trial
            monkeypatch.setattr(refinement, "RATES", rates)
            outcome, _ = refined(dense, fit, steps=steps, batch_size=6)
            assert outcome.record["used"] is False
            assert outcome.record["rate"] == rates[0]  # of 10 and 20 the one that harms less
            assert list(outcome.ladders.values()) == [(fit,)]
    assert outcome.record["held_out_divergence_after"] is None


def test_of_several_lengths_of_steps_the_best_is_taken(monkeypatch):
    dense, fit, boundary = planted(), operator(torch.zeros(64, 64)), Boundary(3, 5)
    expected, _ = refined(dense, fit, steps=20)
    assert expected.record["rate"] == refinement.RATES[0] and expected.record["used"]
    # The first of these lowers the divergence as well, but less.
    monkeypatch.setattr(refinement, "RATES", (1e-5, 10.0, float("inf"), *refinement.RATES))
    outcome, _ = refined(dense, fit, steps=20)
    assert outcome.record == expected.record
    m = [found.ladders[boundary][0].tensors["m"] for found in (expected, outcome)]
    assert torch.equal(*m)


class Planned:
    """A student, and its steps, whose divergence after any number of steps is known."""

    def __init__(self, divergences, steps):
        self.divergences, self.left, self.steps = divergences, steps, steps

    def make(self, count):
        self.left -= count
        return self.divergences[self.steps - self.left] is not None

    def mean_divergences(self, texts):
        return [self.divergences[self.steps - self.left]] * len(texts)


def test_where_the_best_trial_ends_too_high_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr(refinement, "TRIAL", 2)

    def ended(*curves, before=1.0):
        begun = []
        monkeypatch.setattr(refinement, "RATES", tuple(range(len(curves))))

        def begin(rate):
            early, late = curves[rate]
            planned = Planned({2: early, 9: late}, 9)
            begun.append(planned)
            return refinement.Trial(rate, planned, planned)

        best = refinement.best_trial(begin, ["a", "b"], before)
        return best.rate, best.mean(), sum(9 - planned.left for planned in begun)

    assert ended((0.8, 0.7), (0.6, 0.9)) == (1, 0.9, 2 + 9)
    assert ended((0.8, 0.7), (0.6, 1.1)) == (0, 0.7, 2 + 9 + 9)
    assert ended((0.8, None), (0.6, 1.1), (2.0, 0.9)) == (2, 0.9, 2 + 9 + 2 + 9 + 9)
    assert ended((0.8, 1.2), (0.6, 1.1)) == (1, 1.1, 2 + 9 + 9)
    assert ended((None, 0.1), (1.3, 1.4)) == (1, 1.4, 2 + 9)
    assert ended((None, 0.1), (None, 0.1)) == (0, float("inf"), 2 + 2)
    monkeypatch.setattr(refinement, "TRIAL", 9)  # nothing is left to make
    assert ended((0.8, 1.2), (0.6, 1.1)) == (1, 1.1, 9 + 9)


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_repair_with_the_lowest_divergence_is_refined(best):
    """Of another ridge, or a simpler one; what stands on the ladder stays there."""
    dense, boundary = planted(), Boundary(3, 5)
    wanted = decoder_layers(dense)[4].matrix
    names = ("ghost-robust", "ghost-robust", "simpler")
    fits = [
        replace(operator((0.9 if number == best else 0.3) * wanted), name=name)
        for number, name in enumerate(names)
    ]
    outcome, _ = refined(dense, *fits, steps=1)
    apart, _ = refined(dense, fits[best], steps=1)
    assert outcome.record == apart.record and outcome.record["used"]
    top, *rest = outcome.ladders[boundary]
    assert torch.equal(top.tensors["m"], apart.ladders[boundary][0].tensors["m"])
    assert top.name == "ghost-robust-refined"
    assert top.diagnostics["errors_of"] == names[best]
    assert tuple(rest) == tuple(fits)


def test_written_text_counts_as_much_as_held_out_windows():
    """A repair that suits the held-out windows alone is no place to start from."""
    dense, plan = planted(), PruningPlan(8, (3, 4))
    wanted = decoder_layers(dense)[4].matrix
    even, ids = 0.6 * wanted, sampled(dense, 32, length=48)
    held_out, written = guard_scorer(dense, ids, progress=False).texts()
    short = held_out[:1, :8]
    # Right on the span of the few states of these held-out tokens, wrong elsewhere.
    states = dense.model(input_ids=short, output_hidden_states=True).hidden_states[3][0].detach()
    assert len(written) == 16
    basis = torch.linalg.qr(states.T).Q
    inside = basis @ basis.T
    narrow = inside @ wanted - 2.0 * (wanted - inside @ wanted)

    class Few(GuardScorer):
        def texts(self):
            return [short, written]

    few = Few(dense, ids, progress=False)
    ladders = {plan.boundaries[0]: (operator(narrow), operator(even))}
    settings = {"steps": 1, "progress": False, "scorer": few}
    outcome = refine_repairs(dense, cut(dense, plan), plan, ladders, ids, **settings)
    alone = {
        m: refine_repairs(
            dense, cut(dense, plan), plan, {plan.boundaries[0]: (operator(value),)}, ids, **settings
        ).record
        for m, value in (("narrow", narrow), ("even", even))
    }
    first, second = alone["narrow"], alone["even"]
    assert first["held_out_divergence_before"] < second["held_out_divergence_before"]
    assert first["guard_written_divergence_before"] > second["guard_written_divergence_before"]
    assert outcome.record == second and outcome.record["guard_written_windows"] == 16


def test_maps_that_a_simpler_repair_leaves_alone_are_refined_too():
    """The steps start from the operator alone; both maps of the first repair move from there."""
    dense, boundary = planted(), Boundary(3, 5)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    wanted = decoder_layers(dense)[4].matrix
    (path,) = folded(dense).weights
    bad = {path: torch.zeros_like(folded(dense).weights[path])}
    joint = replace(
        operator(torch.zeros(64, 64)), name="fold+ghost", weights=bad, weights_part=dict(bad)
    )
    simpler = operator(0.5 * wanted)
    outcome, model = refined(dense, joint, simpler, steps=12)
    top, *rest = outcome.ladders[boundary]
    assert (top.name, top.diagnostics["maps"]) == ("fold+ghost-refined", [path])
    assert top.diagnostics["errors_of"] == "ghost-robust"
    old = decoder_layers(dense)[2].get_parameter(path)
    moves = [(top.tensors["m"], simpler.tensors["m"]), (top.weights[path], old)]
    for new, start in moves:
        assert 0.0 < float((new - start).norm()) < 0.5 * float(start.norm())
    _, plain = refined(dense, simpler, steps=0)
    assert divergence(model, dense) < divergence(plain, dense)
    assert rest == [joint, simpler]
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


@pytest.mark.parametrize("transposed", [False, True])
def test_every_channel_counts_in_units_of_its_own(transposed):
    """An input channel 100 times as large, an output channel 10 times: the same step."""
    generator = torch.Generator().manual_seed(0)
    z, w = torch.randn(40, 6, generator=generator), torch.randn(6, 5, generator=generator)
    squares = z.double().square().sum(dim=0), (z @ w).double().square().sum(dim=0)

    def step(inputs, outputs):
        weight = outputs * w / inputs[:, None]
        module = Conv1D(5, 6) if transposed else nn.Linear(6, 5, bias=False)
        module.requires_grad_(False)
        module.weight.copy_(weight if transposed else weight.T)
        trained = TrainedMap.of(module)
        trained.measure_((squares[0] * inputs.square(), squares[1] * outputs.square()))
        with recording([trained]):
            loss = (module(z * inputs) / outputs).square().sum()
            take_gradients_(loss, [trained], 4)
        torch.optim.Adam([trained.moved], lr=0.01 * trained.scale).step()
        change = trained.change if transposed else trained.change.T
        return change * inputs[:, None] / outputs

    plain = step(torch.ones(6), torch.ones(5))
    inputs, outputs = torch.ones(6), torch.ones(5)
    inputs[2], outputs[1] = 100.0, 10.0
    torch.testing.assert_close(step(inputs, outputs), plain, rtol=1e-3, atol=1e-6)
    assert float(plain.abs().min()) > 1e-3 and float(plain.abs().max()) < 1.0


def test_sizes_of_channels_are_those_of_tokens_of_length_1():
    """A token a thousand times as long as the others weighs no more than they do."""
    module = nn.Linear(3, 2, bias=False).requires_grad_(False)
    module.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.1, 0.0]]))
    trained = TrainedMap.of(module)
    found = ChannelSquares([trained])
    with recording([trained]):
        module(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
        module(torch.tensor([[1000.0, 0.0, 0.0]]))
        found.take_()
    ((inputs, outputs),) = found.sums
    assert inputs.tolist() == [2.0, 1.0, 1.0]
    assert outputs.tolist() == [2.0, 1.0]
    assert trained.seen == []
    found.measure_()
    inputs = torch.tensor([1.5, 0.75, 0.75]).sqrt()
    wanted = torch.tensor([4 / 3, 2 / 3]).sqrt()[:, None] / inputs
    torch.testing.assert_close(trained.unit, wanted)


class NoFloat64(TorchDispatchMode):
    """Stands for a device without float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert getattr(result, "dtype", None) != torch.float64, func
        return result


def test_channels_are_measured_without_float64():
    module = nn.Linear(3, 2, bias=False).requires_grad_(False)
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    rows[2] = 0.0  # what a mask leaves out
    trained = TrainedMap.of(module)
    found = ChannelSquares([trained])
    with NoFloat64(), recording([trained]):
        module(rows)
        found.take_()
        found.measure_()
    squares = [
        (each / each.norm(dim=1, keepdim=True)).square().sum(dim=0)
        for each in (part[[0, 1, 3, 4]].double() for part in (rows, module(rows)))
    ]
    for one, two in zip(found.sums[0], squares, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-6, atol=0.0)
    assert torch.isfinite(trained.unit).all()


def test_steps_stop_where_a_divergence_is_not_finite():
    trained = TrainedMap.of(nn.Linear(3, 3, bias=False).requires_grad_(False))
    windows = RefinementWindows([], [], [], None, order=[0, 1, 2])

    class Student:
        def divergence(self, _windows, index):
            y = trained.module(torch.ones(2, 3))
            return (y.sum() * (math.inf if index == 1 else 1.0)), 2

    run = Steps(Student(), windows, [trained], 6, 1e-3, 0, False)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0)).tolist()[::-1]
    assert run.make(6) is False and run.left == 6 - order.index(1)
    assert torch.isfinite(trained.moved).all()


def test_windows_are_no_more_than_the_steps_need():
    outcome, _ = refined(planted(), operator(torch.zeros(64, 64)), steps=2, batch_size=3)
    assert outcome.record["windows"] == 6 and outcome.record["held_out_windows"] == 8


def test_steps_read_all_windows_that_the_guard_does_not():
    dense, ids = tiny_model(), random_ids(64, 16)
    follow, given = windows_to_follow(dense, ids, 64, 1, 0, False)
    read, tested = (
        {tuple(row.tolist()) for row in part} for part in (follow.ids, guard_windows(ids))
    )
    assert (given, len(read), len(tested)) == (56, 56, 8)
    assert not read & tested


def test_the_text_that_decides_is_written_once(monkeypatch):
    calls, write = [], guard_text.written_ids
    monkeypatch.setattr(
        guard_text, "written_ids", lambda *a, **k: calls.append(1) or write(*a, **k)
    )
    result = pruned(tiny_model(), recover="fold", refine=1, windows=random_ids(8, 32))
    assert result.record["refinement"]["guard_written_windows"] == 16
    assert result.record["guard"]["written_text"]["windows"] == 16
    assert len(calls) == 1


def test_no_step_is_bit_equal_to_the_closed_form():
    dense = tiny_model()
    ids = random_ids(4, 32)
    plain, zero, some = (
        gl.prune(dense, layers="3-4", recover="fold", windows=ids, progress=False, **more)
        for more in ({"refine": 0}, {"refine": 0}, {"refine": 3})
    )
    assert plain.record["refinement"] is None and some.record["refinement"]["steps"] == 3
    for a, b in zip(plain.model.parameters(), zero.model.parameters(), strict=True):
        assert torch.equal(a, b)
    tried = some.record["boundaries"][0]["guard"]["candidate"]
    assert tried == ("fold-refined" if some.record["refinement"]["used"] else "fold")


def test_a_refined_fold_is_saved(tmp_path, monkeypatch):
    for share in ("MIN_RECOVERED", "MIN_WRITTEN"):
        monkeypatch.setattr(guard, share, -math.inf)
    monkeypatch.setattr(guard.Gain, "exceeds", lambda self, errors: True)
    dense = planted()
    result = gl.prune(
        dense, layers="3-4", recover="fold", ridge=1e3, windows=sampled(dense, 24), progress=False
    )
    assert result.record["boundaries"][0]["operator"] == "fold-refined"
    found = result.record["refinement"]
    # 18 windows are not held out, each is read twice; as many reads again are of written ones
    assert (found["steps"], found["windows"], found["written_windows"]) == (96, 18, 36)
    gl.save_pruned(result, tmp_path / "out")
    again = gl.load_pruned(tmp_path / "out").model
    assert torch.equal(logits(again, random_ids()), logits(result.model, random_ids()))


def test_several_boundaries_low_rank_and_bfloat16():
    dense = tiny_model().to(torch.bfloat16)
    result = pruned(dense, layers="1,3", rank=4, refine=4)
    assert result.record["refinement"]["steps"] == 4
    ladders = {e["guard"]["candidate"] for e in result.record["boundaries"]}
    wanted = "ghost-robust-refined" if result.record["refinement"]["used"] else "ghost-robust"
    assert ladders == {wanted}
    assert all(p.dtype == torch.bfloat16 for p in result.model.parameters())


def test_gradients_of_maps_are_those_of_autograd():
    """For a linear and a transposed map, used twice in one pass."""
    torch_state = torch.random.get_rng_state()
    maps = [nn.Linear(5, 5, bias=False), Conv1D(5, 5)]
    torch.random.set_rng_state(torch_state)
    for module in maps:
        module.requires_grad_(False)
        trained = TrainedMap.of(module)
        x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
        with recording([trained]):
            loss = module(module(x).tanh()).square().sum()
            take_gradients_(loss, [trained], 4)
        module.weight.requires_grad_(True)
        (module(module(x).tanh()).square().sum() / 4).backward()
        torch.testing.assert_close(trained.moved.grad, module.weight.grad)


@pytest.mark.parametrize("recover", ["ghost", "replaceme-lstsq", "linearpatch-diag", "none"])
def test_published_methods_are_not_refined(recover):
    with pytest.raises(gl.GhostlayersError, match=r"`refine` is 3 and `recover`.*ghost-robust"):
        gl.PruneConfig(layers="3", recover=recover, refine=3)
    assert gl.PruneConfig(layers="3", recover=recover).refine_steps == 0


@pytest.mark.parametrize(
    ("recover", "steps"), [("fold", 96), ("fold+ghost", 96), ("ghost-robust", 0), ("ghost-norm", 0)]
)
def test_how_many_steps_are_made_unless_something_else_is_asked_for(recover, steps):
    assert gl.PruneConfig(layers="3", recover=recover).refine_steps == steps
    assert gl.PruneConfig(layers="3", recover=recover, refine=7).refine_steps == 7


@pytest.mark.parametrize(("given", "steps"), [((), 96), ((("refine", 7),), 7)])
def test_cells_of_compare_make_as_many_steps_as_prune(given, steps):
    from ghostlayers.compare_config import CompareConfig

    config = CompareConfig(num_remove=(1,), recover=("ghost", "fold"), shared=given)
    made = [config.prune_config(num_remove=1, recover=name).refine_steps for name in config.recover]
    assert made == [0, steps]


def test_wrong_values_are_refused_and_too_few_windows_are_said():
    with pytest.raises(gl.GhostlayersError, match="`refine` is -1; allowed: 0 or more"):
        gl.PruneConfig(layers="3", recover="fold", refine=-1)
    result = pruned(planted(), refine=5, windows=random_ids(3, 32))
    assert result.record["refinement"]["steps"] == 0
    assert any("not refined" in line for line in result.warnings)


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox", "mixtral", "falcon_h1"])
def test_every_architecture_takes_the_steps(family):
    """Where the lower layers cannot be left out, the whole model runs."""
    dense = families.tiny_model(family)
    depth = dense.config.get_text_config().num_hidden_layers
    result = gl.prune(
        dense,
        layers=str(depth - 2),
        recover="ghost-robust",
        refine=2,
        windows=random_ids(4, 24),
        progress=False,
    )
    record = result.record["refinement"]
    assert record["steps"] == 2 and math.isfinite(record["held_out_divergence_after"])


def head_that_reads_one_direction():
    """Layers 3 and 4 write a lot along d, which the head does not read, and a little along e.

    Returns:
        The model, and the map A of what they do: x + xA.
    """
    dense = planted()
    layers, head = decoder_layers(dense), dense.get_output_embeddings()
    size = dense.config.hidden_size
    generator = torch.Generator().manual_seed(5)
    u, v, d, e = torch.linalg.qr(torch.randn(size, 4, generator=generator)).Q.T
    a = 3.0 * torch.outer(u, d) + 1.5 * torch.outer(0.6 * u + 0.8 * v, e)
    layers[4] = Adds(a)
    with torch.no_grad():
        for layer in layers[5:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head.weight.copy_(4.0 * torch.outer(torch.randn(len(head.weight), generator=generator), e))
    return dense, a


def states_at_the_cut(dense, ids):
    with torch.no_grad():
        return dense.model(input_ids=ids, output_hidden_states=True).hidden_states[3].flatten(0, 1)


def test_what_the_model_says_outweighs_the_state():
    """One rank for two effects: least squares takes the larger one, the head reads the other."""
    dense, a = head_that_reads_one_direction()
    x = states_at_the_cut(dense, sampled(dense, 32, length=48))
    v = torch.linalg.svd(x @ a, full_matrices=False).Vh[:1]  # the best map of rank 1 on x
    tensors = {"down": a @ v.T, "up": v.contiguous()}
    parts = {name: tensor.clone() for name, tensor in tensors.items()}
    fit = OperatorFit("ghost-robust", tensors, {}, spec={"rank": 1}, fit_part=parts)
    _, plain = refined(dense, fit, steps=0)
    outcome, model = refined(dense, fit, steps=60, batch_size=8)
    top = next(iter(outcome.ladders.values()))[0]

    def state_error(repair):
        return float((x @ repair.tensors["down"] @ repair.tensors["up"] - x @ a).norm())

    assert state_error(top) > state_error(fit)
    assert divergence(model, dense) < 0.7 * divergence(plain, dense)


def test_the_scale_of_states_does_not_matter():
    """States 16 times as large, the model otherwise the same: the same relative change."""
    changes, divergences = [], []
    for scale in (1.0, 16.0):
        dense = planted(rms_norm_eps=1e-6 * scale**2)
        with torch.no_grad():
            dense.get_input_embeddings().weight.mul_(scale)
            for name, module in dense.named_modules():
                if name.endswith(("o_proj", "down_proj")):
                    module.weight.mul_(scale)
        outcome, _ = refined(dense, folded(dense), steps=8, batch_size=6)
        ((new, old),) = outcome.ladders.values()
        ((path, weight),) = new.weights.items()
        changes.append((weight - old.weights[path]) / scale)
        divergences.append(outcome.record["held_out_divergence_after"])
    assert float(changes[0].norm()) > 0
    assert float((changes[0] - changes[1]).norm()) < 1e-2 * float(changes[0].norm())
    assert divergences[1] == pytest.approx(divergences[0], rel=1e-3)
