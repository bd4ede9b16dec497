"""Hadamard matrices: H with entries ±1 and H Hᵀ = nI.

Sylvester's construction gives the powers of two; Paley's (J. Math. and Phys. 12, 1933) give q + 1
for primes q ≡ 3 (mod 4) and 2(q + 1) for primes q ≡ 1 (mod 4); Kronecker products of these give the
rest. Prime powers q would add one of the 128 multiples of 64 up to 8192 and are left out.

Which of the many matrices of an order is taken matters to what is computed with it, so it is fixed:
H = P₁ ⊗ … ⊗ Pⱼ ⊗ S with the largest Sylvester factor S that leaves a product of Paley orders, the
orders of P ascending, and Paley's first construction where both give an order.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from .errors import GhostlayersError

CORE = np.array([[1, 1], [1, -1]], dtype=np.int8)
DIAGONAL = np.array([[1, -1], [-1, -1]], dtype=np.int8)


def hadamard_factors(order: int) -> tuple[int, ...] | None:
    """Return the orders whose Kronecker product makes a Hadamard matrix, or None.

    All but the last are Paley orders; the last is a power of two, 1 included.
    """
    power = order & -order if order > 0 else 0
    while power:
        paley = _paley_orders(order // power)
        if paley is not None:
            return (*paley, power)
        power //= 2
    return None


def hadamard_matrix(order: int) -> np.ndarray:
    """Return the Hadamard matrix of an order, (n, n) int8.

    Raises:
        GhostlayersError: If the constructions do not reach it.
    """
    factors = hadamard_factors(order)
    if factors is None:
        raise GhostlayersError(
            f"no construction gives a Hadamard matrix of order {order}. Allowed: powers of two "
            "times orders q + 1 (q a prime, 3 mod 4) and 2(q + 1) (q a prime, 1 mod 4)."
        )
    *paley, power = factors
    sylvester = [CORE] * (power.bit_length() - 1)
    parts = [*map(paley_matrix, paley), *sylvester]
    return reduce(np.kron, parts, np.ones((1, 1), dtype=np.int8))


def paley_matrix(order: int) -> np.ndarray:
    """Return Paley's matrix of an order, (n, n) int8.

    With the Jacobsthal matrix Q[i, j] = χ(i − j) over the integers modulo q: for q = n − 1,
    I + [[0, 1ᵀ], [−1, Q]]; for q = n/2 − 1, [[K + I, K − I], [K − I, −K − I]] with
    K = [[0, 1ᵀ], [1, Q]].
    """
    first = _is_prime(order - 1) and order % 4 == 0
    q = order - 1 if first else order // 2 - 1
    character = np.full(q, -1, dtype=np.int8)
    character[np.arange(q) ** 2 % q] = 1
    character[0] = 0
    steps = np.arange(q)
    k = np.ones((q + 1, q + 1), dtype=np.int8)
    k[0, 0] = 0
    k[1:, 1:] = character[(steps[:, None] - steps[None, :]) % q]
    eye = np.eye(q + 1, dtype=np.int8)
    if first:
        k[1:, 0] = -1
        return eye + k
    return np.kron(CORE, k) + np.kron(DIAGONAL, eye)


def _paley_orders(number: int) -> tuple[int, ...] | None:
    """Write a number as a product of Paley orders, the smallest first; None if it is none."""
    if number == 1:
        return ()
    for order in range(4, number + 1, 4):
        if number % order == 0 and _is_paley(order):
            rest = _paley_orders(number // order)
            if rest is not None:
                return (order, *rest)
    return None


def _is_paley(order: int) -> bool:
    if order % 4:
        return False
    half = order // 2 - 1
    return _is_prime(order - 1) or (half % 4 == 1 and _is_prime(half))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
