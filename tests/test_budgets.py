"""Budgets: what each comes to on models whose sizes and losses are known."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

import families
import ghostlayers as gl
from families import tiny_model as family_model
from ghostlayers import selection
from ghostlayers.budget_values import format_quantity, parse_quantity
from ghostlayers.budgets import SizeBudget
from ghostlayers.decoder import decoder_layers
from ghostlayers.evaluation import window_losses
from ghostlayers.guard_text import guard_windows
from ghostlayers.model_sizes import ModelSizes, byte_sizes, parameter_sizes, structure
from ghostlayers.moments import held_out_windows
from oracles import logits, random_ids, tiny_model
from test_auto import speak

WINDOWS = random_ids(4, 40, seed=2)
# Of the tiny llama: q, k, v, o, three MLP maps and two norms; embeddings, head and last norm.
LAYER = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
OUTSIDE = 2 * 256 * 64 + 64
OPERATOR = 64 * 64
FILES = ["--num-windows", "4", "--window", "32"]


def size_of(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def prune(model, **settings):
    settings = {"select": "shortgpt", "recover": "none", "windows": WINDOWS, **settings}
    return gl.prune(model, progress=False, **settings)


# --- values


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [
        ("target_params", "6.5B", 6_500_000_000),
        ("target_params", "350m", 350_000_000),
        ("target_params", "1.5 K", 1500),
        ("target_params", "0.001T", 10**9),
        ("target_params", 123, 123),
        ("target_params", "123", 123),
        ("target_bytes", "4GB", 4 * 10**9),
        ("target_bytes", "4GiB", 4 * 2**30),
        ("target_bytes", "0.5mib", 2**19),
        ("target_bytes", "7B", 7),
        ("target_bytes", "1TB", 10**12),
    ],
)
def test_quantities(name, value, number):
    assert parse_quantity(name, value) == number


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_params", "6.5G"), ("target_params", "0"), ("target_params", "-3B"),
        ("target_params", "B"), ("target_params", ""), ("target_params", "nan"),
        ("target_params", "1e9"), ("target_params", "6,5B"), ("target_params", "0.1"),
        ("target_bytes", "4M"), ("target_bytes", "4GiBs"), ("target_bytes", "inf"),
    ],
)  # fmt: skip
def test_what_is_no_quantity(name, value):
    with pytest.raises(gl.GhostlayersError, match=f"`{name}` is .*a unit of"):
        gl.PruneConfig(**{name: value})


@pytest.mark.parametrize("number", [1, 999, 1000, 328768, 134515008, 6_738_415_616, 10**13 + 1])
@pytest.mark.parametrize("name", ["target_params", "target_bytes"])
def test_written_quantities_are_read_as_no_less(name, number):
    read = parse_quantity(name, format_quantity(name, number))
    assert number <= read <= number * 1.001 + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "none is given"),
        ({"sparsity": 0.2, "num_remove": 3}, "`num_remove` and `sparsity` are given"),
        ({"layers": "1", "target_params": 5, "max_ppl_ratio": 2.0}, "`layers` and `target_params`"),
        ({"sparsity": 0.0}, "`sparsity` is 0.0"),
        ({"sparsity": 1.0}, "`sparsity` is 1.0"),
        ({"sparsity": math.nan}, "`sparsity` is nan"),
        ({"max_ppl_ratio": 0.99}, "`max_ppl_ratio` is 0.99"),
        ({"max_ppl_ratio": math.inf}, "`max_ppl_ratio` is inf"),
        ({"max_ppl_ratio": 1.3, "num_windows": 3}, "needs 4 or more"),
    ],
)
def test_exactly_one_budget_with_a_sound_value(settings, message):
    with pytest.raises(gl.GhostlayersError, match=re.escape(message)):
        gl.PruneConfig(**settings)


# --- sizes


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "mixtral", "qwen3_moe", "gpt_neox", "opt"]
)
def test_sizes_are_those_of_the_models(family):
    model = family_model(family)
    sizes = parameter_sizes(model)
    assert sizes == parameter_sizes(structure(model.config))
    assert sizes.total == size_of(model)
    for removed in ([2], [1, 5, 6]):
        smaller = gl.remove_layers_(gl.share_tensors(model), removed)
        assert sizes.removed(removed) == sizes.total - size_of(smaller) > 0


def test_what_layers_share_goes_with_the_last_of_them():
    model = tiny_model(num_layers=4)
    layers = decoder_layers(model)
    layers[2].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    sizes, shared = parameter_sizes(model), 64 * 128
    assert sizes.total == size_of(model) == 4 * LAYER + OUTSIDE - shared
    assert sizes.removed([1]) == LAYER - shared and sizes.removed([1, 2]) == 2 * LAYER - shared
    assert sizes.held_by(1) == LAYER


def test_low_bit_models_are_counted_by_their_config():
    config = tiny_model().config
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert parameter_sizes(structure(config)).total == 8 * LAYER + OUTSIDE
    assert config.quantization_config["bits"] == 4


# --- sparsity


@pytest.mark.parametrize(
    ("share", "count"), [(0.2, 6), (0.1, 3), (0.3, 9), (0.7, 21), (0.2001, 7), (1e-9, 1)]
)
def test_decimal_shares_are_exact(share, count):
    equal = ModelSizes(30, {frozenset([layer]): 7 for layer in range(30)}, 100)
    assert SizeBudget("sparsity", share, equal).fewest(range(1, 29)) == count


@pytest.mark.parametrize(("share", "count"), [(0.25, 2), (0.2, 2), (0.26, 3), (0.75, 6)])
def test_sparsity_of_equal_layers(share, count):
    result = prune(tiny_model(), sparsity=share)
    budget = result.record["budget"]
    assert len(result.plan.removed) == budget["num_remove"] == count
    assert (budget["kind"], budget["value"]) == ("sparsity", share)
    assert budget["achieved"] == count / 8 and budget["probes"] == []
    same = prune(tiny_model(), num_remove=count)
    assert same.plan == result.plan and same.record["budget"]["achieved"] == count / 8


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1, 2, 5], "intermediate_size": 32}),
        ("deepseek_v3", {"first_k_dense_replace": 4, "intermediate_size": 32}),
    ],
)
@pytest.mark.parametrize("select", ["shortgpt", "streamline"])
def test_sparsity_of_unequal_layers_depends_on_the_plan(family, settings, select):
    model = family_model(family, **settings)
    sizes = [size_of(layer) for layer in decoder_layers(model)]
    assert len(set(sizes)) == 2
    similarity = gl.measure_similarity(model, [WINDOWS], progress=False)
    plans = [
        gl.select_layers(similarity, selector=select, num_remove=count).removed
        for count in range(1, 7)
    ]
    shares = [sum(sizes[layer] for layer in plan) / sum(sizes) for plan in plans]
    for share in (0.9 * shares[0], 0.999 * shares[2], 1.001 * shares[2]):
        expected = next(
            plan for plan, reached in zip(plans, shares, strict=True) if reached > share
        )
        result = prune(model, sparsity=share, select=select, batch_size=4)
        assert result.plan.removed == expected
        achieved = result.record["budget"]["achieved"]
        assert achieved == pytest.approx(shares[len(expected) - 1])


def test_auto_searches_for_the_number_that_reaches_the_share():
    windows = random_ids(4, 24, seed=2)
    model = tiny_model(num_layers=5)
    result = prune(model, sparsity=0.3, select="auto", windows=windows)
    assert len(result.plan.removed) == 2
    assert result.record["search"]["candidates"][0]["layers"] == list(result.plan.removed)


# --- parameters and bytes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("recover", ["none", "ghost", "ghost-robust"])
def test_target_params_count_embeddings_once_and_operators(family, recover):
    model = tiny_model(family)
    total, layer = size_of(model), size_of(decoder_layers(model)[1])
    settings = {"recover": recover, "select": "streamline"}
    exact = prune(model, target_params=total - 2 * layer, **settings)
    assert len(exact.plan.removed) == (2 if recover == "none" else 3)
    found = exact.record["budget"]["achieved"]
    assert found == size_of(exact.model) <= total - 2 * layer
    less = prune(model, target_params=total - 2 * layer - 1, **settings)
    assert len(less.plan.removed) == 3
    roomy = prune(model, target_params=total - 2 * layer + OPERATOR + 3 * 64, **settings)
    assert len(roomy.plan.removed) == 2


def test_operators_count_at_every_boundary():
    """Two separate layers need two operators, and a third layer to make up for them."""
    model = tiny_model()
    with torch.no_grad():
        for layer in (1, 4):  # shortgpt removes these two, which do nothing
            decoder_layers(model)[layer].self_attn.o_proj.weight.zero_()
            decoder_layers(model)[layer].mlp.down_proj.weight.zero_()
    target = size_of(model) - 2 * LAYER + OPERATOR + 3 * 64
    assert prune(model, target_params=target).plan.removed == (1, 4)
    result = prune(model, target_params=target, recover="ghost")
    assert len(result.plan.removed) == 3
    assert size_of(result.model) <= target


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_target_bytes_of_the_written_files(work, run, tmp_path, dtype, recover):
    width, bound = (4, "900KB") if dtype == "auto" else (2, "450KB")
    flags = ["--target-bytes", bound, "--select", "streamline", "--recover", recover]
    flags += ["--calibration", work / "t.txt", *FILES, "--dtype", dtype]
    status, out, err = run("prune", work / "m", "-o", tmp_path / "x", *flags)
    assert status == 0, err
    budget = json.loads((tmp_path / "x" / "ghostlayers.json").read_text())["budget"]
    written = sum(path.stat().st_size for path in (tmp_path / "x").glob("*.safetensors"))
    limit = parse_quantity("target_bytes", bound)
    assert written <= budget["achieved"] <= limit
    room = 256 * 80 + width * 3 * 64  # allowed for headers and for parts of an operator
    assert written + width * LAYER + room > limit  # one layer fewer would not have fitted
    assert f"budget: --target-bytes {bound} -> {budget['num_remove']} of 8 layers (" in out


def test_bytes_in_memory_are_those_written_from_memory(tmp_path):
    model = tiny_model("gpt2")
    result = prune(model, target_bytes=1_200_000, recover="ghost", select="streamline")
    out = gl.save_pruned(result, tmp_path / "out")
    written = (out / "model.safetensors").stat().st_size
    assert written <= result.record["budget"]["achieved"] <= 1_200_000
    dense = byte_sizes(model)
    assert 0 < dense.total - 4 * size_of(model) < 300 * len(model.state_dict())


# --- what cannot be


IMPOSSIBLE = {
    "sparsity": ("0.9", "0.7500", "0.7500"),
    "target-params": ("50K", "106.816K", "328.768K"),
    "target-bytes": ("100KB", None, None),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_reached_says_what_can(work, run, refuse, name, tmp_path):
    value, least, most = IMPOSSIBLE[name]
    flags = ["--calibration", work / "t.txt", *FILES, "--recover", "none", f"--{name}"]
    err = refuse(work, "prune", work / "m", "-o", work / "x", *flags, value)
    assert f"is {value}, but without all 6 layers" in err
    assert least is None or (least in err and most in err)
    reachable = re.search(r"Allowed: (?:above 0 to )?([\d.]+[A-Z]*)", err)[1].rstrip(".")
    assert run("prune", work / "m", "-o", tmp_path / "x", *flags, reachable)[0] == 0
    record = json.loads((tmp_path / "x" / "ghostlayers.json").read_text())
    assert record["removed"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("flags", [["--target-params", "1B"], ["--target-bytes", "5MB"]])
def test_models_that_are_small_enough_already(work, refuse, flags):
    flags = [*flags, "--calibration", work / "t.txt", *FILES]
    assert "already" in refuse(work, "prune", work / "m", "-o", work / "x", *flags)


def test_impossible_sizes_are_refused_from_the_config_alone(work, refuse, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes((work / "m" / "config.json").read_bytes())
    for flags in (["--sparsity", "0.76"], ["--target-params", "5K"]):
        err = refuse(tmp_path, "prune", tmp_path / "m", "-o", tmp_path / "x", *flags)
        assert "Allowed" in err


def test_no_layer_that_may_go(work, refuse):
    for flags in (["--sparsity", "0.1"], ["--max-ppl-ratio", "2"]):
        flags = [*flags, "--protect-first", 8]
        err = refuse(work, "prune", work / "m", "-o", work / "x", *flags)
        assert "none of the 8 layers may be removed" in err


def test_selectors_that_cannot_reach_it_say_how_far_they_get():
    """No block of streamline may cross the protected layer of this hybrid model."""
    model = family_model("lfm2")
    allowed = set(range(1, 7)) - {5}
    with pytest.raises(gl.PlanError, match="with `select` streamline") as caught:
        prune(model, sparsity=0.6, select="streamline")
    sizes = [size_of(layer) for layer in decoder_layers(model)]
    blocks = [range(s, e) for s in allowed for e in range(s + 1, 8) if {*range(s, e)} <= allowed]
    best = max(sum(sizes[layer] for layer in block) for block in blocks) / sum(sizes)
    assert float(re.search(r"above 0 to ([\d.]+);", str(caught.value))[1]) <= best + 1e-4


# --- perplexity


@pytest.fixture(scope="module")
def idle():
    """A model whose layers 2, 4 and 5 do nothing, and text that it wrote itself."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight *= 5
        for layer in (2, 4, 5):
            decoder_layers(model)[layer].self_attn.o_proj.weight.zero_()
            decoder_layers(model)[layer].mlp.down_proj.weight.zero_()
    return model, speak(model, 12, 40)


