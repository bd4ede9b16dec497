"""How well a linear map repairs each contiguous cut, measured for all of them in one sweep.

For a cut [s, e): x enters layer s, y enters layer e, Δ = y − x. M minimises
Σ ‖xM − Δ‖²/‖x‖² + λ·tr(G)/C·‖M‖² over three quarters of the tokens, and ‖xM − Δ‖ over the rest is
compared with ‖Δ‖, tokens weighted alike. Massive tokens (`token_classes`) are left out.
Legend: N kept tokens, C hidden size, L decoder layers. Hidden states are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from . import distributed
from .fingerprint import tensor_sha256
from .moments import HELD_OUT_EVERY, held_out_windows
from .shared_parts import Parts
from .token_classes import NormAccumulator

if TYPE_CHECKING:
    from .sweep import TokenRows

# States of max(MIN_TOKENS, TOKENS_PER_CHANNEL · C) tokens are kept, in at most MAX_BYTES.
MIN_TOKENS = 4096
TOKENS_PER_CHANNEL = 4
MAX_BYTES = 2 * 2**30
RIDGES = (1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Recoverability:
    """Held-out errors of every contiguous cut, before and after a linear repair.

    Attributes:
        error_before: (L+1, L+1) float64; entry [s, e] is ‖Δ‖/‖y‖ of the cut [s, e). It is nan
            where the cut removes a layer that must stay, or leaves fewer than two.
        error_after: The same of ‖xM − Δ‖/‖y‖.
        num_tokens: Tokens on which the maps are fitted.
        held_out_tokens: Tokens on which they are measured.
        ridge: λ by start s: of three, the best on the held-out tokens for its longest cut.
    """

    error_before: np.ndarray
    error_after: np.ndarray
    num_tokens: int
    held_out_tokens: int
    ridge: Mapping[int, float]

    @property
    def ratio(self) -> np.ndarray:
        """(L+1, L+1) float64: error after over error before; 0 where nothing was lost."""
        lost = self.error_before > 0
        ratio: np.ndarray = np.where(np.isnan(self.error_before), np.nan, 0.0)
        ratio[lost] = self.error_after[lost] / self.error_before[lost]
        return ratio

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values under the documented keys; nan becomes null when written."""
        return {
            "ratio": self.ratio,
            "error_before": self.error_before,
            "error_after": self.error_after,
            "tokens": self.num_tokens,
            "held_out_tokens": self.held_out_tokens,
            "ridge": dict(self.ridge),
        }


class RecoverabilityAccumulator:
    """Keeps all hidden states of a bounded number of tokens, drawn with a seed.

    Takes (L+1) · N · C · 4 bytes of main memory, at most `MAX_BYTES`.

    Args:
        num_layers: Depth L of the model that is measured.
        hidden_size: C.
        num_windows: Number of windows that the sweep will see.
        window: Tokens per window; no padding.
        seed: Seed of the draw.
    """

    def __init__(
        self, num_layers: int, hidden_size: int, *, num_windows: int, window: int, seed: int = 0
    ) -> None:
        self.states: Sequence[int] = range(num_layers + 1)
        self.norms = NormAccumulator(num_layers)
        total = num_windows * window
        room = MAX_BYTES // (4 * (num_layers + 1) * hidden_size)
        count = min(total, max(MIN_TOKENS, TOKENS_PER_CHANNEL * hidden_size), max(1, room))
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randperm(total, generator=draw)[:count].sort().values
        self.held_out = _held_out(self.tokens, num_windows, window)
        self.kept = torch.empty(num_layers + 1, count, hidden_size)
        self.seen = self.filled = 0
        self.first: int | None = None  # the first column that this process fills
        self.parts = Parts()
        self.parts.add("norms", self.norms.parts)
        self.parts.add("kept", _Kept(self))

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON values that say what it keeps."""
        return {**self.norms.key, "tokens": tensor_sha256(self.tokens)}

    def begin(self, token: int) -> None:
        """Start at a token; see `sweep.Accumulator`."""
        self.seen, self.filled = token, int((self.tokens < token).sum())
        self.first = self.filled if self.first is None else self.first

    def update(self, states: Mapping[int, Tensor], rows: TokenRows) -> None:
        """Add one batch; see `sweep.Accumulator`."""
        self.norms.update(states, rows)
        ahead = self.tokens[self.filled :] - self.seen
        local = ahead[ahead < len(rows.window)]
        until = self.filled + len(local)
        for index in self.states:
            part = states[index]
            self.kept[index, self.filled : until] = part[local.to(part.device)].float().cpu()
        self.seen, self.filled = self.seen + len(rows.window), until

    def result(
        self, allowed: Sequence[int], *, device: torch.device | str = "cpu", progress: bool = True
    ) -> Recoverability | None:
        """Fit and measure every cut of layers that may go.

        Args:
            allowed: Layers that may be removed.
            device: Where to compute; the CPU if it has no float64.
            progress: Show a progress bar when standard error is a terminal.

        Returns:
            The errors, or None if there are no ordinary tokens to fit or to measure on.
        """
        ordinary = ~self.norms.massive()[self.tokens]
        fit, test = (
            part.nonzero()[:, 0] for part in (ordinary & ~self.held_out, ordinary & self.held_out)
        )
        if not len(fit) or not len(test):
            return None
        if torch.device(device).type == "mps":
            device = "cpu"
        depth = len(self.kept) - 1
        before, after = (np.full((depth + 1, depth + 1), np.nan) for _ in range(2))
        ridge = {}
        starts = tqdm(sorted(allowed), desc="recoverability", disable=None if progress else True)
        for start in starts:
            stops = _stops(start, set(allowed), depth)
            if not stops:
                continue
            parts = [
                [self.kept[index, rows].to(device) for index in (start, *stops)]
                for rows in (fit, test)
            ]
            ridge[start], errors = repair_errors(*parts)
            for stop, pair in zip(stops, errors, strict=True):
                before[start, stop], after[start, stop] = pair
        return Recoverability(before, after, len(fit), len(test), ridge)


class _Kept:
    """The kept states, saved and put together; the tokens of one process are consecutive."""

    def __init__(self, of: RecoverabilityAccumulator) -> None:
        self.of = of

    def tensors(self) -> dict[str, Tensor]:
        """Return all there is to save, by name."""
        first = self.of.first or 0
        return {
            "first": torch.tensor(first),
            "states": self.of.kept[:, first : self.of.filled],
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` returned."""
        self.of.first, states = int(tensors["first"]), tensors["states"]
        self.of.kept[:, self.of.first : self.of.first + states.shape[1]] = states

    def combine(self) -> None:
        """Put the states of all processes together."""
        if distributed.size() == 1:
            return
        ends = distributed.gather_each(self.of.filled)
        for source, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            sent = self.of.kept[:, start:stop].contiguous()
            self.of.kept[:, start:stop] = distributed.broadcast_(sent, source)


