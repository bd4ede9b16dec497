"""`fold` and `fold+ghost`: planted answers, checkpoints, the guard's ladder, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import families
import ghostlayers as gl
from ghostlayers import fold_plan, guard
from ghostlayers.changed_weights import change_weights_
from ghostlayers.decoder import decoder_layers
from ghostlayers.feature_moments import FeatureMoments, StateFeatureMoments, gram_bytes
from ghostlayers.fold_sites import find_fold_sites
from ghostlayers.operators import OperatorFit, fold, fold_ghost
from ghostlayers.plan import PruningPlan
from oracles import logits, random_ids, reload, step_error, tiny_model, watched_ladders
from tiny_checkpoints import save_tiny, tiny_tokenizer


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Planted(nn.Module):
    """Stands for a removed layer: adds what it is told to what the layer before it computed."""

    def __init__(self, seen, effect):
        super().__init__()
        self.seen, self.effect = seen, effect

    def __deepcopy__(self, memo):
        return self

    def forward(self, hidden_states, *_args, **_kwargs):
        return hidden_states + self.effect(hidden_states, **self.seen)


def planted(model, effect, *, start=3, stop=5):
    """Make the effect of layers start..stop-1 a function of x, m and a of layer start-1."""
    model, seen = model.double(), {}
    layers = decoder_layers(model)
    sites = find_fold_sites(model, start - 1)
    for name, site in (("m", sites.mlp), ("a", sites.attention)):
        module = site.module(layers[start - 1])
        module.register_forward_pre_hook(lambda _m, args, name=name: seen.update({name: args[0]}))
    nothing = Planted(seen, lambda x, **_: torch.zeros_like(x))
    for index in range(start, stop):
        layers[index] = nothing
    layers[stop - 1] = Planted(seen, effect)
    return model


WINDOWS = random_ids(6, 128, seed=2)
UNTESTED = random_ids(3, 256, seed=2)  # too few windows for the guard


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "granite"])
@pytest.mark.parametrize("maps", ["both", "mlp"])
def test_a_linear_effect_of_the_mlp_is_folded_exactly(family, maps):
    model = (
        families.tiny_model("granite", residual_multiplier=0.22)
        if family == "granite"
        else tiny_model(family)
    )
    width = 256 if family == "gpt2" else 128
    p = 0.05 * randn(width, 64)
    dense = planted(model, lambda _x, m, a: m.view(*_x.shape[:2], -1) @ p)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    result = gl.prune(
        dense, layers="3-4", recover="fold", fold_maps=maps, windows=UNTESTED, ridge=1e-12
    )
    ids = UNTESTED[:1]
    assert (logits(result.model, ids) - logits(dense, ids)).abs().max() < 1e-6
    entry = result.record["boundaries"][0]
    assert entry["error_after"] < 1e-6 < entry["error_before"]
    assert entry["operator"] == {"both": "fold", "mlp": "fold-mlp"}[maps]
    assert entry["attached"] is False and entry["changed_layer"] == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())
    assert gl.perplexity(result.model, ids).perplexity == pytest.approx(
        gl.perplexity(dense, ids).perplexity, rel=1e-6
    )


def test_both_maps_of_a_parallel_layer_are_folded_exactly():
    """There the attention map does not change the MLP's input."""
    p, q = 0.05 * randn(128, 64), 0.1 * randn(64, 64, seed=1)
    dense = planted(families.tiny_model("gpt_neox"), lambda _x, m, a: m @ p + a @ q)
    result = gl.prune(dense, layers="3-4", recover="fold", windows=UNTESTED, ridge=1e-12)
    entry = result.record["boundaries"][0]
    assert entry["operator"] == "fold"
    assert entry["weights"] == ["attention.dense.weight", "mlp.dense_4h_to_h.weight"]
    ids = random_ids()
    assert (logits(result.model, ids) - logits(dense, ids)).abs().max() < 1e-6


