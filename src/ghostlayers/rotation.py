"""The rotation of `linearpatch-rotate`: an orthogonal matrix for every hidden size.

Where Sylvester's and Paley's constructions reach the size C it is the Hadamard matrix of that
order. Elsewhere it is Q ⊗ H: H the Hadamard matrix of the largest order p that divides C, and Q a
random orthogonal matrix of order C/p (the Q of a Gaussian matrix, diagonal of R made positive: Haar
measure; Mezzadri, Notices of the AMS 54, 2007). Every channel still goes into every other one, but
not in equal shares.
"""

from __future__ import annotations

import numpy as np

from .hadamard import hadamard_factors, hadamard_matrix

# Fixed, so that the rotation depends on the hidden size alone.
SEED = 0


def rotation_orders(size: int) -> tuple[int, int]:
    """Return the orders of Q and H, whose product is the size; that of Q is 1 if none is needed."""
    order = next(n for n in range(size, 0, -1) if size % n == 0 and hadamard_factors(n) is not None)
    return size // order, order


def rotation_name(size: int) -> str:
    """Say which matrix is taken, for records and messages: `Hadamard 36 x 16`."""
    random, order = rotation_orders(size)
    factors = [factor for factor in hadamard_factors(order) or () if factor > 1] or [1]
    name = f"Hadamard {' x '.join(map(str, factors))}"
    return name if random == 1 else f"random orthogonal {random} (seed {SEED}) x {name}"


def rotation_warnings(size: int) -> tuple[str, ...]:
    """Return one line if there is no Hadamard matrix of a size, else nothing."""
    if rotation_orders(size)[0] == 1:
        return ()
    return (
        f"there is no Hadamard matrix for hidden size {size} here; linearpatch-rotate uses "
        f"{rotation_name(size)} instead. Or use `recover` linearpatch-diag.",
    )


def rotation_matrix(size: int) -> np.ndarray:
    """Return the rotation of a size of 1 or more, (C, C) float64: H Hᵀ = I.

    A Hadamard matrix is exact up to its factor 1/√C. A random one is reproducible with one release
    of numpy on one machine; elsewhere its last digits may differ.
    """
    random, order = rotation_orders(size)
    rotation: np.ndarray = hadamard_matrix(order).astype(np.float64) / order**0.5
    if random == 1:
        return rotation
    gaussian = np.random.default_rng(SEED).standard_normal((random, random))
    q, r = np.linalg.qr(gaussian)
    return np.kron(q * np.sign(np.diagonal(r)), rotation)
