"""The best map of lower rank in the metric of the data (reduced-rank regression).

Of all maps of rank r the one with the least ‖XM_r − Δ‖² + λs‖M_r‖² is M V_r V_rᵀ: M is the solution
of full rank and V_r (C, r) are the leading eigenvectors of Mᵀ(G + λsI)M (Izenman, J. Multivariate
Anal. 5, 1975; Velu and Reinsel 2013, ch. 2). A truncated SVD of M itself ignores G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..moments import BoundaryMoments


def stored_ranks(size: int) -> list[int]:
    """List the ranks at which errors are recorded: 1, 2, 4, ... and C."""
    return sorted({*(2**power for power in range(size.bit_length()) if 2**power < size), size})


@dataclass(frozen=True)
class RankedMap:
    """A map with its directions in descending order of what they explain.

    Attributes:
        m: (C, C) float64, the full-rank solution.
        vectors: (C, C) float64, V; its first r columns span the outputs of the best rank-r map.
    """

    m: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, m: Tensor, gram: Tensor, ridge: float = 0.0) -> RankedMap:
        """Find the directions.

        Args:
            m: (C, C) float64, the solution of the fit with this Gram matrix and ridge.
            gram: (C, C) float64, G.
            ridge: λ, relative to the mean of G's diagonal.
        """
        weighted = gram @ m
        if ridge:
            weighted = weighted + ridge * float(gram.trace()) / len(gram) * m
        explained = m.T @ weighted
        return cls(m, torch.linalg.eigh((explained + explained.T) / 2.0).eigenvectors.flip(1))

    def tensors(self, rank: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the map as it is stored: `m`, or `down` (C, r) and `up` (r, C), M_r = down·up."""
        if rank is None:
            return {"m": self.m.to(dtype)}
        leading = self.vectors[:, :rank]
        return {"down": (self.m @ leading).to(dtype), "up": leading.T.to(dtype)}

    def errors(self, moments: BoundaryMoments) -> dict[str, float]:
        """Return the relative error ‖X + XM_r − Y‖/‖Y‖ over some tokens, by rank r.

        Exact for any tokens, those of the fit or others: XM_r is a sum over directions of which no
        two overlap. Rounding is left out.
        """
        if moments.target_squares == 0.0:
            return {}
        turned = self.m @ self.vectors
        gains = ((2.0 * moments.cross @ self.vectors - moments.gram @ turned) * turned).sum(dim=0)
        squares = (moments.delta_squares - gains.cumsum(0)).clamp(min=0.0)
        errors = (squares / moments.target_squares).sqrt()
        return {str(rank): float(errors[rank - 1]) for rank in stored_ranks(len(self.m))}


def dense_map(tensors: dict[str, Tensor]) -> Tensor:
    """Return the map of stored tensors as one matrix, (C, C): `m`, or float64 `down`·`up`."""
    if "m" in tensors:
        return tensors["m"]
    return tensors["down"].double() @ tensors["up"].double()