def test_fold_and_ghost_are_solved_together():
    """y = (x + mP)(I + Q) needs both."""
    p, q = 0.05 * randn(128, 64), 0.02 * randn(64, 64, seed=1)
    dense = planted(tiny_model(), lambda x, m, a: m @ p + (x + m @ p) @ q)
    error = {}
    for recover in ("fold", "ghost-robust", "fold+ghost"):
        result = gl.prune(dense, layers="3-4", recover=recover, windows=UNTESTED, ridge=1e-9)
        entry = result.record["boundaries"][0]
        assert entry["operator"] == recover
        error[recover] = entry["error_after"]
    assert entry["attached"] is True and entry["weights"] == ["mlp.down_proj.weight"]
    assert type(result.model).__name__ == "GhostLlamaForCausalLM"
    assert error["fold+ghost"] < 0.5 * min(error["fold"], error["ghost-robust"])


def test_joint_solve_recovers_a_planted_pair(monkeypatch):
    monkeypatch.setattr(fold_ghost, "ROUNDS", 100)
    monkeypatch.setattr(fold_ghost, "OPERATOR_RIDGES", (1e-14,))
    m, x = randn(500, 12), randn(500, 6, seed=1)
    p, q = 0.3 * randn(12, 6, seed=2), 0.2 * randn(6, 6, seed=3)
    moments = state_moments(m, x, (x + m @ p) @ (torch.eye(6) + q))[0]
    d, operator = fold_ghost.JointSolver(moments).solve(1e-14)
    assert (d - p).abs().max() < 1e-6 and (operator - q).abs().max() < 1e-6


# --- the solves


def feature_moments(f, delta, y, held_out=0):
    parts = [FeatureMoments.zeros(f.shape[1], y.shape[1]) for _ in range(2)]
    cut = len(f) - held_out
    parts[0].add(f[:cut], delta[:cut], y[:cut])
    parts[1].add(f[cut:], delta[cut:], y[cut:])
    return parts


def test_fold_is_ridge_regression_with_a_ridge_per_block():
    f = torch.cat([randn(400, 10), 30 * randn(400, 20, seed=1)], dim=1)
    delta = randn(400, 8, seed=2)
    moments = feature_moments(f, delta, delta)[0]
    scale = torch.cat([b.expand(n) for b, n in zip(_means(f, [10, 20]), [10, 20], strict=True)])
    rows = torch.cat([f, (0.3 * scale).sqrt().diag()])
    expected = torch.linalg.lstsq(rows, torch.cat([delta, torch.zeros(30, 8).double()])).solution
    assert torch.allclose(fold.solve_fold(moments, 0.3, [10, 20]), expected, atol=1e-10)
    error = (f @ expected - delta).norm() / delta.norm()
    assert moments.relative_error(expected) == pytest.approx(float(error))
    dead = feature_moments(*(torch.zeros(5, k).double() for k in (4, 2, 2)))[0]
    assert not fold.solve_fold(dead, 0.1, [4]).any()


def _means(f, sizes):
    return [part.square().sum(dim=0).mean() for part in f.split(sizes, dim=1)]


def test_fold_ridge_is_the_smallest_within_two_percent_of_the_best():
    f = randn(120, 60)
    delta = f @ (0.1 * randn(60, 8, seed=1)) + randn(120, 8, seed=2)
    parts = feature_moments(f, delta, delta + f[:, :8], held_out=30)
    d, ridge, errors = fold.fit_fold(*parts)
    assert list(errors) == list(fold.RIDGES) and ridge > min(fold.RIDGES)
    best = min(errors.values())
    for value, error in errors.items():
        assert error == pytest.approx(parts[1].relative_error(_solved(parts[0], value)))
        assert (error > 1.02 * best) if value < ridge else True
    assert errors[ridge] <= 1.02 * best
    assert torch.allclose(d, _solved(parts[0], ridge))
    assert fold.fit_fold(*parts, ridge=0.5)[1] == 0.5


def _solved(moments, ridge):
    return fold.solve_fold(moments, ridge, [len(moments.gram)])


def state_moments(m, x, y, massive=None, held_out=0):
    massive = torch.zeros(len(x), dtype=torch.bool) if massive is None else massive
    parts = [StateFeatureMoments.zeros(m.shape[1], x.shape[1]) for _ in range(2)]
    cut = len(x) - held_out
    parts[0].add(m[:cut], x[:cut], y[:cut], massive[:cut])
    parts[1].add(m[cut:], x[cut:], y[cut:], massive[cut:])
    return parts


