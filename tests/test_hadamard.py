"""Hadamard matrices: exact in integers for every order that the constructions reach."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ghostlayers as gl
from ghostlayers.hadamard import hadamard_factors, hadamard_matrix, paley_matrix

# Hidden sizes of common models; some are not in the table that the published code carries.
SIZES = (
    *(64, 128, 576, 640, 768, 896, 1024, 1152, 1536, 1600, 2048, 2304, 2560, 2880, 3072, 3584),
    *(4096, 4544, 5120, 5376, 8192),
)


def is_hadamard(matrix) -> bool:
    matrix = matrix.astype(np.int64)
    return bool((matrix @ matrix.T == len(matrix) * np.eye(len(matrix), dtype=np.int64)).all())


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 44, 48, 60, 72, 76, 80, 84])
def test_small_orders_exactly(order):
    matrix = hadamard_matrix(order)
    assert matrix.shape == (order, order) and set(np.unique(matrix)) <= {-1, 1}
    assert is_hadamard(matrix)


@pytest.mark.parametrize("order", SIZES)
def test_hidden_sizes(order):
    """The factors exactly; of a large product some rows against all."""
    *paley, power = hadamard_factors(order)
    assert math.prod(paley) * power == order and power & (power - 1) == 0
    assert all(is_hadamard(paley_matrix(factor)) for factor in paley)
    if order > 2600:
        return  # the Kronecker product of Hadamard matrices is one
    matrix = hadamard_matrix(order)
    rows = np.random.default_rng(0).choice(order, 16, replace=False)
    some = matrix[rows].astype(np.float32) @ matrix.T.astype(np.float32)  # exact below 2**24
    assert np.array_equal(some, order * np.eye(order)[rows])


def test_choice_of_the_matrix_is_fixed():
    assert hadamard_factors(576) == (36, 16) and hadamard_factors(4096) == (4096,)
    assert hadamard_factors(1600) == (200, 8) and hadamard_factors(2720) == (20, 68, 2)
    assert np.array_equal(hadamard_matrix(2), [[1, 1], [1, -1]])
    assert np.array_equal(hadamard_matrix(4)[3], [1, -1, -1, 1])
    squares = {1, 3, 4, 5, 9}  # modulo 11
    q = [
        [0 if i == j else 1 if (i - j) % 11 in squares else -1 for j in range(11)]
        for i in range(11)
    ]
    expected = np.eye(12) + np.block([[0, np.ones((1, 11))], [-np.ones((11, 1)), np.array(q)]])
    assert np.array_equal(hadamard_matrix(12), expected)
    doubled = hadamard_matrix(36)
    assert np.array_equal(doubled, doubled.T)
    assert np.array_equal(hadamard_matrix(72), np.kron(doubled, [[1, 1], [1, -1]]))


@pytest.mark.parametrize("order", [0, 3, 6, 10, 92, 184, 1888, 7552])
def test_orders_out_of_reach(order):
    assert hadamard_factors(order) is None
    with pytest.raises(gl.GhostlayersError, match=f"order {order}. Allowed: powers of two"):
        hadamard_matrix(order)
