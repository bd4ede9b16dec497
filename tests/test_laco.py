"""LaCo: the formula, the scan, the search for a threshold, and what is written."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import families
import ghostlayers as gl
from ghostlayers.collapse_search import CollapseScorer, Rules, scan, search_threshold
from ghostlayers.decoder import decoder_layers
from ghostlayers.layer_collapse import collapsed
from ghostlayers.sweep import hidden_state
from oracles import logits, random_ids, reload, step_error, tiny_model

IDS = random_ids(4, 24, seed=5)
RULES = Rules(size=3, interval=2, low=0, high=6, allowed=frozenset(range(1, 7)), budget=4)


def test_the_published_formula():  # CASES 57
    one, two, four = (torch.tensor([value]) for value in (1.0, 2.0, 4.0))
    assert collapsed(one, [two, four]).tolist() == [5.0]
    assert collapsed(one, [two]).tolist() == [2.0]
    low = collapsed(one.bfloat16(), [torch.tensor([1.0 + 2**-7]).bfloat16()] * 3)
    assert low.dtype == torch.bfloat16 and low.tolist() == [1.0 + 3 * 2**-7]


@torch.no_grad()
def raw_last_state(model, ids=IDS):
    found = []
    handle = decoder_layers(model)[-1].register_forward_hook(
        lambda _m, _a, out: found.append(hidden_state(out))
    )
    model(input_ids=ids, use_cache=False)
    handle.remove()
    return found[0]


@torch.no_grad()
def merged_by_hand(model, merges):
    """A llama with merges [(layer, [merged layers])] of dense indices, done on plain modules."""
    new = copy.deepcopy(model)
    layers, kept = list(new.model.layers), list(range(len(new.model.layers)))
    for base, others in merges:
        target = dict(layers[kept.index(base)].named_parameters())
        start = {name: p.clone() for name, p in target.items()}
        for other in others:
            for name, p in layers[kept.index(other)].named_parameters():
                target[name] += p - start[name]
        keep = [i for i, layer in enumerate(kept) if layer not in others]
        layers, kept = [layers[i] for i in keep], [kept[i] for i in keep]
    new.model.layers = torch.nn.ModuleList(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    new.config.num_hidden_layers = len(layers)
    new.config.layer_types = None
    return new


def cosine_by_hand(model, merges, ids=IDS):
    new = raw_last_state(merged_by_hand(model, merges), ids)
    return float(F.cosine_similarity(raw_last_state(model, ids), new, dim=-1).mean())


def scan_by_hand(model, threshold, rules=RULES):
    """Algorithm 1 with the budget: merges with their cosines."""
    kept, merges, left = list(range(len(model.model.layers))), [], rules.budget
    found = []
    position = rules.high - min(rules.size - 1, left)
    while position >= rules.low and left:
        count = min(rules.size - 1, left)
        others = [k for k in kept[position + 1 : position + 1 + count] if k <= rules.high]
        cosine = cosine_by_hand(model, [*merges, (position, others)])
        if cosine > threshold:
            merges.append((position, others))
            found.append(cosine)
            kept = [k for k in kept if k not in others]
            left -= len(others)
            position = min(position - rules.interval, len(kept) - 1 - min(rules.size - 1, left))
        else:
            position -= 1
    return merges, found


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def scorer(model):
    return CollapseScorer(model, IDS, batch_size=2, progress=False)


@pytest.mark.parametrize("threshold", [-1.0, 0.3, 0.6])
def test_scan_is_the_published_algorithm(model, scorer, threshold):
    before = copy.deepcopy(model.state_dict())
    found = scan(scorer, RULES, threshold)
    merges, cosines = scan_by_hand(model, threshold)
    assert [(m.layer, list(m.others)) for m in found.merges] == merges
    assert [m.cosine for m in found.merges] == pytest.approx(cosines, abs=1e-5)
    wanted = logits(merged_by_hand(model, merges), IDS)
    assert torch.allclose(logits(found.model, IDS), wanted, atol=1e-4)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert len(decoder_layers(model)) == 8


def test_the_raw_state_is_compared(model, scorer):  # CASES 55
    found = scorer.cosine(scorer.dense, 4, (5, 6))
    assert found == pytest.approx(cosine_by_hand(model, [(4, [5, 6])]), abs=1e-5)
    norm, new = model.model.norm, merged_by_hand(model, [(4, [5, 6])])
    with torch.no_grad():
        one, two = norm(raw_last_state(model)), norm(raw_last_state(new))
    assert abs(found - float(F.cosine_similarity(one, two, dim=-1).mean())) > 1e-3


@pytest.mark.parametrize("budget", [1, 3])
def test_the_highest_threshold_that_reaches_the_budget(model, scorer, budget):
    rules = Rules(**{**vars(RULES), "budget": budget})
    threshold, found = search_threshold(scorer, rules)
    assert len(found.layers) == 8 - budget
    steps = sorted({-1.0, *scorer.cosines.values()})
    reaching = [step for step in steps if len(scan(scorer, rules, step).layers) == 8 - budget]
    assert threshold == max(reaching)
    assert [m.others for m in scan(scorer, rules, threshold).merges] == [
        m.others for m in found.merges
    ]
    assert all(merge.cosine > threshold for merge in found.merges)


def test_merges_can_be_merged_again(model, scorer):
    rules = Rules(3, 1, 0, 6, frozenset(range(1, 7)), 6)
    found = scan(scorer, rules, -1.0)
    assert [(m.layer, m.others) for m in found.merges] == [
        (4, (5, 6)), (3, (4,)), (2, (3,)), (1, (2,)), (0, (1,)),
    ]  # fmt: skip
    assert found.layers == (0, 7) and {layer for layer, _ in found.weights()} == {0}
    nested = [(m.layer, list(m.others)) for m in found.merges]
    assert torch.allclose(
        logits(found.model, IDS), logits(merged_by_hand(model, nested), IDS), atol=1e-4
    )


def test_prune_with_laco(model):
    result = gl.prune(
        model, num_remove=3, select="laco", recover="none", windows=IDS, laco_layers=3
    )
    merges = result.record["selection"]["merges"]
    assert sorted(k for m in merges for k in m["merged"]) == result.record["removed"]
    assert len(result.record["removed"]) == 3 and result.record["rls"] is None
    by_hand = merged_by_hand(model, [(m["layer"], m["merged"]) for m in merges])
    assert torch.allclose(logits(result.model, IDS), logits(by_hand, IDS), atol=1e-4)
    assert step_error(result.model, random_ids(2, 40)) < 1e-4
    changed = {result.plan.kept.index(m["layer"]) for m in merges}
    assert {int(name.split(".")[2]) for name in result.changed} == changed
    shared = {p.data_ptr() for p in model.parameters()}
    for name, parameter in result.model.named_parameters():
        assert (parameter.data_ptr() in shared) == (name not in result.changed)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe"])
def test_other_architectures(kind):
    dense = families.tiny_model(kind)
    before = copy.deepcopy(dense.state_dict())
    result = gl.prune(
        dense, num_remove=2, select="laco", recover="none", windows=IDS, laco_layers=2
    )
    removed = result.record["removed"]
    assert len(removed) == 2 and result.changed
    bare = gl.remove_layers_(gl.share_tensors(dense), removed)
    assert (logits(result.model, IDS) - logits(bare, IDS)).abs().max() > 1e-3
    assert all(torch.equal(before[name], t) for name, t in dense.state_dict().items())


def test_layers_of_other_shapes_are_not_merged():
    mixed = families.tiny_model("deepseek_v3")  # dense layers first, then mixtures of experts
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(mixed)]
    first = next(i for i in range(len(sizes)) if sizes[i] != sizes[0])
    scorer = CollapseScorer(mixed, IDS, progress=False)
    assert scorer.cosine(scorer.dense, first - 1, (first,)) is None
    assert "layers differ in" in scorer.skipped[first - 1]


def test_budgets_that_cannot_be_met(model):
    def laco(k, **settings):
        return gl.prune(model, num_remove=k, select="laco", recover="none", windows=IDS, **settings)

    with pytest.raises(gl.PlanError, match=r"merges away 0 of 2 .*`laco_threshold` 0.999"):
        laco(2, laco_threshold=0.999)
    with pytest.raises(gl.PlanError, match=r"merges away 1 of 3 .*layers 2 to 3.*laco_range"):
        laco(3, laco_range="2-3")
    given = laco(2, laco_threshold=-1.0).record["selection"]
    assert given["threshold"] == -1.0


def test_a_low_cosine_is_a_warning(model):
    warned = set()
    for k in (1, 5):
        result = gl.prune(model, num_remove=k, select="laco", recover="none", windows=IDS)
        low = result.record["selection"]["merges"][-1]["cosine"] < 0.45
        assert [line.startswith("laco: the last hidden") for line in result.warnings] == [
            True
        ] * low
        warned.add(low)
    assert warned == {True, False}


# The command line.

SHORT = ["--num-windows", "4", "--window", "32"]


def test_a_merged_checkpoint_is_stock(work, run, tmp_path):
    out = tmp_path / "out"
    flags = ["--calibration", work / "t.txt", *SHORT, "--num-remove", 3, "--recover", "none"]
    status, printed, err = run(
        "prune", work / "m", "-o", out, *flags, "--select", "laco", "--laco-layers", 3
    )
    assert status == 0 and err.count("\n") == err.count("warning: laco"), err
    record = gl.load_pruned(out).record
    written, dense = reload(out), reload(work / "m")
    assert type(written) is type(dense) and len(decoder_layers(written)) == 5
    merges = [(m["layer"], m["merged"]) for m in record["selection"]["merges"]]
    wanted = logits(merged_by_hand(dense, merges), IDS)
    assert torch.allclose(logits(written, IDS), wanted, atol=1e-4)
    card = (out / "README.md").read_text()
    assert "merged" in card and "stock checkpoint" in card


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recover", "ghost"], "`recover` none"),
        (["--recover", "none", "--laco-range", "5-99"], "layer 99"),
        (["--recover", "none", "--laco-layers", 1], "`laco_layers` is 1"),
        (["--recover", "none", "--laco-threshold", 1], "`laco_threshold` is 1.0"),
        (["--recover", "none", "--laco-threshold", "0.9999"], "merges away"),
    ],
)
def test_errors(work, refuse, tmp_path, flags, message):
    more = ["--calibration", work / "t.txt", *SHORT, "--num-remove", 3, "--select", "laco"]
    err = refuse(tmp_path, "prune", work / "m", "-o", tmp_path / "x", *more, *flags)
    assert message in err
