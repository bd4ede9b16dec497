"""What a fold changes: an output map with the RMSNorm behind it, as one matrix V.

Legend: z (N, K) inputs of the map, A (K, C) its weight, u = zA, g (C,) the norm's gain, c the
residual multiplier, rows are tokens. The layer adds c·uV with V = A, or c·(u/rms(u))·diag(g) = f·V
with V = A·diag(g) and features f = c·z/rms(zA): linear in V while what the norm divides by stays.

A new V is split into A' = V/g' and g'. Any g' gives the same u'·diag(g'), but what the norm divides
by, Σ u'²/C, depends on it. With q = f·V and b ≥ 0, g'² = e/b is chosen by non-negative least
squares of Σ_c b_c q_c²/(e_c C) = 1 over all tokens, e_c the mean square of q_c over that of channel
c of u/rms(u), and b pulled towards 1, which would keep the mean square of every channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn

from .boundary_runs import BoundaryBatch, BoundaryRuns
from .exact_sums import Running
from .feature_moments import FeatureMoments
from .fingerprint import tensor_sha256
from .fold_sites import FoldSite
from .offload import stored_tensor
from .operators.fold import rounded_weight
from .shared_parts import Parts

# Pull of b towards 1, in means of its Gram matrix's diagonal, and the least it may be.
PULL = 1e-3
LEAST = 1e-4


@dataclass(frozen=True)
class Changed:
    """A changed map.

    Attributes:
        weights: New weights by path inside the layer, in their own dtype.
        kept: (K, C) float64, the change of V that rounding left.
    """

    weights: dict[str, Tensor]
    kept: Tensor


class FoldMap:
    """An output map of a layer as it is before a fold.

    Args:
        layer: The decoder layer; it is left as it is.
        site: The map.
        device: Where the moments live.
    """

    def __init__(self, layer: nn.Module, site: FoldSite, device: torch.device) -> None:
        self.site = site
        self.weight = stored_tensor(layer, site.weight)
        a = site.stored(self.weight.detach().to(device, torch.float64))
        self.width, self.device = len(a), device
        self.norm_weight: Tensor | None = None
        if site.norm is not None:
            self.norm_weight = stored_tensor(layer, site.norm.weight).detach()
            self.a = a
            self.gain = site.norm.offset + self.norm_weight.to(device, torch.float64)

    @property
    def is_linear(self) -> bool:
        """Whether what the layer adds is linear in V without any approximation."""
        return self.norm_weight is None

    def features(self, z: Tensor) -> Tensor:
        """Return f, (N, K) float64."""
        if self.site.norm is None:
            return self.site.scale * z
        return self.site.scale * self.site.norm.factor(z @ self.a) * z

    def changed(self, d: Tensor, gain: Tensor | None = None) -> Changed:
        """Round a change of V into weights.

        Args:
            d: (K, C) float64.
            gain: (C,) float64, g', if there is a norm.
        """
        site = self.site
        if site.norm is None or self.norm_weight is None:
            new, kept = rounded_weight(self.weight, site.stored(d))
            return Changed({site.weight: new}, site.stored(kept))
        assert gain is not None
        norm_weight = rounded_gain(gain, site.norm.offset, self.norm_weight.dtype)
        g = site.norm.offset + norm_weight.double()
        v = self.a * self.gain
        new = site.stored((v + d) / g).to(self.weight.dtype)
        return Changed(
            {site.weight: new, site.norm.weight: norm_weight}, site.stored(new.double()) * g - v
        )


@dataclass(frozen=True)
class Change:
    """A change of V.

    Attributes:
        d: (K, C) float64.
        gram: (K, K) float64 of the (weighted) features that it was fitted to.
        less: What `gram` has too much: (K, K) of the held-out windows.
        is_part: Whether it was fitted without the held-out windows.
    """

    d: Tensor
    gram: Tensor
    less: Tensor | None = None
    is_part: bool = False

    def squares(self, matrix: Tensor) -> Tensor:
        """Return (C,) float64, Σ (fX)² over the windows it was fitted to, for X (K, C)."""
        rows = self.gram @ matrix
        if self.less is not None:
            rows -= self.less @ matrix
        return (rows * matrix).sum(dim=0).clamp(min=0)


def change_map(
    runs: BoundaryRuns, own: FoldMap, changes: Sequence[Change], weights: Mapping[str, Tensor]
) -> list[Changed]:
    """Turn changes of V into weights; where a norm stands behind the map that takes one more run.

    Args:
        runs: Runs up to the boundary.
        own: The map.
        changes: The changes.
        weights: Other changed weights of the layer, by path.

    Returns:
        The changed map for each change.
    """
    if own.is_linear or not changes:
        return [own.changed(change.d) for change in changes]
    gains = _gains(runs, own, changes, weights)
    return [own.changed(change.d, gain) for change, gain in zip(changes, gains, strict=True)]


def _gains(
    runs: BoundaryRuns, own: FoldMap, changes: Sequence[Change], weights: Mapping[str, Tensor]
) -> list[Tensor]:
    """Choose g' for every change, in one run."""
    device, size, path = own.a.device, own.a.shape[1], own.site.path
    products = [own.a * own.gain + change.d for change in changes]
    equal = [
        equal_squares(change.squares(v), change.squares(own.a), own.gain)
        for v, change in zip(products, changes, strict=True)
    ]
    parts = Parts()
    sums = [
        parts.add(str(index), Running(lambda: FeatureMoments.zeros(size, 1, device)))
        for index in range(len(changes))
    ]

    def add(batch: BoundaryBatch) -> None:
        f = own.features(batch.inputs[path].to(device, torch.float64)) / own.site.scale
        for index, change in enumerate(changes):
            own_f = f[~batch.held_out.to(device)] if change.is_part else f
            if len(own_f):
                rows = (own_f @ (products[index] / equal[index])).square() / size
                one = torch.ones_like(rows[:, :1])
                sums[index].add(rows, one, one)

    key = {"gains": path, "products": [tensor_sha256(v) for v in products]}
    runs.run(add, [path], weights, parts=parts, key=key, targets=False)
    return [gain / shares(each.total).sqrt() for gain, each in zip(equal, sums, strict=True)]


