"""Which layers go: the reference values, hand-made matrices, plans and lists of layers."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from ghostlayers.plan import Boundary, PruningPlan, format_layers, parse_layers, removable_layers
from ghostlayers.selectors import SELECTORS, get_selector, lorp
from ghostlayers.similarity import Similarity
from oracles import random_ids, tiny_model

REFERENCES = ["smollm2-135m-instruct", "gemma-3-270m"]


def similarity_of(rows) -> Similarity:
    """Make a Similarity of an (L, L) matrix; state L, which it lacks, is like no other."""
    rows = np.asarray(rows, dtype=float)
    matrix = np.zeros((len(rows) + 1, len(rows) + 1))
    matrix[:-1, :-1] = rows
    matrix[-1, -1] = 1.0
    return Similarity(matrix=matrix, num_tokens=1)


def blocks(*sizes: int, inside: float = 0.9) -> np.ndarray:
    """Similarity `inside` within consecutive groups of layers and 0 between them."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    matrix = np.where(group[:, None] == group[None, :], inside, 0.0)
    np.fill_diagonal(matrix, 1.0)
    return matrix


def pick(similarity, selector, k, **settings) -> list[int]:
    plan = gl.select_layers(similarity, selector=selector, num_remove=k, **settings)
    return list(plan.removed)


# Published values.


@pytest.fixture(params=REFERENCES)
def reference(request, shared):
    return json.loads((shared / "reference" / f"{request.param}.json").read_text())


def test_locality_of_the_reference(reference):
    similarity = similarity_of(reference["similarity_rows"])
    assert similarity.rls == pytest.approx(reference["rls"], abs=1e-6)
    assert lorp.num_clusters_for(similarity.rls) == reference["num_clusters"]


def test_every_selection_of_the_reference(reference):
    similarity = similarity_of(reference["similarity_rows"])
    assert all(reference[name] for name in SELECTORS)
    for budget, by_policy in reference["lorp"].items():
        assert {"auto", "K=2", "K=3", "K=4"} == set(by_policy)
        for policy, layers in by_policy.items():
            clusters = None if policy == "auto" else int(policy[2:])
            found = pick(similarity, "lorp", int(budget), num_clusters=clusters)
            assert found == layers, (budget, policy)
    for budget, layers in reference["shortgpt"].items():
        assert pick(similarity, "shortgpt", int(budget)) == layers
    for budget, (start, stop) in reference["streamline"].items():
        assert pick(similarity, "streamline", int(budget)) == list(range(start, stop))


# Matrices made by hand.


def test_policy_limits():
    values = [2.0, 1.0, 0.9999, 0.7, 0.6999, 0.0, float("inf")]
    assert [lorp.num_clusters_for(value) for value in values] == [2, 2, 3, 3, 4, 4, 2]


