"""Refine closed-form repairs by a few gradient steps on what the model says.

A closed form brings the hidden state behind a cut close to the dense one. What the model says
weighs the directions of that state unequally, and a map of few numbers has to choose between them.
Here the maps that a repair is made of, and nothing else, follow the Kullback-Leibler divergence
from the dense model, over the windows that the guard does not hold out and, where these are few,
over text that the dense model writes.

The steps are those of Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) on the elements of a map's
weight W (I + M for an operator), each in units of its own: the root mean square of its output
channel over that of its input channel, over tokens of length 1. Their length is rate·rms(W) in
these units: scaling any channel of a map's input or output changes nothing. How long steps may be
depends on the model all the same: where the divergence on held-out windows has not fallen after a
few steps, or at the end, the steps begin anew with a third of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import distributed
from .decoder import decoder_layers, frozen_copy, input_device, share_tensors
from .divergence import top_k_divergence
from .guard import MIN_WINDOWS, first_changed_layer
from .modeling_ghostlayers import GhostOperator
from .operators import REFINED, OperatorFit
from .plan import Boundary, PruningPlan
from .refinement_steps import Steps
from .refinement_windows import RefinementWindows, refinement_scorers
from .repairs import apply_repairs_, is_tested, with_change, without_held_out
from .suffix import Suffix, fed
from .trained_maps import ChannelSquares, TrainedMap, recording, take_weights_of_first_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Lengths of a step at its peak, in root mean squares of the map's weight: the next is tried where
# one does not lower the divergence.
RATES = (7e-3, 2.3e-3, 0.8e-3)
# Batches on which the sizes of channels are measured.
MEASURED = 8
# Steps after which a rate, but the last one, has to have lowered it.
TRIAL = 8
# An operator has these where it tells massive tokens apart.
SINK_TENSORS = {"shift", "sink_direction"}
Ladders = dict[Boundary, tuple[OperatorFit, ...]]


@dataclass(frozen=True)
class Refined:
    """What a refinement came to.

    Attributes:
        ladders: The repairs, with the refined ones on top if they are better.
        record: JSON values: steps, windows, divergences before and after, or why it was skipped;
            None if it was not asked for.
        notes: What the user should know.
    """

    ladders: Ladders
    record: dict[str, Any] | None
    notes: tuple[str, ...] = ()


@dataclass
class _Student:
    """The repaired model behind its first changed layer; its maps have weights of their own."""

    suffix: Suffix
    maps: dict[tuple[Boundary, str], TrainedMap] = field(default_factory=dict)

    @classmethod
    def of(cls, bare: Suffix, fits: Mapping[Boundary, OperatorFit]) -> _Student:
        """Repair a bare suffix without the held-out windows; nothing given in is changed."""
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

    def measure_channels_(self, windows: RefinementWindows) -> None:
        """Set the units of the maps from a few of the windows."""
        maps = list(self.maps.values())
        squares = ChannelSquares(maps)
        with recording(maps), torch.no_grad():
            for index in range(min(MEASURED, len(windows.ids))):
                self.logits(windows, index)
                squares.take_()
        squares.measure_()

    @torch.no_grad()
    def mean_divergence(self, windows: RefinementWindows) -> float:
        """Return the mean of D over all positions, in nats."""
        parts = [self.divergence(windows, index) for index in range(len(windows.ids))]
        return math.fsum(float(total) for total, _ in parts) / sum(count for _, count in parts)

    def fits(self, given: Mapping[Boundary, OperatorFit]) -> dict[Boundary, OperatorFit]:
        """Add what the steps changed to the fits with and without the held-out windows."""
        new = dict(given)
        for (boundary, name), trained in self.maps.items():
            new[boundary] = with_change(new[boundary], name, trained.change)
        return new


def _linear_of(operator: GhostOperator, name: str) -> torch.nn.Module:
    module: torch.nn.Module = getattr(operator, "map" if name == "m" else name)
    return module


def refine_repairs(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    ladders: Ladders,
    ids: Tensor,
    *,
    steps: int,
    batch_size: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> Refined:
    """Refine the most complex repair of every boundary, all of them together.

    The steps start from the repair with the lowest divergence: from one with another ridge, or from
    a simpler one, where the maps that it leaves alone start as they are in the dense model.

    What the steps add to the repairs fitted without the held-out windows is added to those fitted
    on all windows as well: one run of steps serves both. Every process of a session makes all
    steps, which follow one another; the first one's result is that of all.

    Args:
        dense: The dense model; it is left as it is.
        pruned: The pruned model without repairs; it is left as it is.
        plan: The plan.
        ladders: Fits of every boundary, the most complex first.
        ids: (n, T) calibration windows that the fits are from.
        steps: Steps, each on one batch.
        batch_size: Windows per step.
        seed: Seed of the order of the windows.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        The ladders: the refined repairs stand on top, or nothing changes if the divergence on the
        held-out windows has not fallen.
    """
    first = {boundary: ladder[0] for boundary, ladder in ladders.items() if ladder}
    if not first:
        return Refined(ladders, None)
    reasons = distributed.gather_each(_obstacle(dense, first.values(), ids))
    if reason := next(filter(None, reasons), None):
        return Refined(ladders, {"steps": 0, "skipped": reason}, (f"not refined: {reason}.",))
    start = first_changed_layer(plan, ladders)
    with distributed.section(), distributed.alone():
        scorers, given = refinement_scorers(
            dense, ids, steps * batch_size, batch_size, seed, progress
        )
        train, test = (
            RefinementWindows.of(scorers[0], start, given),
            RefinementWindows.of(scorers[1], start),
        )
        bare = scorers[1].suffix(pruned, plan, start)
        starts = _starts(dense, first, ladders)
        divergences = [_Student.of(bare, fits).mean_divergence(test) for fits in starts]
    divergences = distributed.same(divergences)
    before = min(divergences)
    names = {boundary: fit.name for boundary, fit in first.items()}
    first = starts[divergences.index(before)]
    with distributed.section(), distributed.alone():
        for rate in RATES:
            student = _Student.of(bare, first)
            student.measure_channels_(train)
            run = Steps(student, train, list(student.maps.values()), steps, rate, seed, progress)
            finite = run.make(TRIAL)
            after = student.mean_divergence(test)
            if finite and run.left and (after < before or rate == RATES[-1]):
                run.make(run.left)
                after = student.mean_divergence(test)
            if used := not run.left and after < before:
                break
    take_weights_of_first_(list(student.maps.values()))
    record = {
        "steps": steps,
        "rate": rate,
        "windows": given,
        "written_windows": len(scorers[0].ids) - given,
        "held_out_windows": len(scorers[1].ids),
        "held_out_divergence_before": before,
        "held_out_divergence_after": after if math.isfinite(after) else None,
        "used": used,
    }
    record = distributed.same(record)
    if not record["used"]:
        return Refined(ladders, record)
    refined = {}
    for boundary, fit in student.fits(first).items():
        # Relative errors and what else describes the fit are those of the closed form.
        diagnostics = {**fit.diagnostics, "errors_of": fit.name}
        top = replace(fit, name=names[boundary] + REFINED, diagnostics=diagnostics)
        refined[boundary] = (top, *ladders[boundary])
    return Refined({**ladders, **refined}, record)


def _starts(
    dense: PreTrainedModel, first: Mapping[Boundary, OperatorFit], ladders: Ladders
) -> list[dict[Boundary, OperatorFit]]:
    """List where the steps may start: from any repair of a ladder that is of the first one's kind.

    Maps that the first one changes and another does not start there as they are in the dense model.
    """
    rungs = {
        boundary: [
            _with_maps_of(fit, rung, decoder_layers(dense)[boundary.start - 1])
            for rung in ladders[boundary]
            if rung.tensors.keys() >= fit.tensors.keys() - SINK_TENSORS
        ]
        for boundary, fit in first.items()
    }
    return [
        {boundary: own[min(number, len(own) - 1)] for boundary, own in rungs.items()}
        for number in range(max(map(len, rungs.values())))
    ]


def _with_maps_of(first: OperatorFit, rung: OperatorFit, layer: torch.nn.Module) -> OperatorFit:
    """Let a repair change the maps that another one changes; those of its own stay as they are."""
    present = {
        path: layer.get_parameter(path).detach()
        for path in first.weights
        if path not in rung.weights
    }
    if not present:
        return rung
    return replace(
        rung,
        diagnostics={**rung.diagnostics, "maps": list(first.weights)},
        warnings=tuple(dict.fromkeys((*rung.warnings, *first.warnings))),
        weights={**present, **rung.weights},
        weights_part={**present, **rung.weights_part},
    )


def _obstacle(dense: PreTrainedModel, fits: Iterable[OperatorFit], ids: Tensor) -> str | None:
    """Say why nothing can be refined, or return None."""
    if len(ids) < MIN_WINDOWS or not all(map(is_tested, fits)):
        return f"fewer than {MIN_WINDOWS} calibration windows leave none to test the result on"
    if any(parameter.is_meta for parameter in dense.parameters()):
        return "a weight of the model is offloaded"
    return None
