"""CASES 51: `linearpatch-rotate` for every hidden size, also those without a Hadamard matrix."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import ghostlayers as gl
from ghostlayers.hadamard import hadamard_factors, hadamard_matrix
from ghostlayers.plan import Boundary
from ghostlayers.rotation import rotation_matrix, rotation_name, rotation_orders
from oracles import logits, random_ids, tiny_model
from test_fold import planted, randn
from tiny_checkpoints import save_tiny, text_of

CALIBRATION = ("--num-windows", 4, "--window", 32)


@pytest.mark.parametrize("size", [*range(2, 130, 2), 1, 3, 15, 576, 640])
def test_orthogonal_for_every_size(size):
    rotation = rotation_matrix(size)
    assert rotation.shape == (size, size) and rotation.dtype == np.float64
    assert np.abs(rotation @ rotation.T - np.eye(size)).max() < 1e-12
    assert np.array_equal(rotation, rotation_matrix(size))


@pytest.mark.parametrize(
    ("size", "orders"),
    [(2880, (1, 2880)), (5376, (1, 5376)), (4544, (1, 4544)), (1600, (1, 1600)), (88, (1, 88))],
)
def test_sizes_that_the_published_table_lacks(size, orders):
    assert rotation_orders(size) == orders and rotation_name(size).startswith("Hadamard ")


def test_the_largest_hadamard_matrix_is_kept():
    for size in (2752, 3776, 4672, 6464, 6848, 6976, 7232, 7552, 8128):
        random, order = rotation_orders(size)
        assert random * order == size and order >= 64
        larger = [n for n in range(order + 1, size + 1) if size % n == 0]
        assert larger and all(hadamard_factors(n) is None for n in larger)
    assert rotation_name(92) == "random orthogonal 23 (seed 0) x Hadamard 4"
    assert rotation_name(576) == "Hadamard 36 x 16"


def test_the_random_part_is_no_signed_permutation():
    rotation = rotation_matrix(92)
    assert (np.abs(rotation) > 1e-4).mean() > 0.99 and np.abs(rotation).max() < 0.6
    blocks = rotation.reshape(23, 4, 23, 4)
    assert np.allclose(blocks, blocks[:, :1, :, :1] * hadamard_matrix(4)[:, None, :], atol=1e-15)


def test_hadamard_sizes_stay_as_they_were():
    for size in (64, 576, 640):
        assert np.array_equal(rotation_matrix(size), hadamard_matrix(size) / size**0.5)


def test_planted_patch_is_found():
    h, d = torch.from_numpy(rotation_matrix(92)), 0.5 + 2.0 * randn(92).abs()
    change = h @ (d - 1.0).diag() @ h.T
    dense = planted(tiny_model(hidden_size=92, head_dim=24), lambda x, m, a: x @ change)
    windows, ids = random_ids(4, 64, seed=2), random_ids()
    result = gl.prune(
        dense, layers="3-4", recover="linearpatch-rotate", windows=windows, progress=False
    )
    assert (result.fits[Boundary(3, 5)].tensors["m"] - change).abs().max() < 1e-9
    assert (logits(result.model, ids) - logits(dense, ids)).abs().max() < 1e-8


def test_command_line_says_so_and_records_it(tmp_path, run):
    save_tiny(tmp_path / "m", hidden_size=92, head_dim=24)
    (tmp_path / "t.txt").write_text(text_of(600))
    command = ("prune", tmp_path / "m", "--layers", 3, "--recover", "linearpatch-rotate")
    command += ("--calibration", tmp_path / "t.txt", *CALIBRATION, "-o", tmp_path / "out")
    name = "random orthogonal 23 (seed 0) x Hadamard 4"
    status, out, err = run(*command, "--dry-run")
    assert status == 0 and name in out, err
    status, _, err = run(*command)
    assert status == 0
    assert "warning: there is no Hadamard matrix for hidden size 92 here; linear" in err
    assert name in err
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    assert record["boundaries"][0]["rotation"] == name