def held_out_ratio(model, dense, ids):
    held_out = guard_windows(ids)
    losses = [window_losses(m, held_out, progress=False) for m in (model, dense)]
    means = [math.fsum(part) / len(part) for part in losses]
    return math.exp(means[0] - means[1])


def within(model, ids, ratio, **settings):
    return prune(model, max_ppl_ratio=ratio, windows=ids, batch_size=4, **settings)


def test_layers_that_do_nothing_cost_nothing(idle, monkeypatch):
    model, ids = idle
    sweeps = []
    measure = selection.measure_similarity
    monkeypatch.setattr(
        selection, "measure_similarity", lambda *a, **k: sweeps.append(1) or measure(*a, **k)
    )
    result = within(model, ids, 1.0001)
    assert result.plan.removed == (2, 4, 5)
    assert len(sweeps) == 1
    budget = result.record["budget"]
    assert [probe["num_remove"] for probe in budget["probes"]] == [3, 5, 4]
    assert [probe["within"] for probe in budget["probes"]] == [True, False, False]
    assert budget["achieved"] == pytest.approx(1.0, abs=1e-5)
    four = prune(model, num_remove=4, windows=ids)
    assert budget["probes"][2]["layers"] == list(four.plan.removed)
    expected = held_out_ratio(four.model, model, ids)
    assert budget["probes"][2]["ratio"] == pytest.approx(expected, rel=1e-4)
    assert expected > 1.01
    assert within(model, ids, expected * 1.001).plan == four.plan
    assert within(model, ids, expected * 0.999).plan == result.plan


