"""`--fit sequential`: boundary by boundary, on the states of the model repaired so far."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

import ghostlayers as gl
from ghostlayers import recovered, recovery, sweep
from ghostlayers.boundary_runs import BoundaryRuns, repaired_student
from ghostlayers.decoder import decoder_layers
from ghostlayers.plan import Boundary
from oracles import logits, random_ids, reload, tiny_model
from test_robust import model_with_sinks

WINDOWS = random_ids(3, 128, seed=2)
METHODS = ("ghost", "ghost-robust", "fold", "fold+ghost", "linearpatch-rotate", "replaceme-lstsq")


def pair(dense, layers, recover, windows=WINDOWS, **settings):
    return [
        gl.prune(dense, layers=layers, recover=recover, windows=windows, fit=fit, **settings)
        for fit in ("dense", "sequential")
    ]


def state(model, ids, index):
    """What enters layer `index`, or leaves the last one."""
    seen = next(sweep.stream(model, [ids], [index]))
    return seen.states[index].double()


@pytest.mark.parametrize("recover", METHODS)
def test_one_boundary_is_the_same_without_an_extra_pass(recover, monkeypatch):
    dense, passes = tiny_model(), []
    stream = sweep.stream

    def counted(model, *args, **kwargs):
        passes.append(len(decoder_layers(model)))
        return stream(model, *args, **kwargs)

    from ghostlayers import boundary_runs

    monkeypatch.setattr(sweep, "stream", counted)
    monkeypatch.setattr(boundary_runs, "stream", counted)
    one, two = pair(dense, "3-4", recover)
    half = len(passes) // 2
    assert passes[:half] == passes[half:]
    for left, right in zip(one.fits.values(), two.fits.values(), strict=True):
        assert all(torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors)
        assert all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)
    assert torch.equal(logits(one.model, WINDOWS), logits(two.model, WINDOWS))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_second_operator_is_fitted_to_what_the_repaired_model_gives(family):
    dense = tiny_model(family)
    independent, result = pair(dense, "2,5", "ghost")
    first, second = result.fits.values()
    assert torch.equal(first.tensors["m"], next(iter(independent.fits.values())).tensors["m"])
    half = gl.prune(dense, layers="2", recover="ghost", windows=WINDOWS).model
    x = state(half, WINDOWS, 4)  # enters dense layer 5
    y = state(dense, WINDOWS, 6)
    expected = torch.linalg.lstsq(x, y - x).solution
    assert (second.tensors["m"].double() - expected).abs().max() < 1e-4
    assert not torch.allclose(second.tensors["m"], list(independent.fits.values())[1].tensors["m"])

    @torch.no_grad()
    def error(pruned):
        layer = decoder_layers(pruned.model)[4]
        arrived = layer.ghost_input(state(pruned.model, WINDOWS, 4).float()).double()
        return float((arrived - y).norm() / y.norm())

    assert error(result) < error(independent)
    assert error(result) == pytest.approx(second.diagnostics["error_after"], rel=1e-3)


@pytest.mark.parametrize("recover", METHODS)
@pytest.mark.parametrize("layers", ["1,3-4,7", "2,4,6"])
def test_every_method_and_place(recover, layers, tmp_path):
    """The last boundary may end the model, and one layer may stand between two cuts."""
    independent, result = pair(tiny_model(), layers, recover)
    assert len(result.fits) == len(result.plan.boundaries) == 3
    assert result.record["config"]["fit"] == "sequential"
    ids = random_ids()
    assert not torch.equal(logits(result.model, ids), logits(independent.model, ids))
    out = gl.save_pruned(result, tmp_path / "out")
    assert torch.equal(logits(reload(out), ids), logits(result.model, ids))
    record = json.loads((out / "ghostlayers.json").read_text())
    assert record["config"]["fit"] == "sequential"


def test_first_boundary_at_layer_0():
    _, result = pair(tiny_model(), "0,4", "ghost-robust")
    assert [entry["start"] for entry in result.record["boundaries"]] == [0, 4]
    assert len(result.fits) == 2


def test_second_fold_sees_the_first_one():
    """Features and x come from the student, targets from the dense model."""
    dense = tiny_model()
    _, result = pair(dense, "2,5", "fold", fold_maps="mlp", ridge=0.1)
    first = gl.prune(
        dense, layers="2", recover="fold", fold_maps="mlp", windows=WINDOWS, ridge=0.1
    ).model
    layer, seen = decoder_layers(first)[3], {}
    layer.mlp.down_proj.register_forward_pre_hook(lambda _m, args: seen.update(m=args[0]))
    x, y = state(first, WINDOWS, 4), state(dense, WINDOWS, 6)
    m = seen["m"].flatten(0, 1).double()
    weight = 1 / torch.maximum(x.norm(dim=1), y.norm(dim=1))[:, None]
    gram = (weight * m).T @ (weight * m)
    gram.diagonal().add_(0.1 * float(gram.diagonal().mean()))
    d = torch.linalg.solve(gram, (weight * m).T @ (weight * (y - x)))
    old = dense.model.layers[4].mlp.down_proj.weight
    new = result.model.model.layers[3].mlp.down_proj.weight
    assert (new - old - d.T).abs().max() < 1e-4


def test_what_the_guard_tests_has_never_seen_the_held_out_windows(monkeypatch):
    """Other held-out windows: the same fits without them, at every boundary."""
    dense, windows, parts = tiny_model(), random_ids(8, 96, seed=2), []
    judge = recovered.judge_repairs
    monkeypatch.setattr(
        recovered,
        "judge_repairs",
        lambda m, p, plan, ladders, *a, **k: (
            parts.append([ladder[0].fit_part["m"] for ladder in ladders.values()]),
            judge(m, p, plan, ladders, *a, **k),
        )[1],
    )
    for seed in (3, 4):
        windows[[3, 7]] = random_ids(2, 96, seed=seed)
        gl.prune(
            dense,
            layers="2,5",
            recover="ghost-robust",
            windows=windows,
            fit="sequential",
            ridge=1e-3,
        )
    for one, two in zip(*parts, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_only_prefixes_are_run():
    dense, ran = tiny_model(), []
    for index, layer in enumerate(dense.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    plan = gl.PruningPlan(8, (2, 5))
    pruned = gl.remove_layers_(gl.share_tensors(dense), plan.removed)
    boundary = Boundary(5, 6)
    student = repaired_student(pruned, plan, boundary, {})
    runs = BoundaryRuns(dense, boundary, WINDOWS, 1, student, progress=False)
    ran.clear()
    batches = []
    runs.run(batches.append, ["mlp.down_proj"])
    assert [sorted(ran)] == [sorted([*(0, 1, 2, 3, 4, 5) * 3, *(0, 1, 3, 4) * 3])]
    assert batches[0].inputs["mlp.down_proj"].shape == (128, 128)
    assert torch.equal(
        torch.stack([b.held_out.any() for b in batches]), torch.tensor([0, 0, 1]) > 0
    )


def test_no_batch_outlives_its_turn():
    dense, references, alive = tiny_model(), [], []
    dense.get_input_embeddings().register_forward_pre_hook(
        lambda *_: alive.append(sum(reference() is not None for reference in references))
    )
    plan = gl.PruningPlan(8, (2, 5))
    pruned = gl.remove_layers_(gl.share_tensors(dense), plan.removed)
    boundary = Boundary(5, 6)
    for student in (None, repaired_student(pruned, plan, boundary, {})):
        runs = BoundaryRuns(dense, boundary, WINDOWS, 1, student, progress=False)

        def consume(batch):
            tensors = [batch.x, batch.y, batch.inputs["mlp.down_proj"]]
            references.extend(map(weakref.ref, tensors))

        runs.run(consume, ["mlp.down_proj"])
    assert len(references) == 18 and len(alive) >= 9 and not any(alive)


def test_massive_tokens_are_those_of_the_dense_model(monkeypatch):
    dense, windows, models = model_with_sinks(), random_ids(3, 200, seed=2), []
    windows[windows == 5] = 6
    windows[:, 0] = 5
    find = recovery.find_massive_tokens
    monkeypatch.setattr(
        recovery,
        "find_massive_tokens",
        lambda model, *a, **k: (models.append(model), find(model, *a, **k))[1],
    )
    for recover in ("ghost-robust", "fold+ghost"):
        result = gl.prune(dense, layers="3,5", recover=recover, windows=windows, fit="sequential")
        for entry in result.record["boundaries"]:
            assert (entry["massive_tokens"], entry["massive_rule"]) == (3, "direction")
            assert entry["num_tokens"] == 597
        operator = result.model.model.layers[4].ghost_input
        seen = []
        operator.register_forward_hook(lambda _m, args, out, seen=seen: seen.append((args[0], out)))
        logits(result.model, windows)
        x, y = (part.flatten(0, 1) for part in seen[0])
        sink = (y - x - operator.shift).abs().max(dim=1).values < 1e-3
        assert sink.nonzero().flatten().tolist() == [0, 200, 400]
    assert all(model is dense for model in models) and len(models) == 2


def test_command_line(work, run, tmp_path):
    status, _, err = run(
        *("prune", work / "m", "--layers", "2,5", "--recover", "ghost", "--fit", "sequential"),
        *("--calibration", work / "t.txt", "--num-windows", 4, "--window", 64),
        *("--out", tmp_path / "out"),
    )
    assert status == 0, err
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    assert record["config"]["fit"] == "sequential"
