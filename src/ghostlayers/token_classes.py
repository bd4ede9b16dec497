"""Two classes of tokens, ordinary and massive, and how a massive one is known at inference.

A few tokens (attention sinks: the first of a window, BOS) have states 10 to 200 times longer than
the rest (Sun et al., Massive Activations in LLMs, arXiv 2402.17762). Legend: N counted tokens, C
hidden size, L decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CalibrationError
from .fingerprint import tensor_sha256
from .shared_parts import Parts, Rows

if TYPE_CHECKING:
    from .plan import Boundary
    from .sweep import TokenRows

# Massive tokens stand behind a gap: one norm is GAP times the next smaller one, within the largest
# TOP_SHARE of the norms of one hidden state.
GAP = 2.5
TOP_SHARE = 0.02
# A rule is used if it misses at most this share of the massive tokens, and if the ordinary tokens
# that it takes for massive are at most this share of the massive ones.
MAX_MISSED = 0.05
MAX_FALSE = 0.5
DIRECTION_RIDGE = 1e-3


class NormAccumulator:
    """Keeps the norm of every token in hidden states 1..L: 4 bytes each.

    State 0 is left out: a token's embedding does not know yet that it will become a sink.

    Args:
        num_layers: Depth L of the model that is measured.
    """

    def __init__(self, num_layers: int) -> None:
        self.states: Sequence[int] = range(1, num_layers + 1)
        self.parts = Parts()
        self.norms: Rows = self.parts.add("norms", Rows(dim=1))

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON values that say what it keeps."""
        return {"norms": len(self.states)}

    def begin(self, token: int) -> None:
        """Start at a token; see `sweep.Accumulator`."""

    def update(self, states: Mapping[int, Tensor], rows: TokenRows) -> None:
        """Add one batch; see `sweep.Accumulator`."""
        norms = [torch.linalg.vector_norm(states[index].float(), dim=-1) for index in self.states]
        self.norms.append(torch.stack([norm.cpu() for norm in norms]))

    def massive(self) -> Tensor:
        """Return (N,) bool: tokens that are massive in any state, in the order of the sweep.

        A token that becomes a sink later, inside or behind a cut, is thus known everywhere.

        Raises:
            CalibrationError: If no token was counted.
        """
        if not self.norms.batches:
            raise CalibrationError(
                "no calibration tokens: every position was masked out or no batch was given. "
                "Give at least one window of text."
            )
        norms = self.norms.joined()
        return torch.stack([above_the_gap(state) for state in norms]).any(dim=0)


def above_the_gap(norms: Tensor) -> Tensor:
    """Mark the tokens above the widest gap among the largest norms, if there is one.

    Args:
        norms: (N,) float, norms of one hidden state.

    Returns:
        (N,) bool; all false if no norm in the top `TOP_SHARE` is `GAP` times the next.
    """
    count = min(max(1, int(len(norms) * TOP_SHARE)), len(norms) - 1)
    if count < 1:
        return torch.zeros_like(norms, dtype=torch.bool)
    top = norms.double().topk(count + 1).values.clamp(min=torch.finfo(torch.float32).tiny)
    ratios = top[:-1] / top[1:]
    widest = int(ratios.argmax())
    if float(ratios[widest]) < GAP:
        return torch.zeros_like(norms, dtype=torch.bool)
    return norms.double() > (top[widest] * top[widest + 1]).sqrt()