def _held_out(tokens: Tensor, num_windows: int, window: int) -> Tensor:
    """Mark the tokens that are held out, (N,) bool: the windows that `SplitMoments` holds out."""
    if num_windows == 1:
        return tokens >= window - window // HELD_OUT_EVERY
    return torch.isin(tokens // window, torch.tensor(held_out_windows(num_windows)))


def _stops(start: int, allowed: set[int], depth: int) -> list[int]:
    """List the ends of the cuts from `start` that remove allowed layers and leave two or more."""
    stops = []
    for stop in range(start + 1, min(start + depth - 2, depth) + 1):
        if stop - 1 not in allowed:
            break
        stops.append(stop)
    return stops


def repair_errors(
    fit: Sequence[Tensor], test: Sequence[Tensor]
) -> tuple[float, list[tuple[float, float]]]:
    """Fit the maps from one state to several later ones, and measure them on other tokens.

    Args:
        fit: States of the fitting tokens, (n, C) float32 each: first x, then every y.
        test: The same states of the tokens to measure on, (m, C) each.

    Returns:
        The ridge, and for each y the relative errors ‖Δ‖/‖y‖ and ‖xM − Δ‖/‖y‖ on `test`.
    """
    (x, *targets), (x_test, *test_targets) = fit, test
    weight, test_weight = (_inverse_norm(part) for part in (x, x_test))
    unit, test_unit = x * weight, x_test * test_weight
    gram = unit.T.double() @ unit.double()
    scale = max(float(gram.trace()) / len(gram), 1e-300)

    def moments(y: Tensor) -> Tensor:
        return unit.T @ ((y - x) * weight)  # (C, C), XᵀΔ

    test_deltas = [(y - x_test) * test_weight for y in test_targets]
    longest = moments(targets[-1])
    best = (float("inf"), 0.0, test_unit)
    for ridge in RIDGES:
        system = gram.clone()
        system.diagonal().add_(ridge * scale)
        factor = torch.linalg.cholesky(system)
        solved = torch.cholesky_solve(test_unit.T.double(), factor).T.float()  # (m, C)
        error = float((solved @ longest - test_deltas[-1]).norm())
        best = min(best, (error, ridge, solved), key=lambda item: item[0])
    _, ridge, solved = best
    errors = []
    for y, y_test, delta in zip(targets, test_targets, test_deltas, strict=True):
        size = max(float((y_test * test_weight).norm()), 1e-300)
        left = solved @ moments(y) - delta
        errors.append((float(delta.norm()) / size, float(left.norm()) / size))
    return ridge, errors


def _inverse_norm(x: Tensor) -> Tensor:
    """Return 1/‖x‖ per token, (n, 1); 0 for a state of length 0."""
    norms = x.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, 1.0 / norms, torch.zeros_like(norms))
