"""RMSNorms that stand between an output map and the residual stream: found, and what they do.

Gemma 2 and 3, OLMo 2 and 3, GLM 4 and EXAONE 4 normalise what a sublayer returns before they add
it: h = x + g ⊙ u/rms(u) with u = zA. No module name is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Call = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NormBehind:
    """An RMSNorm, u ↦ g ⊙ u/sqrt(mean(u²) + ε), whose only parameter is its weight.

    Attributes:
        path: Its path inside the decoder layer.
        offset: g minus the weight: 0, or 1 where the weight is stored as a difference from 1.
        eps: ε.
    """

    path: str
    offset: float
    eps: float

    @property
    def weight(self) -> str:
        """Path of the weight inside the decoder layer."""
        return f"{self.path}.weight"

    def factor(self, u: Tensor) -> Tensor:
        """Return what a norm multiplies its input by before g: (n, C) to (n, 1)."""
        return (u.square().mean(dim=1, keepdim=True) + self.eps).rsqrt()


def is_norm(module: nn.Module, size: int) -> bool:
    """Whether a module has one parameter, a weight of the hidden size, and no parts."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    alone = len(parameters) == 1 and not any(module.children())
    return alone and weight is not None and weight.shape == (size,) and weight.is_floating_point()


def norms_behind(
    maps: Mapping[str, nn.Module],
    norms: Mapping[str, nn.Module],
    calls: Mapping[str, Call],
    near: float,
) -> dict[str, NormBehind]:
    """Find the RMSNorm that reads what a map returns, for every map that has one.

    Args:
        maps: Linear maps by path.
        norms: Candidates by path; see `is_norm`.
        calls: What entered and left each of them, where they are called once.
        near: Relative difference that counts as none.

    Returns:
        The norms by path of the map; maps with a bias are left out.
    """
    found: dict[str, NormBehind] = {}
    for name, module in maps.items():
        if getattr(module, "bias", None) is not None:
            continue
        readers = [norm for norm in norms if norm in calls and _reads(calls[norm], calls[name])]
        if len(readers) == 1:
            path = readers[0]
            norm = _rms_norm(path, norms[path], calls[path], near)
            if norm is not None:
                found[name] = norm
    return found


def _reads(norm: Call, linear: Call) -> bool:
    entered, left = norm[0], linear[1]
    return entered.numel() == left.numel() and torch.equal(entered.flatten(), left.flatten())


def _rms_norm(path: str, module: nn.Module, call: Call, near: float) -> NormBehind | None:
    """Measure g and ε, and check on what the layer computed that it is an RMSNorm."""
    entered, left = call
    weight = module.get_parameter("weight").float()
    row = torch.ones_like(entered.flatten(0, -2)[:1])
    gain, small = module(row).float()[0], 1e-5 * row
    offset = abs(float((gain - weight).median().round()))
    g = offset + weight
    largest = float(g.abs().max())
    if offset not in (0.0, 1.0) or float((gain - g).abs().max()) > near * largest:
        return None
    shrunk = float((module(small).float()[0] * g).sum() / g.square().sum())
    square = float(small.float().square().mean())
    eps = max(0.0, square / shrunk**2 - square) if shrunk > 0 else 0.0
    norm = NormBehind(path, offset, eps)
    u = entered.flatten(0, -2).float()
    expected = g * u * norm.factor(u)
    same = (left.flatten(0, -2).float() - expected).norm() <= near * expected.norm()
    return norm if bool(same) else None