@pytest.mark.parametrize("recover", ["ghost", "ghost-robust", "replaceme-lstsq", "none"])
def test_every_probe_cuts_once(idle, recover, monkeypatch):
    from ghostlayers import ppl_budget

    model, ids = idle
    cuts, cut = [], ppl_budget.cut
    monkeypatch.setattr(ppl_budget, "cut", lambda *a: cuts.append(a[1].removed) or cut(*a))
    probes = within(model, ids, 1e6, recover=recover).record["budget"]["probes"]
    assert cuts == [tuple(probe["layers"]) for probe in probes] and len(cuts) > 1


@pytest.mark.parametrize("recover", ["ghost", "ghost-robust", "fold"])
def test_ratio_is_of_repairs_that_have_not_seen_the_windows(idle, recover):
    model, ids = idle
    settings = {"recover": recover, "select": "streamline"}
    if recover == "fold":
        settings["refine"] = 4
    generous = within(model, ids, 1e6, **settings)
    assert generous.plan.removed == (1, 2, 3, 4, 5, 6)
    assert "all that may go" in generous.record["budget"]["reason"]
    last = generous.record["budget"]["probes"][-1]
    assert last["ratio"] == generous.record["budget"]["achieved"]
    if recover == "ghost":
        kept = [row for row in range(len(ids)) if row not in held_out_windows(len(ids))]
        part = prune(model, layers="1-6", recover=recover, windows=ids[kept])
        assert last["ratio"] == pytest.approx(held_out_ratio(part.model, model, ids), rel=1e-3)
    else:
        guard = generous.record["guard"]
        ratio = math.exp(guard["loss_chosen"] - guard["loss_dense"])
        assert last["ratio"] == pytest.approx(ratio)
    same = prune(model, num_remove=6, windows=ids, batch_size=4, **settings)
    assert same.plan == generous.plan
    assert torch.equal(logits(same.model, ids), logits(generous.model, ids))
    assert same.changed == generous.changed


