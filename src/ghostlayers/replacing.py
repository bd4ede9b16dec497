"""ReplaceMe at one boundary: collect the MLP's output, fit T, merge it into the MLP's last map."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .boundary_runs import BoundaryBatch, BoundaryRuns
from .decoder import decoder_layers, text_config
from .exact_sums import SplitSums
from .feature_moments import FeatureMoments
from .fold_plan import check_memory, moments_device
from .fold_sites import FoldSite
from .offload import stored_tensor
from .operators import OperatorFit
from .operators.replaceme import TokenStates, TransformFit, fit_cosine, fit_lstsq
from .shared_parts import Rows

if TYPE_CHECKING:
    from .config import PruneConfig

# `replaceme-cosine` keeps the states of so many tokens, drawn with the seed, in at most MAX_BYTES.
MAX_TOKENS = 65536
MAX_BYTES = 2 * 2**30
BYTES_PER_NUMBER = 3 * 4  # m, x − m and y in float32


def transformed_map(layer: torch.nn.Module, site: FoldSite, t: Tensor) -> dict[str, Tensor]:
    """Merge a transform of a map's output into its weight and its bias.

    Args:
        layer: The decoder layer.
        site: The map z ↦ zA + b.
        t: (C, C) float64, T.

    Returns:
        The weight of z ↦ zAT + bT as it is stored, and its bias if there is one, by path inside
        the layer; in their own dtype.
    """
    weight = stored_tensor(layer, site.weight)
    a = site.stored(weight.to(t.device, torch.float64))
    merged = {site.weight: site.stored(a @ t).to(weight.dtype)}
    bias = getattr(site.module(layer), "bias", None)
    if bias is not None:
        bias = stored_tensor(layer, f"{site.path}.bias")
        merged[f"{site.path}.bias"] = (bias.to(t.device, torch.float64) @ t).to(bias.dtype)
    return merged


def fit_replaceme_boundary(
    runs: BoundaryRuns, site: FoldSite, config: PruneConfig
) -> tuple[OperatorFit, ...]:
    """Fit and merge the transform of the MLP output before one boundary.

    Args:
        runs: Runs up to the boundary.
        site: The MLP's output map in the layer before it.
        config: `recover`, `ridge`, `seed` and `moments_device` are read.

    Returns:
        One fit. Its errors are those of T, before the merged weights are rounded to their dtype.

    Raises:
        CalibrationError: If the states that the cosine needs do not fit into memory.
    """
    collected = TransformMoments(runs, site, config)
    runs.run(collected.add, [site.path], parts=collected.sums.parts, key=collected.key)
    return collected.fit()


class TransformMoments:
    """What a transform at one boundary is fitted from, batch by batch.

    Moments of m against Δ, the held-out windows apart; for the cosine the states of some tokens.

    Args:
        runs: Runs up to the boundary; nothing is run here.
        site: The MLP's output map in the layer before it.
        config: `recover`, `ridge`, `seed` and `moments_device` are read.

    Raises:
        CalibrationError: If the states that the cosine needs do not fit into memory.
    """

    def __init__(self, runs: BoundaryRuns, site: FoldSite, config: PruneConfig) -> None:
        self.runs, self.site, self.config = runs, site, config
        size = int(text_config(runs.dense.config).hidden_size)
        self.device = moments_device(runs.dense, config)
        self.sums: SplitSums[FeatureMoments] = SplitSums()
        self.parts = self.sums.started(lambda: FeatureMoments.zeros(size, size, self.device))
        self.keeps = config.recover == "replaceme-cosine"
        self.chosen = torch.zeros(runs.ids.numel(), dtype=torch.bool)
        if self.keeps:
            kept = kept_tokens(runs.ids.numel(), size, config.seed)
            check_memory(BYTES_PER_NUMBER * size * len(kept), self.device, config)
            self.chosen[kept] = True
        part = self.sums.parts.add
        self.states = [[part(f"{i}{k}", Rows()) for k in "mry"] for i in range(2)]
        self.output = _output_map(runs, site, self.device)

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that say what it adds up."""
        return {"recover": self.config.recover, "seed": self.config.seed if self.keeps else None}

    def add(self, batch: BoundaryBatch) -> None:
        """Add one batch."""
        device = self.device
        m = self.output(batch.inputs[self.site.path].to(device, torch.float64))
        x, y = (state.to(device, torch.float64) for state in (batch.x, batch.y))
        wanted = self.chosen[batch.token :][: len(x)].to(device)
        held_out = batch.held_out.to(device)
        for moments, states, mask in zip(
            self.parts, self.states, (~held_out, held_out), strict=True
        ):
            if mask.any():
                moments.add(m[mask], (y - x)[mask], y[mask])
            if self.keeps:
                for rows, part in zip(states, (m, x - m, y), strict=True):
                    rows.append(part[mask & wanted].float())

    def fit(self) -> tuple[OperatorFit, ...]:
        """Fit the transform and merge it; one fit.

        Raises:
            CalibrationError: If no token was added.
        """
        layer = decoder_layers(self.runs.dense)[self.runs.boundary.start - 1]
        fit, held_out = self.sums.totals()
        size = len(fit.gram)
        total = FeatureMoments.zeros(size, size, self.device).add_(fit).add_(held_out)
        if self.keeps:
            kept = [TokenStates(*(rows.joined() for rows in part)) for part in self.states]
            found = fit_cosine(*kept)
        else:
            found = fit_lstsq(fit, held_out, total, ridge=self.config.ridge)
        diagnostics = {
            **_errors(total, held_out, found),
            **found.diagnostics,
            "frobenius_norm": float(found.t.norm()),
        }
        part = found.t_part
        return (
            OperatorFit(
                name=self.config.recover,
                tensors={},
                diagnostics={**diagnostics, "maps": [self.site.path]},
                warnings=_warnings(self.runs, diagnostics),
                weights=transformed_map(layer, self.site, found.t),
                weights_part={} if part is None else transformed_map(layer, self.site, part),
            ),
        )