def rule_sample(ids: Tensor, massive: Tensor, num_windows: int) -> tuple[Tensor, Tensor]:
    """Take the windows on which a rule's threshold is placed, evenly spread.

    Args:
        ids: (n, T) windows.
        massive: (n·T,) bool.
        num_windows: About how many of them.

    Returns:
        The windows, and which of their tokens are massive.
    """
    every = max(1, len(ids) // num_windows)
    return ids[::every], massive.view(len(ids), -1)[::every].flatten()


@dataclass(frozen=True)
class SinkRule:
    """Tells massive tokens by direction: massive if u·x/‖x‖ > cosine. It knows no position.

    Attributes:
        direction: u, (C,) of the dtype in which it will be stored, of length 1 before rounding.
        cosine: The threshold.
        missed: Share of the massive calibration tokens that it misses.
        false: Ordinary tokens that it takes for massive, as a share of the massive ones.
    """

    direction: Tensor
    cosine: float
    missed: float
    false: float

    @property
    def separates(self) -> bool:
        """Whether it tells the classes apart well enough to be used."""
        return self.missed <= MAX_MISSED and self.false <= MAX_FALSE


def sink_direction(gram: Tensor, ordinary_sum: Tensor, count: int, massive: Tensor) -> Tensor:
    """Fit the direction between the classes: ridge linear discriminant on unit states.

    Args:
        gram: (C, C) float64, Gram matrix of the ordinary tokens' unit states x/‖x‖.
        ordinary_sum: (C,) float64, their sum.
        count: Their number.
        massive: (n, C) float64, unit states of the massive tokens.

    Returns:
        u = (cov + 1e-3·tr(cov)/C·I)⁻¹(mean massive − mean ordinary), (C,) float64, of length 1.
    """
    mean = ordinary_sum / count
    cov = gram / count - torch.outer(mean, mean)
    cov.diagonal().add_(DIRECTION_RIDGE * float(cov.trace()) / len(mean))
    direction: Tensor = torch.linalg.solve(cov, massive.mean(dim=0) - mean)
    return torch.nn.functional.normalize(direction, dim=0, eps=1e-300)


def cosines(states: Tensor, direction: Tensor) -> Tensor:
    """Return u·x/‖x‖ in float32, (N,): what `GhostOperator` compares with its threshold."""
    x = states.float()
    norms = torch.linalg.vector_norm(x, dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    scores: Tensor = (x @ direction.to(x.device, torch.float32)) / norms
    return scores


def place_threshold(
    direction: Tensor, ordinary: Tensor, massive: Tensor, num_ordinary: int
) -> SinkRule:
    """Put the threshold between the classes.

    It lies in the middle between the highest ordinary and the lowest massive score. Where they
    overlap it is the massive score with the fewest errors, a missed massive token counting three.

    Args:
        direction: u, (C,).
        ordinary: (m,) float32, scores of a sample of the ordinary tokens.
        massive: (n,) float32, scores of all massive tokens.
        num_ordinary: Number of ordinary tokens, of which the scores are a sample.

    Returns:
        The rule.
    """
    scale = num_ordinary / max(len(ordinary), 1)
    highest = float(ordinary.max()) if len(ordinary) else -1.0
    lowest = float(massive.min())
    cosine = (highest + lowest) / 2
    if highest >= lowest:
        errors = [
            (scale * int((ordinary > just).sum()) + 3 * int((massive <= just).sum()), float(just))
            for just in torch.nextafter(massive, torch.full_like(massive, -2.0))
        ]
        cosine = min(errors)[1]
    return SinkRule(
        direction=direction,
        cosine=cosine,
        missed=int((massive <= cosine).sum()) / len(massive),
        false=scale * int((ordinary > cosine).sum()) / len(massive),
    )


class ScoreAccumulator:
    """Keeps the scores of the ordinary tokens for one direction per boundary.

    Args:
        directions: u of each boundary, (C,).
        massive: (N,) bool, the massive tokens in the order of the sweep.
    """

    def __init__(self, directions: Mapping[Boundary, Tensor], massive: Tensor) -> None:
        self.directions = dict(directions)
        self.states: Sequence[int] = tuple(sorted({b.start for b in directions}))
        self.massive = massive
        self.seen = 0
        self.parts = Parts()
        self.rows: dict[Boundary, Rows] = {b: self.parts.add(str(b), Rows()) for b in directions}

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON values that say what it keeps."""
        hashes = {str(b): tensor_sha256(u) for b, u in self.directions.items()}
        return {"scores": hashes, "massive": tensor_sha256(self.massive)}

    def begin(self, token: int) -> None:
        """Start at a token; see `sweep.Accumulator`."""
        self.seen = token

    def update(self, states: Mapping[int, Tensor], rows: TokenRows) -> None:
        """Add one batch; see `sweep.Accumulator`."""
        count = len(rows.window)
        ordinary = ~self.massive[self.seen : self.seen + count]
        self.seen += count
        for boundary, direction in self.directions.items():
            x = states[boundary.start]
            self.rows[boundary].append(cosines(x, direction)[ordinary.to(x.device)].cpu())

    def scores(self, boundary: Boundary) -> Tensor:
        """Return the ordinary tokens' scores at a boundary, (m,) float32."""
        return self.rows[boundary].joined()