def test_what_is_fitted_later_has_not_seen_the_windows_through_what_came_before():
    model = tiny_model()
    with torch.no_grad():
        for layer in (2, 5):  # shortgpt removes these two first
            decoder_layers(model)[layer].self_attn.o_proj.weight *= 0.3
            decoder_layers(model)[layer].mlp.down_proj.weight *= 0.3
    ids = random_ids(12, 40, seed=4)
    settings = {"recover": "ghost", "fit": "sequential"}
    result = within(model, ids, 1.0, protect_last=2, **settings)
    kept = [row for row in range(len(ids)) if row not in held_out_windows(len(ids))]
    probe = next(p for p in result.record["budget"]["probes"] if p["num_remove"] == 3)
    layers = ",".join(map(str, probe["layers"]))
    part = prune(model, layers=layers, windows=ids[kept], batch_size=4, **settings)
    assert len(part.fits) > 1
    assert probe["ratio"] == pytest.approx(held_out_ratio(part.model, model, ids), rel=1e-4)


def test_ratio_that_no_cut_keeps(idle):
    model, ids = idle
    lively = gl.remove_layers_(gl.share_tensors(model), [2, 4, 5])
    with pytest.raises(gl.PlanError, match=r"removing 1 layer \(\d\) makes") as caught:
        within(lively, ids, 1.0)
    least = float(re.search(r"Allowed: ([\d.]+) or more", str(caught.value))[1])
    assert len(within(lively, ids, least).plan.removed) == 1