def test_joint_solve_is_stationary(monkeypatch):
    """At its end no small step in D or M lowers the objective, massive tokens' term included."""
    monkeypatch.setattr(fold_ghost, "ROUNDS", 400)
    m, x = randn(300, 12), randn(300, 6, seed=1)
    y = x + m @ (0.3 * randn(12, 6, seed=2)) + 0.3 * x @ randn(6, 6, seed=3) + 0.1 * randn(300, 6)
    massive = torch.zeros(300, dtype=torch.bool)
    massive[[0, 100]] = True
    x[massive] *= 200
    moments = state_moments(m, x, y, massive)[0]
    d, operator = (t.requires_grad_() for t in fold_ghost.JointSolver(moments).solve(0.1))
    unit = 1 / x.norm(dim=1, keepdim=True)
    out = (x + m @ d) @ (torch.eye(6) + operator)
    robust = moments.behind(d.detach()).ordinary
    shrink = 1e-4 * float(robust.gram.trace()) / 6  # as in the last solve for M
    scale = float((m * unit)[~massive].square().sum(dim=0).mean())
    loss = ((out - y) * unit)[~massive].square().sum() + ((m @ d) * unit)[massive].square().sum()
    loss = loss + 0.1 * scale * d.square().sum() + shrink * operator.square().sum()
    for gradient in torch.autograd.grad(loss, (d, operator)):
        assert gradient.abs().max() < 1e-3


def test_moments_behind_a_changed_map_are_those_of_the_moved_states():
    m, x, y = randn(50, 12), randn(50, 6, seed=1), randn(50, 6, seed=2)
    massive = torch.zeros(50, dtype=torch.bool)
    massive[7] = True
    d = 0.1 * randn(12, 6, seed=3)
    behind = state_moments(m, x, y, massive)[0].behind(d)
    unit = 1 / x.norm(dim=1, keepdim=True)
    moved = ((x + m @ d) * unit)[~massive]
    target = (y * unit)[~massive]
    assert torch.allclose(behind.ordinary.gram, moved.T @ moved)
    assert torch.allclose(behind.ordinary.cross, moved.T @ (target - moved))
    assert behind.ordinary.delta_squares == pytest.approx(float((target - moved).square().sum()))
    assert torch.allclose(behind.unit_sum, moved.sum(dim=0))
    states = behind.massive_states()
    assert torch.allclose(states[0], (x + m @ d)[massive]) and torch.equal(states[1], y[massive])


@pytest.mark.parametrize("recover", ["fold", "fold+ghost"])
def test_scaling_all_states_changes_no_ridge(recover):
    """x, y and everything else 300 times larger: the same choice and the same weights."""
    x, y, m = randn(600, 6), randn(600, 6, seed=1), randn(600, 12, seed=2)
    y = x + m @ (0.2 * randn(12, 6, seed=3)) + 0.3 * y
    found = []
    for k in (1.0, 300.0):
        if recover == "fold":
            scale = 1 / torch.maximum(x.norm(dim=1), y.norm(dim=1))[:, None] / k
            rows = k * m * scale, k * (y - x) * scale, k * y * scale
            found.append(fold.fit_fold(*feature_moments(*rows, held_out=150)))
        else:
            parts = state_moments(k * m, k * x, k * y, held_out=150)
            found.append(fold_ghost.choose_joint(*parts, 0.0))
    assert found[0][1] == found[1][1]
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-8, atol=1e-12)