def test_locality_of_states_without_a_common_direction():
    assert similarity_of(blocks(1, 1, 1)).rls == float("inf")
    assert similarity_of(-0.1 * np.ones((4, 4))).rls == float("inf")
    assert similarity_of(np.full((4, 4), 0.25)).rls == pytest.approx(2.0)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_ties_go_to_the_shallower_side(k):
    similarity = similarity_of(np.ones((8, 8)))
    for selector in ("shortgpt", "streamline"):
        assert pick(similarity, selector, k) == list(range(1, k + 1))
    assert pick(similarity, "lorp", k, num_clusters=1) == list(range(1, k + 1))


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [1]),  # fewer than clusters: the first clusters by depth give
        (2, [1, 3]),
        (3, [1, 3, 6]),
        (4, [1, 2, 3, 6]),  # equal clusters: the shallower one gives
        (5, [1, 2, 3, 4, 6]),
        (7, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_lorp_on_equal_blocks(k, expected):
    assert pick(similarity_of(blocks(3, 3, 3)), "lorp", k, num_clusters=3) == expected


def test_lorp_finds_the_blocks():
    for sizes in ((3, 3, 3), (2, 5, 1), (4, 2)):
        ends = list(itertools.accumulate(sizes, initial=0))
        expected = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        assert lorp.cluster_layers(blocks(*sizes), len(sizes)) == expected


def test_lorp_second_stage_follows_the_tightest_cluster(monkeypatch):
    clusters = [[0, 1, 2], [3, 4, 5, 6], [7]]
    monkeypatch.setattr(lorp, "cluster_layers", lambda *_: clusters)
    matrix = blocks(3, 4, 1, inside=0.5)
    matrix[3:7, 3:7] = 0.8
    matrix[5, 6] = matrix[6, 5] = 0.95
    np.fill_diagonal(matrix, 1.0)
    similarity = similarity_of(matrix)
    # Stage 1: 1 of the first (0 is protected), 5 (ties with 6), nothing of [7] (protected).
    assert pick(similarity, "lorp", 2, num_clusters=3) == [1, 5]
    # Stage 2: what is left of the second is tighter (0.8) than what is left of the first (0.5).
    # Layer 6 goes before 3 by redundancy within the whole cluster.
    assert pick(similarity, "lorp", 3, num_clusters=3) == [1, 5, 6]
    assert pick(similarity, "lorp", 4, num_clusters=3) == [1, 3, 5, 6]
    # Now the second has one member left: the first is next, although it gave last.
    assert pick(similarity, "lorp", 5, num_clusters=3) == [1, 2, 3, 5, 6]
    assert pick(similarity, "lorp", 6, num_clusters=3) == [1, 2, 3, 4, 5, 6]


def test_lorp_clusters_of_one(monkeypatch):
    monkeypatch.setattr(lorp, "cluster_layers", lambda *_: [[layer] for layer in range(6)])
    for k in range(1, 5):
        assert pick(similarity_of(blocks(6)), "lorp", k) == list(range(1, k + 1))


@pytest.mark.parametrize("depth", [3, 4, 5])
@pytest.mark.parametrize("clusters", [None, 1, 2, 4, 9])
def test_shallow_models_and_more_clusters_than_layers(depth, clusters):
    states = np.random.default_rng(0).standard_normal((depth, 16))
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    similarity = similarity_of(states @ states.T)
    for k in range(1, depth - 1):
        found = pick(similarity, "lorp", k, num_clusters=clusters)
        assert len(found) == k and set(found) <= set(range(1, depth - 1))


def test_streamline_around_a_protected_layer():
    matrix = blocks(8, inside=0.5)
    matrix[2, 5] = 0.99  # would be best for k = 3, but layer 3 must stay
    matrix[4, 7] = 0.6
    similarity, allowed = similarity_of(matrix), [1, 2, 4, 5, 6]
    assert pick(similarity, "streamline", 3) == [2, 3, 4]
    assert pick(similarity, "streamline", 3, allowed=allowed) == [4, 5, 6]
    with pytest.raises(gl.PlanError, match="streamline: no 4 neighbouring layers"):
        pick(similarity, "streamline", 4, allowed=allowed)


def test_streamline_may_reach_the_last_layer_when_it_is_not_protected():
    matrix = np.full((6, 6), 0.1)
    matrix[3, 5] = 0.9
    similarity = Similarity(matrix=matrix, num_tokens=1)
    assert pick(similarity, "streamline", 2, allowed=range(5)) == [3, 4]


@pytest.mark.parametrize("selector", SELECTORS)
def test_protected_layers_stay(selector):
    similarity = similarity_of(blocks(10, inside=0.7))
    assert pick(similarity, selector, 3, allowed=[4, 5, 6]) == [4, 5, 6]
    for k, allowed in ((1, []), (4, [4, 5, 6]), (0, [4, 5]), (-1, [4, 5]), (10, range(10))):
        with pytest.raises(gl.PlanError, match="num_remove"):
            pick(similarity, selector, k, allowed=allowed)


def test_unknown_selector_names_the_nearest():
    with pytest.raises(gl.GhostlayersError, match="Did you mean 'streamline'"):
        get_selector("stream-line")


# A real model (CASES 14).


@pytest.fixture(scope="module")
def near_identity():
    model = tiny_model()
    with torch.no_grad():
        for layer in decoder_layers(model)[3:5]:
            layer.self_attn.o_proj.weight.mul_(1e-4)
            layer.mlp.down_proj.weight.mul_(1e-4)
    return model


@pytest.mark.parametrize("selector", ["shortgpt", "streamline"])
def test_near_identity_layers_are_found(near_identity, selector):
    result = gl.prune(
        near_identity, num_remove=2, select=selector, recover="none", windows=random_ids(8, 40)
    )
    assert result.record["removed"] == [3, 4]
    assert result.record["kept"] == [0, 1, 2, 5, 6, 7]
    assert [str(boundary) for boundary in result.plan.boundaries] == ["[3, 5)"]
    assert (result.record["boundaries"][0]["start"], result.record["boundaries"][0]["stop"]) == (
        3, 5,
    )  # fmt: skip


def test_analysis_agrees_with_selection(near_identity):
    analysis = gl.analyze(near_identity, windows=random_ids(8, 40), num_clusters=2)
    assert analysis.num_clusters == 2 and analysis.selections["shortgpt"][2] == (3, 4)
    for name, by_budget in analysis.selections.items():
        for k, layers in by_budget.items():
            assert pick(analysis.similarity, name, k, num_clusters=2) == list(layers)


def test_analysis_without_protection_stops_before_the_last_layer():
    analysis = gl.analyze(tiny_model(), windows=random_ids(), protect_first=0, protect_last=0)
    assert [max(by_budget) for by_budget in analysis.selections.values()] == [7, 7, 7]


@pytest.mark.parametrize("depth", [1, 2])
def test_models_too_shallow_to_select_from(depth):
    model = tiny_model(num_layers=depth)
    analysis = gl.analyze(model, windows=random_ids())
    assert list(analysis.selections.values()) == [{}, {}, {}]
    with pytest.raises(gl.PlanError, match="num_remove"):
        gl.prune(model, num_remove=1, windows=random_ids())


# Plans.


@pytest.mark.parametrize(
    ("removed", "boundaries", "sites"),
    [
        ((), [], []),
        ((0,), [(0, 1)], [(0, "input")]),
        ((7,), [(7, 8)], [(6, "output")]),
        ((3, 4), [(3, 5)], [(3, "input")]),
        ((4, 1, 6), [(1, 2), (4, 5), (6, 7)], [(1, "input"), (3, "input"), (4, "input")]),
        ((0, 1, 6, 7), [(0, 2), (6, 8)], [(0, "input"), (3, "output")]),
        ((1, 2, 3, 4, 5, 6, 7), [(1, 8)], [(0, "output")]),
        ((0, 1, 3, 4, 5, 6, 7), [(0, 2), (3, 8)], [(0, "input"), (0, "output")]),
    ],
)
def test_boundaries_and_where_their_operators_sit(removed, boundaries, sites):
    plan = PruningPlan(8, removed)
    assert plan.boundaries == tuple(Boundary(*edges) for edges in boundaries)
    assert [plan.operator_site(boundary) for boundary in plan.boundaries] == sites
    assert sorted((*plan.kept, *plan.removed)) == list(range(8))
    covered = [layer for b in plan.boundaries for layer in range(b.start, b.stop)]
    assert covered == list(plan.removed) == sorted(removed)


@pytest.mark.parametrize("removed", [(8,), (-1,), (1, 1), tuple(range(8))])
def test_impossible_plans(removed):
    with pytest.raises(gl.PlanError, match="`layers`"):
        PruningPlan(8, removed)


def test_layer_lists():
    assert parse_layers("12-18,21") == (12, 13, 14, 15, 16, 17, 18, 21)
    assert parse_layers(" 3 , 1-1,0") == (0, 1, 3)
    assert parse_layers("1-3,2-4") == (1, 2, 3, 4)
    assert format_layers([21, 12, 13, 14]) == "12-14,21"
    assert format_layers([]) == ""
    draw = random.Random(0)
    for _ in range(100):
        layers = tuple(sorted(draw.sample(range(40), draw.randint(1, 40))))
        assert parse_layers(format_layers(layers), 40) == layers


@pytest.mark.parametrize("text", ["", ",", "1,", "a", "-1", "1-", "-", "1--2", "1.0", "²", "3-1"])
def test_malformed_layer_lists(text):
    with pytest.raises(gl.PlanError, match="`layers`"):
        parse_layers(text, 8)


@pytest.mark.parametrize("layers", [[14, 12, 13, 21], (12, 13, 14, 21), np.array([12, 13, 14, 21])])
def test_layers_as_indices(layers):
    assert gl.PruneConfig(layers=layers).layers == "12-14,21"
    assert gl.PruneConfig(layers="12-14, 21").layers == "12-14, 21"
    assert gl.PruneConfig(layers=range(3, 6)).layers == "3-5"


@pytest.mark.parametrize("layers", [2, [], [True], [1.0], ["1"], [-1, 2], [None]])
def test_what_is_no_list_of_layers(layers):
    with pytest.raises(gl.PlanError, match=r"`layers` is .*Allowed: a text such as"):
        gl.PruneConfig(layers=layers)


def test_removable_layers():
    assert removable_layers(6) == (1, 2, 3, 4)
    assert removable_layers(6, protect_first=0, protect_last=0) == tuple(range(6))  # CASES 10
    assert removable_layers(6, protected=[2, 9]) == (1, 3, 4)
    assert removable_layers(2) == removable_layers(6, protect_first=4, protect_last=4) == ()