def equal_squares(new: Tensor, old: Tensor, gain: Tensor) -> Tensor:
    """Return the g' with which A' = V/g' leaves every channel of zA its mean square.

    Args:
        new: (C,) float64, Σ (zV)².
        old: (C,) float64, Σ (zA)².
        gain: (C,) float64, the present gain; its signs stay.
    """
    sign = torch.where(gain < 0, -1.0, 1.0).to(gain)
    usable = (new > 0) & (old > 0)
    one = torch.ones_like(new)
    ratio = torch.where(usable, new, one) / torch.where(usable, old, one)
    return torch.where(usable, sign * ratio.sqrt(), torch.where(gain == 0, sign, gain))


def rounded_gain(gain: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """Round a gain into a norm's weight; none becomes 0, which V could not be divided by.

    Args:
        gain: (C,) float64.
        offset: Gain minus weight.
        dtype: Dtype of the weight.

    Returns:
        (C,), the weight; a gain that would be 0 is the least one of its sign.
    """
    weight = (gain - offset).to(dtype)
    least = torch.finfo(dtype).eps if offset else torch.finfo(dtype).tiny
    closed = (torch.where(gain < 0, -least, least) - offset).to(weight)
    return torch.where(offset + weight.double() == 0, closed, weight)


def shares(moments: FeatureMoments) -> Tensor:
    """Return b (C,) float64: argmin over b ≥ 0 of Σ (Σ_c b_c s_c − 1)² + λ Σ_c (b_c − 1)².

    Args:
        moments: Of s_c, the share of channel c in what the norm divides by, against 1.
    """
    gram, cross = moments.gram, moments.cross[:, 0]
    pull = PULL * float(gram.diagonal().mean()) or 1.0

    def half_square(values: Any) -> tuple[float, Any]:
        b = torch.as_tensor(values).to(gram)
        change = gram @ b + pull * b  # the gradient of the square, but for its constant part
        gradient = change - cross - pull
        return float((0.5 * change - cross - pull) @ b), gradient.cpu().numpy()

    found = minimize(
        half_square,
        torch.ones(len(cross), dtype=torch.float64).numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(LEAST, None)] * len(cross),
        options={"maxiter": 2000, "maxfun": 4000},
    )
    return torch.as_tensor(found.x).to(cross)


__all__ = ["Change", "Changed", "FoldMap", "change_map"]
