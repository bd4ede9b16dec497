"""Second moments of features that predict a target, for maps whose input is not the hidden state.

Legend: N counted tokens, K features, C hidden size. Rows are tokens: F (N, K), target T (N, C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .moments import BoundaryMoments, RobustMoments


@dataclass
class FeatureMoments:
    """Weighted second moments of one set of tokens.

    Attributes:
        gram: (K, K) float64, FᵀwF.
        cross: (K, C) float64, FᵀwT.
        squares: tr(TᵀwT).
        state_squares: Σ w‖y‖², by which errors are made relative.
        num_tokens: N.
    """

    gram: Tensor
    cross: Tensor
    squares: float = 0.0
    state_squares: float = 0.0
    num_tokens: int = 0

    @classmethod
    def zeros(cls, features: int, size: int, device: torch.device | str = "cpu") -> FeatureMoments:
        """Return empty moments for K features and hidden size C."""
        gram = torch.zeros(features, features, dtype=torch.float64, device=device)
        return cls(gram, gram.new_zeros(features, size))

    def add(self, features: Tensor, target: Tensor, y: Tensor) -> None:
        """Add tokens whose rows are multiplied by √w already.

        Args:
            features: (n, K) float64.
            target: (n, C) float64.
            y: (n, C) float64, the states that should leave the boundary.
        """
        self.gram.addmm_(features.T, features)
        self.cross.addmm_(features.T, target)
        self.squares += float(target.square().sum())
        self.state_squares += float(y.square().sum())
        self.num_tokens += len(features)

    def add_(self, other: FeatureMoments) -> FeatureMoments:
        """Add the moments of other tokens in place; no third Gram matrix is held."""
        self.gram.add_(other.gram)
        self.cross.add_(other.cross)
        self.squares += other.squares
        self.state_squares += other.state_squares
        self.num_tokens += other.num_tokens
        return self

    def part(self, columns: slice) -> FeatureMoments:
        """Return the moments of some of the features; views, not copies."""
        gram, cross = self.gram[columns, columns], self.cross[columns]
        return FeatureMoments(gram, cross, self.squares, self.state_squares, self.num_tokens)

    def relative_error(self, d: Tensor | None = None) -> float:
        """Return ‖FD − T‖/‖Y‖ over these tokens, from the moments alone.

        Args:
            d: (K, C) float64, or None for D = 0.
        """
        if self.state_squares == 0.0:
            return 0.0
        squares = self.squares
        if d is not None:
            d = d.to(self.gram.device, torch.float64)
            squares += float(((self.gram @ d - 2.0 * self.cross) * d).sum())
        return float((max(squares, 0.0) / self.state_squares) ** 0.5)


@dataclass
class StateFeatureMoments:
    """Moments of F = [m, x] against y: what a changed map and an operator behind it are fitted to.

    Ordinary tokens have weight 1/‖x‖²; the few massive ones are kept as they are.

    Attributes:
        ordinary: Moments over the ordinary tokens; K = width of m + C.
        unit_sum: (K,) float64, Σ F/‖x‖ over them.
        massive: (m, x, y) of the massive tokens, batch by batch, float64.
    """

    ordinary: FeatureMoments
    unit_sum: Tensor
    massive: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def zeros(
        cls, width: int, size: int, device: torch.device | str = "cpu"
    ) -> StateFeatureMoments:
        """Return empty moments for m of some width and hidden size C."""
        ordinary = FeatureMoments.zeros(width + size, size, device)
        return cls(ordinary, ordinary.gram.new_zeros(width + size))

    @property
    def width(self) -> int:
        """Width of m."""
        return int(self.ordinary.gram.shape[0] - self.ordinary.cross.shape[1])

    @property
    def num_massive(self) -> int:
        """Number of massive tokens."""
        return sum(len(m) for m, _, _ in self.massive)

    def add(self, m: Tensor, x: Tensor, y: Tensor, massive: Tensor) -> None:
        """Add tokens: m (n, width), x and y (n, C) float64, massive (n,) bool."""
        if massive.any():
            self.massive.append((m[massive], x[massive], y[massive]))
        self._add_ordinary(m[~massive], x[~massive], y[~massive])

    def _add_ordinary(self, m: Tensor, x: Tensor, y: Tensor) -> None:
        norms = x.norm(dim=1, keepdim=True)
        norms = torch.where(norms > 0, norms, torch.full_like(norms, torch.inf))
        features = torch.cat([m, x], dim=1) / norms
        self.unit_sum += features.sum(dim=0)
        self.ordinary.add(features, y / norms, y / norms)

    def count_massive_as_ordinary_(self) -> StateFeatureMoments:
        """Move the massive tokens among the ordinary ones, in place."""
        for m, x, y in self.massive:
            self._add_ordinary(m, x, y)
        self.massive = []
        return self

    def add_(self, other: StateFeatureMoments) -> StateFeatureMoments:
        """Add the moments of other tokens in place."""
        self.ordinary.add_(other.ordinary)
        self.unit_sum += other.unit_sum
        self.massive = [*self.massive, *other.massive]
        return self

    def massive_features(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return m, x and y of the massive tokens, (n, ·) float64; n may be 0."""
        size = self.ordinary.cross.shape[1]
        empty = self.unit_sum.new_zeros(0, len(self.unit_sum))
        parts = [(empty[:, : self.width], empty[:, :size], empty[:, :size]), *self.massive]
        m, x, y = (torch.cat([part[i] for part in parts]) for i in range(3))
        return m, x, y

    def behind(self, d: Tensor | None = None) -> RobustMoments:
        """Return the moments of x + mD against y: what the operator behind the map is fitted to.

        Args:
            d: (width, C) float64, or None for D = 0.
        """
        k, every = self.width, self.ordinary
        gram, cross, unit_sum = every.gram[k:, k:], every.cross[k:], self.unit_sum[k:]
        m, x, y = self.massive_features()
        if d is not None:
            mixed = d.T @ every.gram[:k, k:]
            gram = gram + mixed + mixed.T + d.T @ every.gram[:k, :k] @ d
            cross = cross + d.T @ every.cross[:k]
            unit_sum = unit_sum + self.unit_sum[:k] @ d
            x = x + m @ d
        change = every.squares - 2.0 * float(cross.trace()) + float(gram.trace())
        moments = BoundaryMoments(
            gram, cross - gram, max(change, 0.0), every.squares, every.num_tokens
        )
        return RobustMoments(moments, unit_sum, [(x, y)] if len(x) else [])


def gram_bytes(features: int, size: int) -> int:
    """Estimate the memory of a fit: both parts' Gram matrices, their rests, that of a batch."""
    return 8 * (5 * features * features + 6 * features * size)


def block_scale(gram: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return (K,) float64: the mean of G's diagonal over each block of features."""
    means = [block.mean().expand(len(block)) for block in gram.diagonal().split(list(sizes))]
    return torch.cat(means)
