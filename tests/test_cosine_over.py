"""CASES 54: cosines over channels, and the other axis under a plain name to compare with others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from ghostlayers.similarity import SimilarityAccumulator
from ghostlayers.sweep import TokenRows, capture
from oracles import random_ids, tiny_model

X, Y = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[2.0, 2.0], [1.0, -1.0]])


@pytest.mark.parametrize(("over", "expected"), [("channels", 1.0), ("sequence", 0.9487)])
def test_smallest_input(over, expected):
    accumulator = SimilarityAccumulator(1, over)
    accumulator.update({0: X, 1: Y}, TokenRows(torch.zeros(2).long(), torch.arange(2)))
    assert accumulator.result().matrix[0, 1] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_sequence_is_the_library_call_along_its_default_axis(batch_size):
    model, ids, states = tiny_model(), random_ids(3, 30), {}
    with torch.no_grad(), capture(decoder_layers(model), range(9), states.__setitem__):
        model(input_ids=ids)
    expected = np.array(
        [
            [float(torch.cosine_similarity(states[i], states[j]).mean()) for j in range(9)]
            for i in range(9)
        ]
    )
    batches = list(ids.split(batch_size))
    found = gl.measure_similarity(model, batches, over="sequence", progress=False)
    assert np.abs(found.matrix - expected).max() < 1e-5 and found.num_tokens == 90
    plain = gl.measure_similarity(model, batches, progress=False)
    assert np.abs(plain.matrix - expected).max() > 1e-2


def test_prune_selects_by_it_and_says_so():
    model, windows = tiny_model(), random_ids(4, 40, seed=2)
    similarity = gl.measure_similarity(model, [windows], over="sequence", progress=False)
    for selector in ("shortgpt", "streamline", "lorp"):
        wanted = gl.select_layers(similarity, num_remove=3, selector=selector)
        result = gl.prune(
            model,
            num_remove=3,
            select=selector,
            recover="none",
            windows=windows,
            cosine_over="sequence",
            progress=False,
        )
        assert result.plan == wanted
        assert result.record["config"]["cosine_over"] == "sequence"
        assert result.record["rls"] == pytest.approx(similarity.rls, rel=1e-6)


def test_scores_know_which_cosines_they_are(work, run, refuse, tmp_path):
    text = ("--calibration", work / "t.txt", "--num-windows", 4, "--window", 32)
    flags = (*text, "--cosine-over", "sequence", "--save", tmp_path / "s.safetensors")
    assert run("analyze", work / "m", *flags, "--json", tmp_path / "a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text())["cosine_over"] == "sequence"
    command = ("prune", work / "m", "--num-remove", 2, "--recover", "none", "-o", tmp_path / "o")
    scores = ("--scores", tmp_path / "s.safetensors")
    line = refuse(tmp_path, *command, *scores, "--cosine-over", "channels")
    assert "cosines over sequence, `cosine_over` is channels" in line
    assert run(*command, *scores)[0] == 0
    record = json.loads((tmp_path / "o" / "ghostlayers.json").read_text())
    assert record["config"]["cosine_over"] == "sequence"


def test_other_names_are_refused():
    with pytest.raises(gl.GhostlayersError, match=r"cosine_over.*'sequence'"):
        gl.PruneConfig(num_remove=1, cosine_over="sequenc")