def kept_tokens(num_tokens: int, size: int, seed: int) -> Tensor:
    """Draw the tokens whose states are kept; (n,) int64 in ascending order."""
    count = min(num_tokens, MAX_TOKENS, max(1, MAX_BYTES // (BYTES_PER_NUMBER * size)))
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(num_tokens, generator=draw)[:count].sort().values


def _output_map(
    runs: BoundaryRuns, site: FoldSite, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return what makes m (N, C) float64, which is added to the residual stream, of the input."""
    layer = decoder_layers(runs.dense)[runs.boundary.start - 1]
    a = site.stored(stored_tensor(layer, site.weight).to(device, torch.float64))
    bias = getattr(site.module(layer), "bias", None)
    shift: float | Tensor = 0.0
    if bias is not None:
        shift = stored_tensor(layer, f"{site.path}.bias").to(device, torch.float64)

    def output(z: Tensor) -> Tensor:
        return site.scale * (z @ a + shift)

    return output


def _errors(total: FeatureMoments, held_out: FeatureMoments, found: TransformFit) -> dict[str, Any]:
    """Return JSON values: relative errors ‖x − m + mT − y‖/‖y‖ before and after."""

    def after(moments: FeatureMoments, t: Tensor | None) -> float | None:
        return None if t is None else moments.relative_error(t - torch.eye(len(t)).to(t))

    part = found.t_part
    return {
        "num_tokens": total.num_tokens,
        "hidden_size": len(total.gram),
        "error_before": total.relative_error(),
        "error_after": after(total, found.t),
        "held_out_tokens": held_out.num_tokens,
        "held_out_error_before": None if part is None else held_out.relative_error(),
        "held_out_error_after": after(held_out, part),
    }


def _warnings(runs: BoundaryRuns, diagnostics: dict[str, Any]) -> tuple[str, ...]:
    tokens, size = diagnostics["num_tokens"], diagnostics["hidden_size"]
    found = []
    if tokens < size:
        found.append(
            f"boundary {runs.boundary}: {tokens} calibration tokens for hidden size {size}: the "
            f"transform is not determined. Use at least {4 * size} tokens."
        )
    name = "cosine_distance" if "cosine_distance_after" in diagnostics else "error"
    before, after = (diagnostics[f"held_out_{name}_{key}"] for key in ("before", "after"))
    if before is not None and after >= before:
        found.append(
            f"boundary {runs.boundary}: on held-out windows the transform is no better than none "
            f"({after:.4f} against {before:.4f}). Use more windows or `recover` ghost-robust."
        )
    return tuple(found)
