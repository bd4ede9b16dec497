"""The repaired model behind its first changed layer, whose maps follow the dense model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .decoder import decoder_layers, frozen_copy, input_device, share_tensors
from .divergence import top_k_divergence
from .modeling_ghostlayers import GhostOperator
from .operators import OperatorFit
from .plan import Boundary
from .refinement_windows import RefinementWindows
from .repairs import apply_repairs_, with_change, without_held_out
from .suffix import Suffix, fed
from .trained_maps import ChannelSquares, TrainedMap, recording

# Batches on which the sizes of channels are measured.
MEASURED = 8


@dataclass
class Student:
    """The repaired model behind its first changed layer; its maps have weights of their own."""

    suffix: Suffix
    maps: dict[tuple[Boundary, str], TrainedMap] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        bare: Suffix,
        fits: Mapping[Boundary, OperatorFit],
        units: Mapping[tuple[Boundary, str], Tensor] | None = None,
    ) -> Student:
        """Repair a bare suffix without the held-out windows; nothing given in is changed.

        Args:
            bare: The suffix.
            fits: The repairs.
            units: From `channel_units`; None: all are 1.
        """
        model = share_tensors(bare.model)
        apply_repairs_(model, bare.plan, {b: without_held_out(fit) for b, fit in fits.items()})
        model = frozen_copy(model)
        layers = decoder_layers(model)
        student = cls(replace(bare, model=model))
        for boundary, fit in fits.items():
            for path, weight in fit.weights.items():
                if weight.ndim < 2:
                    continue  # a norm behind a map keeps what the closed form gave it
                before = layers[bare.plan.kept.index(boundary.start - 1)]
                student._add(before.get_submodule(path.rpartition(".")[0]), boundary, path)
            if fit.tensors:
                layer, side = bare.plan.operator_site(boundary)
                operator: Any = getattr(layers[layer], f"ghost_{side}")
                for name in ("m", "down", "up"):
                    if name in fit.tensors:
                        student._add(_linear_of(operator, name), boundary, name, name == "m")
        for key, unit in (units or {}).items():
            student.maps[key].unit = unit
        return student

    def _add(
        self, module: torch.nn.Module, boundary: Boundary, name: str, beside_identity: bool = False
    ) -> None:
        trained = TrainedMap.of(module, beside_identity=beside_identity)
        self.maps[boundary, name] = trained

    def logits(self, windows: RefinementWindows, index: int) -> Tensor:
        """Return (B, T, V) of a batch; gradients reach the outputs of the maps."""
        model = self.suffix.model
        ids = windows.ids[index].to(input_device(model))
        feeding: Any = nullcontext()
        if self.suffix.start is not None and windows.states is not None:
            feeding = fed(decoder_layers(model)[0], windows.states[index])
        with feeding:
            result: Tensor = model(input_ids=ids, use_cache=False).logits
        return result

    def divergence(self, windows: RefinementWindows, index: int) -> tuple[Tensor, int]:
        """Return Σ D over the positions of a batch, in nats, and their number."""
        logits = self.logits(windows, index)
        teacher = (part[index].to(logits.device) for part in (windows.log_probs, windows.tokens))
        return top_k_divergence(logits, *teacher).sum(), windows.ids[index].numel()

    def channel_units(self, windows: RefinementWindows) -> dict[tuple[Boundary, str], Tensor]:
        """Measure the units of the maps on a few of the windows."""
        maps = list(self.maps.values())
        squares = ChannelSquares(maps)
        with recording(maps), torch.no_grad():
            for index in range(min(MEASURED, len(windows.ids))):
                self.logits(windows, index)
                squares.take_()
        squares.measure_()
        return {key: trained.unit for key, trained in self.maps.items()}

    @torch.no_grad()
    def mean_divergences(self, texts: Iterable[RefinementWindows]) -> list[float]:
        """Return the mean of D over the positions of each text, in nats; inf if not finite."""
        return [self._mean_divergence(windows) for windows in texts]

    def _mean_divergence(self, windows: RefinementWindows) -> float:
        parts = [self.divergence(windows, index) for index in range(len(windows.ids))]
        mean = math.fsum(float(total) for total, _ in parts) / sum(count for _, count in parts)
        return mean if math.isfinite(mean) else math.inf

    def fits(self, given: Mapping[Boundary, OperatorFit]) -> dict[Boundary, OperatorFit]:
        """Add what the steps changed to the fits with and without the held-out windows."""
        new = dict(given)
        for (boundary, name), trained in self.maps.items():
            new[boundary] = with_change(new[boundary], name, trained.change)
        return new


def _linear_of(operator: GhostOperator, name: str) -> torch.nn.Module:
    module: torch.nn.Module = getattr(operator, "map" if name == "m" else name)
    return module


__all__ = ["Student"]
