"""Probe one decoder layer for its output maps: see `fold_sites`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .norm_behind import NormBehind, is_norm, norms_behind
from .sweep import hidden_state

LOW_PRECISION = (torch.bfloat16, torch.float16)
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FoldSite:
    """A linear map whose output is added to the residual stream.

    Attributes:
        path: Its path inside the decoder layer, such as ``mlp.down_proj``.
        scale: c: its output times c is added (1 but for residual multipliers).
        transposed: Whether its weight is stored as (in, out), as Conv1D does.
        norm: The RMSNorm that its output goes through before it is added, if there is one.
    """

    path: str
    scale: float
    transposed: bool
    norm: NormBehind | None = None

    @property
    def weight(self) -> str:
        """Path of the weight inside the decoder layer."""
        return f"{self.path}.weight"

    def stored(self, matrix: Tensor) -> Tensor:
        """Turn a (in, out) matrix into the layout of the weight, and back."""
        return matrix if self.transposed else matrix.T

    def module(self, layer: nn.Module) -> nn.Module:
        """Return the map in a decoder layer."""
        return layer.get_submodule(self.path)


@dataclass(frozen=True)
class FoldSites:
    """The output maps of one decoder layer.

    Attributes:
        mlp: The MLP's, or the only one of a layer that has one sublayer.
        attention: The attention's (any token mixer's), or None.
        why_no_attention: Why not, in words; empty if there is one.
    """

    mlp: FoldSite
    attention: FoldSite | None
    why_no_attention: str = ""


def _is_map(module: nn.Module, size: int) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not weight.is_floating_point():
        return False
    return isinstance(module, nn.Linear | Conv1D) and weight.shape[_out_axis(module)] == size


def _out_axis(module: nn.Module) -> int:
    return 1 if isinstance(module, Conv1D) else 0


class LayerProbe:
    """Calls one layer again and again with changes to what its maps return."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer, self.args, self.kwargs = layer, args, kwargs
        self.state: Tensor = args[0] if args else kwargs["hidden_states"]
        self.near = 5e-2 if self.state.dtype in LOW_PRECISION else 1e-3
        size = self.state.shape[-1]
        maps = {name: module for name, module in layer.named_modules() if _is_map(module, size)}
        norms = {name: module for name, module in layer.named_modules() if is_norm(module, size)}
        self.modules: dict[str, nn.Module] = {**maps, **norms}
        calls = {name: seen[0] for name, seen in self._run({})[1].items() if len(seen) == 1}
        self.maps = {
            name: module
            for name, module in maps.items()
            if name in calls and self._is_linear(module, *calls[name])
        }
        self.modules = {**self.maps, **norms}
        self.norms = norms_behind(self.maps, norms, calls, self.near)

    def sites(self) -> FoldSites | str:
        """Return the maps, or why there is no MLP output map."""
        direct = self._additive({})
        mlp, mixers = self._split(list(direct))
        if not mlp:
            return self._why_none()
        behind = {name: direct[name] for name in mixers}
        behind = behind or self._additive({mlp: torch.zeros_like})
        if not self._is_all([mlp, *behind]):
            return (
                f"beside {mlp!r} something reaches the layer's output that is no linear map "
                "(mixture of experts, or another norm or a gate)"
            )
        site = self._site(mlp, direct[mlp])
        if len(behind) == 1:
            name = next(iter(behind))
            return FoldSites(site, self._site(name, behind[name]))
        return FoldSites(site, None, f"it has {len(behind) or 'no'} output maps of token mixers")

    def _site(self, name: str, scale: float) -> FoldSite:
        return FoldSite(name, scale, isinstance(self.maps[name], Conv1D), self.norms.get(name))

    def _run(
        self, changes: Mapping[str, Change], state: Tensor | None = None
    ) -> tuple[Tensor, dict[str, list[tuple[Tensor, Tensor]]]]:
        """Call the layer; return its output and what entered and left each module, call by call."""
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        state = self.state if state is None else state
        with _changed(self.modules, changes, seen):
            if self.args:
                out = self.layer(state, *self.args[1:], **self.kwargs)
            else:
                out = self.layer(**{**self.kwargs, "hidden_states": state})
        return hidden_state(out).float(), seen

    def _is_linear(self, module: Any, entered: Tensor, left: Tensor) -> bool:
        weight = module.weight.T if _out_axis(module) else module.weight
        if weight.is_meta or entered.shape[-1] != weight.shape[1]:
            return bool(weight.is_meta)  # refused later, with that reason
        bias = getattr(module, "bias", None)
        expected = torch.nn.functional.linear(entered, weight, bias).float()
        return bool((left.float() - expected).norm() <= self.near * (1e-6 + expected.norm()))

    def _additive(self, fixed: Mapping[str, Change]) -> dict[str, float]:
        """Find the maps whose output is added times a constant, while others are held fixed.

        Where a norm stands behind a map, the norm's output is what is added.
        """
        base, _ = self._run(fixed)
        size = float(base.square().mean(dim=-1).sqrt().median()) or 1.0
        generator = torch.Generator().manual_seed(1)
        delta = (size * torch.randn(base.shape, generator=generator)).to(self.state)
        wanted, found = delta.float(), {}

        def add(out: Tensor) -> Tensor:
            return out + delta.view(out.shape)

        for name in self.maps:
            if name in fixed:
                continue
            last = self.norms[name].path if name in self.norms else name
            change = self._run({**fixed, last: add})[0] - base
            c = float((change * wanted).sum() / wanted.square().sum())
            rest = float((change - c * wanted).norm() / wanted.norm())
            if abs(c) > 1e-3 and rest <= self.near * abs(c):
                found[name] = 1.0 if abs(c - 1.0) < self.near / 10 else c
        return found

    def _split(self, direct: Sequence[str]) -> tuple[str, list[str]]:
        """Tell the MLP's map from those of token mixers: its input sees no other position."""
        if len(direct) < 2:
            return "".join(direct), []
        moved = self.state.clone()
        moved[:, 0] = -moved[:, 0]
        seen = [self._run({}, state)[1] for state in (self.state, moved)]
        local = []
        for name in direct:
            one, two = (part[name][0][0].flatten(0, -2)[-1] for part in seen)  # last position
            if float((one - two).abs().max()) <= 1e-6 * float(one.abs().max()):
                local.append(name)
        if len(local) != 1:
            return "", []
        return local[0], [name for name in direct if name != local[0]]

    def _is_all(self, maps: Sequence[str]) -> bool:
        """Whether the layer only scales its input once these maps return zero."""
        out, _ = self._run(dict.fromkeys(maps, torch.zeros_like))
        x = self.state.float()
        scale = (out * x).sum() / x.square().sum()
        return bool((out - scale * x).norm() <= self.near * x.norm())

    def _why_none(self) -> str:
        low = [
            name
            for name, module in self.layer.named_modules()
            if isinstance(weight := getattr(module, "weight", None), Tensor)
            and not weight.is_floating_point()
        ]
        if low:
            return f"its maps hold low-bit weights ({low[0]!r})"
        return (
            "no linear map's output is simply added to the residual stream, as it is or behind an "
            "RMSNorm (something else follows it, or it is a mixture of experts)"
        )


@contextmanager
def _changed(
    modules: Mapping[str, nn.Module],
    changes: Mapping[str, Change],
    seen: dict[str, list[tuple[Tensor, Tensor]]],
) -> Iterator[None]:
    """Record what enters and leaves the modules, and change what they return."""
    handles = []

    def hook(name: str) -> Callable[..., Tensor | None]:
        def after(_module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
            seen.setdefault(name, []).append((args[0].clone(), out.clone()))  # += may follow
            return changes[name](out) if name in changes else None

        return after

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_hook(hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