def test_operator_ridge_rises_where_rounding_costs():
    m, x = randn(500, 12), randn(500, 6, seed=1)
    x[:, 5] = x[:, 4] + 1e-3 * x[:, 5]  # hardly any direction: M gets huge entries
    y = x.clone()
    y[:, 0] += 300 * (x[:, 5] - x[:, 4])
    moments = state_moments(m, x, y)[0].behind().ordinary
    exact, ridge = fold_ghost.stored_operator(moments, torch.float64)
    assert ridge == fold_ghost.OPERATOR_RIDGES[0]
    rounded, raised = fold_ghost.stored_operator(moments, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and raised >= ridge
    assert torch.allclose(exact, fold_ghost.solve_operator(moments, ridge))


# --- in a model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_fold_is_saved_as_a_stock_checkpoint(tmp_path, dtype, sharded):
    from transformers import AutoModelForCausalLM

    from ghostlayers.loading import load_model, load_tokenizer, locate

    shards = {"max_shard_size": "100KB"} if sharded else {}
    source = locate(str(save_tiny(tmp_path / "dense", **shards)))
    dense = load_model(source, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    result = gl.prune(
        dense, load_tokenizer(source), layers="3-4,6", recover="fold", windows=WINDOWS[:3]
    )
    size = 60_000 if sharded else 2 * 10**9
    out = gl.save_pruned(result, tmp_path / "out", source=source, dtype=dtype, max_shard_bytes=size)
    names = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert (len(list(out.glob("*.safetensors"))) > 1) == sharded
    stock = {
        name
        for file in (tmp_path / "dense").glob("*.safetensors")
        for name in load_file(file)
        if not name.startswith(("model.layers.5.", "model.layers.6.", "model.layers.7."))
    }
    assert names == stock  # those of a stock model of this depth
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert "ghost" not in json.dumps(config).lower()
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.dtype == getattr(torch, dtype)
    ids = random_ids()
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))
    assert result.changed == {
        f"model.layers.{layer}.{name}.weight"
        for layer in (2, 3)
        for name in ("mlp.down_proj", "self_attn.o_proj")
    }
    kept = dict(result.model.named_parameters())
    for name, tensor in dense.named_parameters():
        assert torch.equal(before[name], tensor)
        same = kept.get(name)
        if same is not None and name.startswith("model.layers.2."):
            assert (same is tensor) == (name not in result.changed)
    record = json.loads((out / "ghostlayers.json").read_text())
    assert [entry["attached"] for entry in record["boundaries"]] == [False, False]
    card = (out / "README.md").read_text()
    assert "trust_remote_code" not in card and "stock checkpoint" in card
    assert "new weights" in card


def test_changed_weights_are_written_in_the_source_dtype_and_names(tmp_path):
    """A checkpoint of the base model alone, in float32, pruned in bfloat16."""
    from ghostlayers.loading import load_model, load_tokenizer, locate

    save_tiny(tmp_path / "dense", tie_word_embeddings=True)
    tiny_model(tie_word_embeddings=True).model.save_pretrained(tmp_path / "dense")
    source = locate(str(tmp_path / "dense"))
    model = load_model(source, dtype="auto").to(torch.bfloat16)
    settings = {"layers": "3", "recover": "fold", "refine": 4}
    result = gl.prune(model, load_tokenizer(source), windows=WINDOWS, **settings)
    out = gl.save_pruned(result, tmp_path / "out", source=source)
    tensors = load_file(out / "model.safetensors")
    for name in result.changed:
        tensor = tensors[name.removeprefix("model.")]
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, result.model.get_parameter(name).float())


def test_fold_without_a_source_is_saved_from_memory(tmp_path):
    result = gl.prune(tiny_model("gpt2"), layers="3", recover="fold", windows=WINDOWS[:3])
    loaded = reload(gl.save_pruned(result, tmp_path / "out"))
    ids = random_ids()
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))
    assert step_error(loaded, ids) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fold_and_ghost_survive_a_reload(tmp_path, dtype):
    from ghostlayers.loading import load_model, load_tokenizer, locate

    source = locate(str(save_tiny(tmp_path / "dense")))
    dense = load_model(source, dtype=dtype)
    result = gl.prune(
        dense, load_tokenizer(source), layers="2-3,5", recover="fold+ghost", windows=WINDOWS[:3]
    )
    entries = result.record["boundaries"]
    assert [entry["operator"] for entry in entries] == ["fold+ghost"] * 2
    assert [(entry["changed_layer"], entry["layer"]) for entry in entries] == [(1, 2), (2, 3)]
    assert all(entry["condition"] >= 1.0 for entry in entries)
    out = gl.save_pruned(result, tmp_path / "out", source=source, dtype=dtype)
    loaded, ids = reload(out), random_ids()
    assert torch.equal(logits(loaded, ids), logits(result.model, ids))


def test_tied_weights_are_not_changed():
    model = gl.share_tensors(tiny_model(tie_word_embeddings=True))
    model.tie_weights()
    weight = model.model.embed_tokens.weight
    with pytest.raises(gl.UnsupportedModelError, match="tied"):
        change_weights_(model, {"model.embed_tokens.weight": torch.zeros_like(weight)})
    with pytest.raises(ValueError, match="got"):
        change_weights_(model, {"model.norm.weight": torch.zeros(3)})


