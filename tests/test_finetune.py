"""Distillation on tiny models: what it finds, what it leaves alone, and how it goes on."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch

import ghostlayers as gl
from ghostlayers.distillation import FinetuneResult
from ghostlayers.finetune_config import FinetuneConfig
from ghostlayers.modeling_ghostlayers import GhostOperator
from ghostlayers.moments import held_out_windows
from ghostlayers.teacher_logits import cache_bytes
from ghostlayers.trained_parameters import linear_maps, operator_parameters
from ghostlayers.training import window_order
from oracles import FAMILIES, logits, random_ids, tiny_model

IDS = random_ids(16, 24, seed=2)
FAST = {"learning_rate": 3e-3, "steps": 12, "eval_every": 4, "accumulation": 2, "batch_size": 3}
DEPTH, CUT = 5, "2-3"


def operators(model) -> list[GhostOperator]:
    return [module for module in model.modules() if isinstance(module, GhostOperator)]


@torch.no_grad()
def planted(family: str = "llama", dtype=torch.float32):
    """A teacher with one operator, and a student whose operator is off by a map of rank one."""
    dense = tiny_model(family, DEPTH).to(dtype)
    teacher = gl.prune(dense, layers=CUT, recover="ghost", windows=IDS, ridge=1e-2).model
    student = copy.deepcopy(teacher)
    (operator,) = operators(student)
    left, right = torch.randn(2, 64, generator=torch.Generator().manual_seed(5))
    operator.map.weight += 0.1 * torch.outer(left, right).to(dtype)
    return teacher, student


@pytest.fixture(scope="module")
def pair():
    return planted()


def values(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(one, two) -> set[str]:
    assert one.keys() == two.keys()
    return {name for name in one if not torch.equal(one[name], two[name])}


def reference_kl(teacher, student, top_k: int = 50) -> float:
    """Mean divergence over the held-out windows, in float64 by NumPy."""
    ids = IDS[held_out_windows(len(IDS))]
    p, q = (logits(m, ids).double().log_softmax(-1).exp().numpy() for m in (teacher, student))
    order = np.argsort(-p, axis=-1)[..., :top_k]
    p, q = (np.take_along_axis(x, order, axis=-1) for x in (p, q))
    p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], axis=-1) for x in (p, q))
    return float((p * np.log(p / q)).sum(-1).mean())


# What it finds.


@pytest.mark.parametrize("family", [*FAMILIES])
def test_divergence_falls_and_only_the_operator_changes(family):
    teacher, student = planted(family)
    before = [values(teacher), values(student)]
    result = gl.finetune(student, teacher, IDS, **{**FAST, "learning_rate": 1e-2})
    assert not differing(before[0], values(teacher)) and not differing(before[1], values(student))
    assert {p.requires_grad for p in student.parameters()} == {True}
    changed = differing(before[1], values(result.model))
    assert changed == result.changed == set(operator_parameters(student)) and len(changed) == 1
    found = result.record
    assert found["held_out_kl_after"] < 0.9 * found["held_out_kl_before"]
    for when, model in (("before", student), ("after", result.model)):
        expected = reference_kl(teacher, model)
        assert found[f"held_out_kl_{when}"] == pytest.approx(expected, rel=1e-2, abs=1e-5)
        scored = gl.perplexity(model, IDS[3::4]).perplexity
        assert found[f"held_out_perplexity_{when}"] == pytest.approx(scored, rel=1e-5)
    assert result.history[0]["train_kl"] is None
    assert result.history[-1]["train_kl"] < result.history[1]["train_kl"]
    assert [row["step"] for row in result.history] == [0, 4, 8, 12]


def test_shares_frozen_tensors(pair):
    teacher, student = pair
    result = gl.finetune(student, teacher, IDS, **FAST)
    own = dict(student.named_parameters())
    for name, parameter in result.model.named_parameters():
        same = parameter.data_ptr() == own[name].data_ptr()
        assert same == (name not in result.changed)


def test_sink_direction_stays_and_shift_is_trained():
    teacher = gl.prune(tiny_model("llama", DEPTH), layers=CUT, recover="none").model
    spec = {"layer": 2, "side": "input", "sink_cosine": 0.1}
    from ghostlayers.modeling_ghostlayers import attach_operators_

    (operator,) = attach_operators_(teacher, [spec], decoder_path="layers")
    with torch.no_grad():
        operator.sink_direction.copy_(torch.nn.functional.normalize(torch.ones(64), dim=0))
        operator.shift.fill_(0.3)
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        operators(student)[0].shift.zero_()
    result = gl.finetune(student, teacher, IDS, **FAST)
    assert {name.rpartition("ghost_input.")[2] for name in result.changed} == {
        "map.weight",
        "shift",
    }
    assert differing(values(student), values(result.model)) <= result.changed
    assert operators(result.model)[0].shift.mean().item() > 0.01


def test_never_worse_than_the_start(pair):
    teacher, _ = pair
    result = gl.finetune(teacher, teacher, IDS, **{**FAST, "learning_rate": 0.5})
    assert result.model is teacher and result.changed == frozenset()
    assert result.record["best_step"] == 0 and result.record["held_out_kl_before"] < 1e-6
    assert result.record["held_out_kl_after"] == result.record["held_out_kl_before"]


def test_stops_early_and_returns_the_best(pair):
    teacher, student = pair
    seen: list[int] = []
    settings = {**FAST, "learning_rate": 0.05, "steps": 200, "eval_every": 1, "patience": 3}
    result = gl.finetune(student, teacher, IDS, on_step=seen.append, **settings)
    history = result.history
    best = min(history, key=lambda row: row["held_out_kl"])
    assert seen[-1] == history[-1]["step"] == best["step"] + 3 < 200
    assert result.record["best_step"] == best["step"] > 0
    assert result.record["held_out_kl_after"] == pytest.approx(best["held_out_kl"], abs=1e-9)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_bfloat16_models_train_in_float32_and_keep_their_dtype(precision):
    teacher, student = planted(dtype=torch.bfloat16)
    before = values(student)
    # Steps below half a unit in the last place of bfloat16: they add up only in float32.
    settings = {**FAST, "learning_rate": 1e-3, "steps": 24, "mixed_precision": precision}
    result = gl.finetune(student, teacher, IDS, **settings)
    assert {tensor.dtype for tensor in result.model.parameters()} == {torch.bfloat16}
    assert differing(before, values(result.model)) == result.changed and result.changed
    assert result.record["held_out_kl_after"] < result.record["held_out_kl_before"]
    assert result.record["precision"] == precision


def test_same_seed_same_weights_and_other_seed_others(pair):
    teacher, student = pair
    found = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        found.append(gl.finetune(student, teacher, IDS, seed=seed, **FAST))
        assert torch.equal(before, torch.get_rng_state())
    assert not differing(values(found[0].model), values(found[1].model))
    assert found[0].history == found[1].history != found[2].history


def test_held_out_windows_are_never_trained_on(pair):
    order = window_order([0, 1, 2, 4], 10, seed=0)
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 4] and order[:4] != order[4:8]
    teacher, student = pair
    other = IDS.clone()
    other[3::4] = random_ids(4, 24, seed=9)
    settings = {**FAST, "eval_every": 12}
    one, two = (gl.finetune(student, teacher, ids, **settings) for ids in (IDS, other))
    assert one.history[-1]["train_kl"] == two.history[-1]["train_kl"]
    assert one.history[-1]["held_out_kl"] != two.history[-1]["held_out_kl"]


def test_is_adamw_with_warm_up_cosine_clipping_and_accumulation(pair):
    teacher, student = pair
    steps, warm, peak, decay = 5, 2, 3e-3, 0.1
    settings = {"steps": steps, "warmup": warm / steps, "weight_decay": decay, "eval_every": 5}
    settings |= {"learning_rate": peak, "max_grad_norm": 0.01}
    found = [
        gl.finetune(student, teacher, IDS, batch_size=batch, accumulation=4 // batch, **settings)
        for batch in (4, 1)
    ]
    expected = copy.deepcopy(student)
    weight = operators(expected)[0].map.weight
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    order = window_order([i for i in range(16) if i % 4 != 3], 4 * steps, seed=0)
    for step in range(steps):
        ids = IDS[order[4 * step : 4 * step + 4]]
        p, ids_k = logits(teacher, ids).softmax(-1).topk(50)
        q = expected(input_ids=ids).logits.softmax(-1).gather(-1, ids_k)
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1) for x in (p, q))
        gradient = torch.autograd.grad((p * (p / q).log()).sum(-1).mean(), weight)[0]
        gradient *= min(1.0, 0.01 / float(gradient.norm()))
        assert gradient.norm() == pytest.approx(0.01, rel=1e-4)
        rate = peak * step / warm
        if step >= warm:
            rate = peak * 0.5 * (1 + np.cos(np.pi * (step - warm) / (steps - warm)))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        with torch.no_grad():
            weight -= rate * (decay * weight + mean / (square.sqrt() + 1e-8))
    for result in found:
        assert result.record["best_step"] == steps
        torch.testing.assert_close(operators(result.model)[0].map.weight, weight, atol=2e-4, rtol=0)


# Going on.


class Killed(Exception):
    pass


def kill_at(step: int):
    def hook(now: int) -> None:
        if now == step:
            raise Killed

    return hook


@pytest.mark.parametrize(("train", "step"), [("operators", 6), ("operators", 12), ("lora", 6)])
def test_goes_on_bit_for_bit(pair, tmp_path, train, step):
    teacher, student = pair
    settings = {**FAST, "train": train}
    whole = gl.finetune(student, teacher, IDS, **settings)
    with pytest.raises(Killed):
        gl.finetune(student, teacher, IDS, work=tmp_path, on_step=kill_at(step), **settings)
    seen: list[int] = []
    resumed = gl.finetune(student, teacher, IDS, work=tmp_path, on_step=seen.append, **settings)
    assert seen == list(range(step - step % 4 + 1, 13))  # from the last measurement
    assert resumed.history == whole.history
    assert resumed.changed == whole.changed and resumed.changed
    assert not differing(values(resumed.model), values(whole.model))


def test_state_of_other_settings_is_not_used(pair, tmp_path):
    teacher, student = pair
    with pytest.raises(Killed):
        gl.finetune(student, teacher, IDS, work=tmp_path, on_step=kill_at(6), **FAST)
    other = {**FAST, "learning_rate": 1e-3}
    with pytest.warns(UserWarning, match="starting over"):
        result = gl.finetune(student, teacher, IDS, work=tmp_path, **other)
    assert result.history == gl.finetune(student, teacher, IDS, **other).history


def test_damaged_state_is_named(pair, tmp_path):
    teacher, student = pair
    (tmp_path / "training.pt").write_bytes(b"torn")
    with pytest.raises(gl.CheckpointError, match=r"training\.pt is damaged"):
        gl.finetune(student, teacher, IDS, work=tmp_path, **FAST)


# The teacher's logits.


def test_cache_holds_what_it_should_and_is_read_instead_of_the_teacher(pair, tmp_path):
    teacher, student = pair
    windows = gl.Windows(IDS, "test", bos_per_window=False)
    cache = gl.cache_teacher(teacher, windows, tmp_path / "c", top_k=7, batch_size=3)
    assert cache.num_bytes == cache_bytes(16, 24, 7) == 16 * 24 * 7 * 6
    stored = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    assert cache.num_bytes <= stored < cache.num_bytes + 1000
    with torch.no_grad():
        expected = logits(teacher, IDS[5:6])[0].log_softmax(-1).topk(7)
    log_probs, ids = cache.read(5)
    assert torch.equal(ids.long(), expected.indices)
    torch.testing.assert_close(log_probs.float(), expected.values, atol=5e-3, rtol=0)

    first = gl.finetune(student, teacher, IDS, top_k=7, **FAST)
    again = gl.finetune(student, cache, IDS, top_k=7, **FAST)
    assert first.history == again.history
    with pytest.raises(gl.GhostlayersError, match="top_k differ"):
        gl.finetune(student, cache, IDS, top_k=8, **FAST)


def test_cache_is_reused_whole_or_in_part_and_refused_when_stale(pair, tmp_path, monkeypatch):
    teacher, student = pair
    monkeypatch.setattr("ghostlayers.teacher_logits.MAX_SHARD_BYTES", cache_bytes(5, 24, 9))
    windows = gl.Windows(IDS, "test", bos_per_window=False)
    folder = tmp_path / "c"
    cache = gl.cache_teacher(teacher, windows, folder, top_k=9)
    shards = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"windows-{i:05d}.safetensors" for i in range(4)]
    rows = [cache.read(window)[0] for window in range(16)]
    kept = shards[1].read_bytes()
    shards[2].unlink()
    calls: list[int] = []
    handle = teacher.register_forward_hook(lambda *_: calls.append(1))
    try:
        gl.cache_teacher(teacher, windows, folder, top_k=9)
    finally:
        handle.remove()
    assert len(calls) == 5 and shards[1].read_bytes() == kept
    assert all(torch.equal(cache.read(window)[0], rows[window]) for window in range(16))

    other = gl.Windows(IDS[:, :20], "test", bos_per_window=False)
    for changes, names in (
        ((teacher, windows, 8), "top_k"),
        ((student, windows, 9), "teacher_sha256"),
        ((teacher, other, 9), "ids_sha256, window"),
    ):
        with pytest.raises(gl.CheckpointError, match=rf"stale \({names} differ\)"):
            gl.cache_teacher(changes[0], changes[1], folder, top_k=changes[2])
    with pytest.warns(UserWarning, match="computing it again"):
        new = gl.cache_teacher(teacher, windows, folder, top_k=8, replace_stale=True)
    assert new.read(15)[0].shape == (24, 8)


def test_cache_never_deletes_what_it_did_not_make(pair, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    windows = gl.Windows(IDS, "test", bos_per_window=False)
    with pytest.raises(gl.CheckpointError, match="holds other files"):
        gl.cache_teacher(pair[0], windows, tmp_path, replace_stale=True)
    assert (tmp_path / "mine.txt").exists()


# Adapters.


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_lora_changes_maps_and_operators_and_merges(family):
    teacher, student = planted(family)
    before = values(student)
    result = gl.finetune(student, teacher, IDS, train="lora", lora_rank=2, **FAST)
    names = {f"{path}.weight" for path in linear_maps(student)} | set(operator_parameters(student))
    assert not differing(before, values(student))
    assert differing(before, values(result.model)) == result.changed == names
    assert type(result.model) is type(student)
    assert result.record["held_out_kl_after"] < 0.95 * result.record["held_out_kl_before"]
    old = before[next(iter(linear_maps(student))) + ".weight"]
    new = values(result.model)[next(iter(linear_maps(student))) + ".weight"]
    assert torch.linalg.matrix_rank(new - old, rtol=1e-3) == 2
    expected = reference_kl(teacher, result.model)
    assert result.record["held_out_kl_after"] == pytest.approx(expected, rel=1e-2, abs=1e-5)


def test_lora_without_operators():
    dense = tiny_model("llama", DEPTH)
    student = gl.prune(dense, layers=CUT, recover="none").model
    result = gl.finetune(student, dense, IDS, train="lora", **{**FAST, "learning_rate": 3e-4})
    assert type(result.model) is type(dense) and result.history[0]["step"] == 0
    with pytest.raises(gl.GhostlayersError, match="lora"):
        gl.finetune(student, dense, IDS, **FAST)


def test_missing_peft_is_one_line(pair, monkeypatch):
    from ghostlayers.errors import RequirementError

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RequirementError, match=r"needs peft.*ghostlayers\[finetune\]"):
        gl.finetune(pair[1], pair[0], IDS, train="lora", **FAST)
    assert isinstance(gl.finetune(pair[1], pair[0], IDS, **FAST), FinetuneResult)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_neox"])
def test_other_structures(family):
    import families

    dense = families.tiny_model(family, DEPTH)
    student = gl.prune(dense, layers=CUT, recover="ghost", windows=IDS, ridge=1e-2).model
    for train in ("operators", "lora"):
        result = gl.finetune(student, dense, IDS, train=train, **FAST)
        assert differing(values(student), values(result.model)) == result.changed


# What is refused.


def test_settings_are_checked_all_at_once():
    with pytest.raises(gl.GhostlayersError) as caught:
        FinetuneConfig(top_k=0, learning_rate=-1.0, train="operator", num_windows=1, warmup=1.0)
    for word in ("`top_k` is 0", "`learning_rate` is -1.0", "'operators'", "hold some", "`warmup`"):
        assert word in str(caught.value)


def test_refusals(pair):
    teacher, student = pair
    with pytest.raises(gl.CalibrationError, match="hold out"):
        gl.finetune(student, teacher, IDS[:1], **FAST)
    with pytest.raises(
        gl.UnsupportedModelError, match="vocabulary has 300 tokens, the model's 256"
    ):
        gl.finetune(student, tiny_model("llama", DEPTH, vocab_size=300), IDS, **FAST)
    with pytest.raises(gl.GhostlayersError, match="`top_k` is 257; allowed: 1 to 256"):
        gl.finetune(student, teacher, IDS, top_k=257, **FAST)


@torch.no_grad()
def test_divergence_that_is_not_finite_stops_the_run(pair):
    teacher, student = pair
    broken = copy.deepcopy(student)
    operators(broken)[0].map.weight[0, 0] = torch.inf
    with pytest.raises(gl.GhostlayersError, match="is nan after step 0"):
        gl.finetune(broken, teacher, IDS, **FAST)
