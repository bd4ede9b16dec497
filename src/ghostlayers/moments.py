"""Second moments of the hidden states at a boundary, streamed in float64.

Legend: N counted tokens, C hidden size. Hidden states are rows: X (N, C) enters the boundary, Y
(N, C) should leave it, Δ = Y − X.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from .errors import CalibrationError
from .exact_sums import Running
from .fingerprint import function_key, tensor_sha256
from .plan import Boundary
from .shared_parts import Parts

if TYPE_CHECKING:
    from .sweep import TokenRows

# Of every HELD_OUT_EVERY windows the last is held out from the fit that measures held-out error.
HELD_OUT_EVERY = 4


@dataclass
class BoundaryMoments:
    """Second moments of one set of tokens at one boundary.

    Attributes:
        gram: (C, C) float64, XᵀX.
        cross: (C, C) float64, XᵀΔ.
        delta_squares: tr(ΔᵀΔ).
        target_squares: tr(YᵀY).
        num_tokens: N.
    """

    gram: Tensor
    cross: Tensor
    delta_squares: float = 0.0
    target_squares: float = 0.0
    num_tokens: int = 0

    @classmethod
    def zeros(cls, size: int, device: torch.device | str = "cpu") -> BoundaryMoments:
        """Return empty moments for hidden size `size`."""
        shape = (size, size)
        return cls(
            gram=torch.zeros(shape, dtype=torch.float64, device=device),
            cross=torch.zeros(shape, dtype=torch.float64, device=device),
        )

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add tokens.

        Args:
            x: (n, C), states that enter the boundary; cast to float64 before any product.
            y: (n, C), states that should leave it.
        """
        x = x.to(self.gram.device, torch.float64)
        y = y.to(self.gram.device, torch.float64)
        delta = y - x
        self.gram.addmm_(x.T, x)
        self.cross.addmm_(x.T, delta)
        self.delta_squares += float(delta.square().sum())
        self.target_squares += float(y.square().sum())
        self.num_tokens += x.shape[0]

    def __add__(self, other: BoundaryMoments) -> BoundaryMoments:
        """Return the moments of both sets of tokens together."""
        return BoundaryMoments(
            gram=self.gram + other.gram.to(self.gram.device),
            cross=self.cross + other.cross.to(self.cross.device),
            delta_squares=self.delta_squares + other.delta_squares,
            target_squares=self.target_squares + other.target_squares,
            num_tokens=self.num_tokens + other.num_tokens,
        )

    def relative_error(self, m: Tensor | None = None) -> float:
        """Return ‖X + XM − Y‖_F / ‖Y‖_F over these tokens, from the moments alone.

        Args:
            m: (C, C) float64, or None for no operator (M = 0).
        """
        if self.target_squares == 0.0:
            return 0.0
        squares = self.delta_squares
        if m is not None:
            m = m.to(self.gram.device, torch.float64)
            squares += float(((self.gram @ m - 2.0 * self.cross) * m).sum())
        return float((max(squares, 0.0) / self.target_squares) ** 0.5)