def test_a_refused_fold_leaves_ghost_robust():
    """Layer 0 is not there to fold into; the other boundary is folded."""
    result = gl.prune(tiny_model(), layers="0,4", recover="fold+ghost", windows=WINDOWS[:3])
    operators = [entry["operator"] for entry in result.record["boundaries"]]
    assert operators == ["ghost-robust", "fold+ghost"]
    assert any("ghost-robust instead of fold+ghost (boundary [0, 1)" in w for w in result.warnings)
    mixed = families.tiny_model("mixtral")
    mixed = gl.prune(mixed, layers="3", recover="fold+ghost", windows=WINDOWS[:3])
    assert [e["operator"] for e in mixed.record["boundaries"]] == ["ghost-robust"]


def test_one_sublayer_without_attention_map_is_folded_alone():
    dense = families.tiny_model("falcon_h1")
    result = gl.prune(dense, layers="3", recover="fold", windows=WINDOWS[:3])
    assert result.record["boundaries"][0]["operator"] == "fold-mlp"
    assert any("2 output maps of token mixers" in line for line in result.warnings)


def test_too_few_tokens_are_named():
    result = gl.prune(tiny_model(), layers="3", recover="fold", windows=WINDOWS[:3])
    need = 4 * (64 + 128)
    assert any(f"needs about {need}" in line for line in result.warnings)
    windows = random_ids(8, 128)
    enough = gl.prune(tiny_model(), layers="3", recover="fold", windows=windows, refine=0)
    assert not any("needs about" in line for line in enough.warnings)


# --- the guard's ladder


class Ladder:
    """Planted losses of a ladder of one boundary; `noise` is what every step adds to its error."""

    def __init__(self, monkeypatch, losses, names, noise=0.0):
        plan = PruningPlan(12, (4, 5))
        boundary = plan.boundaries[0]
        part = {"m": torch.zeros(2, 2)}
        ladder = tuple(OperatorFit(name, {}, {}, fit_part=part) for name in names)
        wobble = [0.1, -0.1, 0.05, -0.05]

        class Trial:
            def __init__(self, *_):
                self.none = [losses["pruned"]] * 4

            def losses(self, choice):
                if not choice:
                    return self.none
                (fit,) = choice.values()
                step = noise * (1 + names.index(fit.name))
                return [losses[fit.name] + step * w for w in wobble]

        class Scorer:
            ids = random_ids(4, 8)

            def dense_losses(self, _states):
                return [losses["dense"]] * 4

            def suffix(self, pruned, _plan, _start):
                return pruned

            def written(self):
                return self

        monkeypatch.setattr(guard, "_Trial", Trial)
        ids, ladders = random_ids(16, 8), {boundary: ladder}
        verdict = guard.judge_repairs("dense", "pruned", plan, ladders, ids, scorer=Scorer())
        self.entry = verdict.boundaries[boundary]
        self.chosen = self.entry["chosen"]


LADDER = ("fold+ghost", "ghost-robust")


@pytest.mark.parametrize(
    ("joint", "robust", "noise", "chosen"),
    [
        (2.5, 3.0, 0.1, "fold+ghost"),
        (3.0, 3.0, 0.1, "ghost-robust"),  # no better: the simpler one
        (2.99, 3.0, 1.0, "ghost-robust"),  # better by less than its noise
        (3.5, 3.0, 0.1, "ghost-robust"),
        (4.5, 3.9, 0.1, "none"),  # less than a quarter of the damage
        (4.5, 4.5, 0.1, "none"),
    ],
)
def test_guard_goes_down_the_ladder(monkeypatch, joint, robust, noise, chosen):
    losses = {"dense": 2.0, "pruned": 4.0, "fold+ghost": joint, "ghost-robust": robust}
    ladder = Ladder(monkeypatch, losses, LADDER, noise)
    assert ladder.chosen == chosen
    tried = ladder.entry["tried"]
    assert [step["required_standard_errors"] for step in tried] == [1.0, 2.0]
    assert [step["against"] for step in tried] == ["ghost-robust", "none"]
    assert ladder.entry["candidate"] == "fold+ghost"