def test_ratio_needs_windows_to_hold_out(idle):
    with pytest.raises(gl.CalibrationError, match="there are 3 calibration windows"):
        within(idle[0], idle[1][:3], 1.5)


def test_ratio_where_repairs_are_refused(idle):
    with pytest.raises(gl.PlanError, match="no layer goes: .*"):
        within(families.tiny_model("mixtral"), WINDOWS, 1.5, recover="fold")


def test_ratio_with_auto_says_that_it_searches_again_and_again():
    model = tiny_model(num_layers=4)
    with pytest.warns(UserWarning, match="repeats the search"):
        result = within(model, random_ids(4, 24, seed=2), 1e6, select="auto")
    assert result.plan.removed == (1, 2)


def test_ratio_on_the_command_line(work, run, tmp_path):
    flags = ["--max-ppl-ratio", "1e6", "--calibration", work / "t.txt", *FILES]
    status, out, err = run("prune", work / "m", "-o", tmp_path / "x", *flags)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("budget: --max-ppl-ratio 1000000.0 -> 6 of 8 layers (held-out ")
    assert lines[1].startswith("removed 6 of 8 layers")
    record = json.loads((tmp_path / "x" / "ghostlayers.json").read_text())
    assert record["budget"]["num_remove"] == 6 and len(record["budget"]["probes"]) == 3
    line = lines[0].removeprefix("budget: ")
    assert record["budget"]["reason"] == line
    assert line in (tmp_path / "x" / "README.md").read_text()
    assert line in run("info", tmp_path / "x")[1]
