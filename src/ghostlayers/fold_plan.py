"""Where to fold, and whether there is the memory for it: known before any calibration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .decoder import decoder_layers, text_config
from .devices import resolve_device
from .errors import CalibrationError, UnsupportedModelError
from .feature_moments import gram_bytes
from .fold_sites import FoldSite, FoldSites, find_fold_sites, layer_before
from .operators import REPLACING
from .plan import Boundary, PruningPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import PruneConfig

ANNOUNCED_BYTES = 2**30


@dataclass(frozen=True)
class FoldPlan:
    """Where to fold at each boundary, found before any calibration.

    Attributes:
        sites: Output maps of the layer before each boundary that can be folded into.
        warnings: One line for each boundary (or map) that cannot.
    """

    sites: Mapping[Boundary, FoldSites]
    warnings: tuple[str, ...] = ()


def plan_folds(model: PreTrainedModel, plan: PruningPlan, config: PruneConfig) -> FoldPlan:
    """Find the maps at every boundary and check that the fit has the memory it needs.

    Raises:
        UnsupportedModelError: With `recover` fold or replaceme-*, if a boundary has no map to
            fold into.
        CalibrationError: If the Gram matrices do not fit into memory.
    """
    sites: dict[Boundary, FoldSites] = {}
    warnings: list[str] = []
    for boundary in plan.boundaries:
        try:
            norms = config.recover not in REPLACING
            found = find_fold_sites(model, layer_before(boundary), norms=norms)
        except UnsupportedModelError as error:
            if config.recover in REPLACING:
                raise UnsupportedModelError(
                    str(error).replace("`recover` ghost-robust", "`recover` ghost")
                ) from error
            if config.recover == "fold":
                raise
            reason = str(error).removesuffix("Use `recover` ghost-robust.").rstrip(" .")
            warnings.append(f"boundary {boundary}: ghost-robust instead of fold+ghost ({reason}).")
            continue
        sites[boundary] = found
        if config.recover == "fold" and config.fold_maps == "both" and found.attention is None:
            warnings.append(
                f"boundary {boundary}: only {found.mlp.path!r} is changed: the layer before it has "
                f"no attention output map to refit ({found.why_no_attention})."
            )
    size = int(text_config(model.config).hidden_size)
    widths = [_num_features(model, b, found, config, size) for b, found in sites.items()]
    if widths:
        check_memory(gram_bytes(max(widths), size), moments_device(model, config), config)
    return FoldPlan(sites, tuple(warnings))


def _num_features(
    model: PreTrainedModel, boundary: Boundary, found: FoldSites, config: PruneConfig, size: int
) -> int:
    layer = decoder_layers(model)[boundary.start - 1]
    if config.recover in REPLACING:
        return size
    widths = [map_width(site, layer) for site in chosen_sites(found, config)]
    return sum(widths) if config.recover == "fold" else widths[-1] + size


def map_width(site: FoldSite, layer: torch.nn.Module) -> int:
    """Return the number of a map's inputs."""
    shape = layer.get_parameter(site.weight).shape
    return int(shape[0] if site.transposed else shape[1])


def chosen_sites(found: FoldSites, config: PruneConfig) -> list[FoldSite]:
    """Return the maps to change: attention first, MLP last."""
    both = config.recover == "fold" and config.fold_maps == "both"
    return ([found.attention] if both and found.attention is not None else []) + [found.mlp]


def moments_device(model: PreTrainedModel, config: PruneConfig) -> torch.device:
    """Return where the float64 moments live; `auto` is where the model is, if it has float64."""
    if config.moments_device != "auto":
        name = config.moments_device
        return resolve_device(name, option="moments_device", dtype=torch.float64)
    return torch.device("cpu") if model.device.type in ("mps", "meta") else model.device


def available_bytes(device: torch.device) -> int | None:
    """Return how much memory is free on a device, or None if that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        from psutil import virtual_memory  # type: ignore[import-untyped]
    except ImportError:
        return None
    return int(virtual_memory().available)


def check_memory(need: int, device: torch.device, config: PruneConfig) -> None:
    """Say what the moments will take, if it is much.

    Raises:
        CalibrationError: If it is more than there is.
    """
    free = available_bytes(device)
    if free is not None and need > free:
        both = config.recover == "fold" and config.fold_maps == "both"
        advice = "Use `fold_maps` mlp" if both else "Use `recover` ghost-robust"
        raise CalibrationError(
            f"the moments of `recover` {config.recover} need about {need / 1e9:.1f} GB on "
            f"{device}, {free / 1e9:.1f} GB are free. {advice} or another `moments_device`."
        )
    if need > ANNOUNCED_BYTES:
        sys.stderr.write(
            f"ghostlayers: the moments will take about {need} bytes ({need / 1e9:.1f} GB) on "
            f"{device}\n"
        )