def test_dropped_folds_leave_a_stock_model_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "MIN_RECOVERED", 2.0)
    dense = tiny_model()
    result = gl.prune(dense, layers="3", recover="fold", refine=0, windows=WINDOWS)
    entry = result.record["boundaries"][0]
    assert (entry["operator"], result.changed) == ("none", frozenset())
    assert entry["guard"]["candidate"] == "fold"
    assert entry["guard"]["fit"]["maps"] == ["self_attn.o_proj.weight", "mlp.down_proj.weight"]
    assert [step["against"] for step in entry["guard"]["tried"]] == ["fold-mlp", "none"]
    assert any("no repair at [3, 4)" in line for line in result.warnings)
    none = gl.prune(dense, layers="3", recover="none").model
    assert torch.equal(logits(result.model, WINDOWS), logits(none, WINDOWS))
    card = (gl.save_pruned(result, tmp_path / "out") / "README.md").read_text()
    assert "No repair was kept" in card


# --- memory and the command line


def test_memory_is_estimated_before_anything_is_measured(monkeypatch, capsys):
    assert gram_bytes(18432, 4096) > 3 * 8 * 18432**2
    monkeypatch.setattr(fold_plan, "available_bytes", lambda device: 1000)
    with pytest.raises(gl.CalibrationError, match="Use `fold_maps` mlp") as caught:
        gl.prune(tiny_model(), layers="3", recover="fold", windows=WINDOWS)
    assert "GB on cpu" in str(caught.value)
    with pytest.raises(gl.CalibrationError, match="Use `recover` ghost-robust"):
        gl.prune(tiny_model(), layers="3", recover="fold+ghost", windows=WINDOWS)
    monkeypatch.setattr(fold_plan, "available_bytes", lambda device: None)
    monkeypatch.setattr(fold_plan, "ANNOUNCED_BYTES", 1000)
    gl.prune(tiny_model(), layers="3", recover="fold", windows=WINDOWS[:3], progress=False)
    need = gram_bytes(64 + 128, 64)
    assert f"the moments will take about {need} bytes" in capsys.readouterr().err


def test_command_line_refusals(work, refuse, tmp_path):
    families.tiny_model("mixtral").save_pretrained(tmp_path / "mixed")
    tiny_tokenizer().save_pretrained(tmp_path / "mixed")
    text = ("--calibration", work / "t.txt", "--num-windows", 4, "--window", 64)
    fold_at = ("--recover", "fold", "--out", tmp_path / "out", *text)
    assert "starts at layer 0" in refuse(tmp_path, "prune", work / "m", "--layers", "0", *fold_at)
    assert "it is a mixture of experts" in refuse(
        tmp_path, "prune", tmp_path / "mixed", "--layers", "3", *fold_at
    )
    assert "fold_maps" in refuse(
        tmp_path, "prune", work / "m", "--layers", "3", *fold_at, "--fold-maps", "down"
    )
    assert "moments_device" in refuse(
        tmp_path, "prune", work / "m", "--layers", "3", *fold_at, "--moments-device", "tpu9"
    )
    assert "Unknown fit" in refuse(
        tmp_path, "prune", work / "m", "--layers", "3", *fold_at, "--fit", "sequentially"
    )


@pytest.mark.parametrize("recover", ["fold", "fold+ghost"])
def test_command_line(work, run, tmp_path, recover):
    status, out, err = run(
        *("prune", work / "m", "--layers", "3", "--recover", recover, "--out", tmp_path / "out"),
        *("--calibration", work / "t.txt", "--num-windows", 4, "--window", 64),
        *("--moments-device", "cpu", "--refine", 4),
    )
    assert status == 0, err
    assert "needs about" in err
    assert reload(tmp_path / "out") is not None
    status, out, _ = run("info", tmp_path / "out")
    assert status == 0 and recover in out


def test_the_guard_sees_maps_that_have_never_seen_the_held_out_windows(monkeypatch):
    """Other held-out windows: the same weights without them, of both maps."""
    dense, windows = tiny_model(), random_ids(8, 96, seed=2)
    seen = watched_ladders(monkeypatch)
    for seed in (3, 4):
        windows[[3, 7]] = random_ids(2, 96, seed=seed)
        gl.prune(dense, layers="3", recover="fold", windows=windows, ridge=0.1, refine=0)
    parts = [[ladder[0].weights_part for ladder in ladders] for ladders in seen]
    for one, two in zip(*parts, strict=True):
        assert len(one) == 2
        for name, weight in one.items():
            assert torch.allclose(weight, two[name], atol=1e-6), name