@dataclass
class RobustMoments:
    """Scale-free moments of ordinary tokens, and the states of the few massive ones.

    Weighting a token with 1/‖x‖² is the same as dividing its x and y by ‖x‖: the moments do not
    change when all states are scaled, and tr(G) is N. Massive tokens are at most a few per window,
    so their states are kept as they are.

    Attributes:
        ordinary: Moments of x/‖x‖ and y/‖x‖ over the ordinary tokens.
        unit_sum: (C,) float64, Σ x/‖x‖ over them.
        massive: (x, y) pairs of (n, C) float64, batch by batch.
    """

    ordinary: BoundaryMoments
    unit_sum: Tensor
    massive: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def zeros(cls, size: int, device: torch.device | str = "cpu") -> RobustMoments:
        """Return empty moments for hidden size `size`."""
        unit_sum = torch.zeros(size, dtype=torch.float64, device=device)
        return cls(BoundaryMoments.zeros(size, device), unit_sum)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, massive ones included."""
        return self.ordinary.num_tokens + sum(len(x) for x, _ in self.massive)

    def massive_states(self) -> tuple[Tensor, Tensor]:
        """Return x and y of the massive tokens, (n, C) float64 each; n may be 0."""
        empty = self.unit_sum.new_zeros(0, len(self.unit_sum))
        parts = [(empty, empty), *self.massive]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def add(self, x: Tensor, y: Tensor, massive: Tensor) -> None:
        """Add tokens.

        Args:
            x: (n, C), states that enter the boundary; cast to float64 before any product.
            y: (n, C), states that should leave it.
            massive: (n,) bool.
        """
        x = x.to(self.unit_sum.device, torch.float64)
        y = y.to(self.unit_sum.device, torch.float64)
        massive = massive.to(x.device)
        if massive.any():
            self.massive.append((x[massive], y[massive]))
        self.add_ordinary(x[~massive], y[~massive])

    def add_ordinary(self, x: Tensor, y: Tensor) -> None:
        """Add ordinary tokens, (n, C) float64; a state of length 0 says nothing and counts so."""
        norms = x.norm(dim=1, keepdim=True)
        norms = torch.where(norms > 0, norms, torch.full_like(norms, torch.inf))
        self.unit_sum += (x / norms).sum(dim=0)
        self.ordinary.add(x / norms, y / norms)

    def as_ordinary(self) -> RobustMoments:
        """Return the same tokens with the massive ones counted as ordinary."""
        every = RobustMoments.zeros(len(self.unit_sum), self.unit_sum.device)
        every.add_ordinary(*self.massive_states())
        return RobustMoments(self.ordinary + every.ordinary, self.unit_sum + every.unit_sum)

    def __add__(self, other: RobustMoments) -> RobustMoments:
        """Return the moments of both sets of tokens together."""
        return RobustMoments(
            ordinary=self.ordinary + other.ordinary,
            unit_sum=self.unit_sum + other.unit_sum.to(self.unit_sum.device),
            massive=[*self.massive, *other.massive],
        )


MomentsT = TypeVar("MomentsT", bound=Any)


@dataclass
class SplitMoments(Generic[MomentsT]):
    """Moments of one boundary, split into a fitting part and a held-out part.

    Every fourth window is held out; a single window is split by position, its last quarter held
    out. The final operator is fitted on both parts together, the held-out error comes from an
    operator fitted on the first part only.
    """

    boundary: Boundary
    fit: MomentsT
    held_out: MomentsT

    @property
    def total(self) -> MomentsT:
        """Moments of all counted tokens."""
        both: MomentsT = self.fit + self.held_out
        return both


def held_out_windows(num_windows: int) -> list[int]:
    """List the windows that are held out; a single window is split by position instead."""
    every = min(HELD_OUT_EVERY, num_windows)
    return list(range(every - 1, num_windows, every)) if num_windows > 1 else []


def held_out_mask(rows: TokenRows, num_windows: int, window: int) -> Tensor:
    """Return (N,) bool: which tokens of a sweep over n windows of T tokens are held out."""
    if num_windows == 1:
        return rows.position >= window - window // HELD_OUT_EVERY
    every = min(HELD_OUT_EVERY, num_windows)  # as `held_out_windows` lists them
    return rows.window % every == every - 1


class MomentAccumulator:
    """Streams the moments of several boundaries in one sweep.

    Args:
        boundaries: Boundaries to measure.
        num_windows: Number of windows that the sweep will see; decides the held-out split.
        window: Longest window in tokens, for the split of a single window.
        device: Where to keep the moments; None: where the states are, or the CPU (no float64).
        massive: (N,) bool, the massive tokens in the order of the sweep; with it the moments are
            `RobustMoments`.
        zeros: Makes the empty moments of a hidden size and a device, if an operator needs others.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        *,
        num_windows: int,
        window: int,
        device: torch.device | str | None = None,
        massive: Tensor | None = None,
        zeros: Callable[..., Any] | None = None,
    ) -> None:
        self.boundaries = tuple(boundaries)
        self.states: Sequence[int] = tuple(
            sorted({edge for b in boundaries for edge in (b.start, b.stop)})
        )
        self.num_windows = num_windows
        self.window = window
        self.device = device
        self.massive = massive
        self.zeros = zeros or (BoundaryMoments if massive is None else RobustMoments).zeros
        self.seen = 0
        self.parts = Parts()
        # By boundary, the fitting and the held-out part.
        self.running: dict[Boundary, tuple[Running[Any], Running[Any]]] = {}

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON values that say what it adds up."""
        return {
            "moments": [str(boundary) for boundary in self.boundaries],
            "windows": [self.num_windows, self.window],
            "kind": function_key(self.zeros),
            "massive": None if self.massive is None else tensor_sha256(self.massive),
        }

    @property
    def moments(self) -> dict[Boundary, SplitMoments[Any]]:
        """Moments so far, by boundary."""
        parts = self.running.items()
        return {b: SplitMoments(b, fit.total, held_out.total) for b, (fit, held_out) in parts}

    def begin(self, token: int) -> None:
        """Start at a token; see `sweep.Accumulator`."""
        self.seen = token

    def _start(self, boundary: Boundary, x: Tensor) -> None:
        device = self.device or ("cpu" if x.device.type == "mps" else x.device)
        zeros = partial(self.zeros, x.shape[1], device)
        fit = self.parts.add(f"{boundary} fit", Running(zeros))
        self.running[boundary] = fit, self.parts.add(f"{boundary} held out", Running(zeros))

    def update(self, states: Mapping[int, Tensor], rows: TokenRows) -> None:
        """Add one batch; see `sweep.Accumulator`."""
        held_out = held_out_mask(rows, self.num_windows, self.window)
        massive = None if self.massive is None else self.massive[self.seen :][: len(held_out)]
        self.seen += len(held_out)
        for boundary in self.boundaries:
            x, y = states[boundary.start], states[boundary.stop]
            if boundary not in self.running:
                self._start(boundary, x)
            fit, rest = self.running[boundary]
            mask = held_out.to(x.device)
            rows_of = [x, y.to(x.device)] + ([] if massive is None else [massive.to(x.device)])
            if held_out.any():
                rest.add(*(part[mask] for part in rows_of))
            if not held_out.all():
                fit.add(*(part[~mask] for part in rows_of))

    def result(self) -> dict[Boundary, SplitMoments[Any]]:
        """Return the moments by boundary.

        Raises:
            CalibrationError: If no token was counted.
        """
        found = self.moments
        counts = [part.fit.num_tokens + part.held_out.num_tokens for part in found.values()]
        if len(found) < len(self.boundaries) or not all(counts):
            raise CalibrationError(
                "no calibration tokens: every position was masked out or no batch was given. "
                "Give at least one window of text."
            )
        return found
