"""The second sweep of a comparison: what the operators of many cuts are fitted from, in one pass.

Legend: C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .boundary_runs import RULE_WINDOWS, BoundaryBatch, BoundaryRuns
from .channel_moments import ChannelMoments, moments_maker
from .compare_calibration import Calibration
from .compare_config import CompareConfig
from .decoder import decoder_layers, text_config
from .fit_ladder import fit_ladder
from .fold_plan import moments_device
from .fold_sites import FoldSite, find_fold_sites, layer_before
from .moments import BoundaryMoments, MomentAccumulator, SplitMoments, held_out_mask
from .norm_moments import moments_of_operator
from .operators import FOLDING, GUARDED, NO_OPERATOR, REPLACING, ROBUST, OperatorFit
from .plan import Boundary
from .replacing import TransformMoments
from .steps import fit_sink_rules, prefix_model
from .sweep import batches_of, progress_bar, stream
from .token_classes import rule_sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .recovered import Ladder

CHANNEL = ("linearpatch-diag", "linearpatch-rotate")
NORMALISED = ("ghost-norm",)
FLOAT64 = 8


def is_shared(operator: str) -> bool:
    """Say whether an operator is fitted from one sweep over dense states alone."""
    return operator != NO_OPERATOR and (operator not in FOLDING or operator in REPLACING)


def family(operator: str) -> str:
    """Name the moments that an operator is fitted from; several operators may share them."""
    if operator in REPLACING:
        return operator
    if operator in NORMALISED:
        return "norm"
    return "robust" if operator in ROBUST else "second"


def boundary_bytes(operators: Iterable[str], size: int) -> int:
    """Estimate the memory of one boundary's moments, their rests, and what a fit sums up.

    Args:
        operators: Operators to fit there.
        size: C.
    """
    families = {family(operator) for operator in operators if is_shared(operator)}
    return FLOAT64 * size * size * (8 * len(families) + 3)


@dataclass
class GridMoments:
    """Moments of one set of tokens for several operators; second moments are kept once.

    Attributes:
        second: Second moments.
        channels: Sums per channel by operator; their `second` is the one above.
    """

    second: BoundaryMoments
    channels: dict[str, ChannelMoments] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N."""
        return self.second.num_tokens

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add tokens: x and y (n, C), cast to float64 before anything is summed."""
        x = x.to(self.second.gram.device, torch.float64)
        y = y.to(self.second.gram.device, torch.float64)
        self.second.add(x, y)
        for part in self.channels.values():
            part.add_sums(x, y)

    def __add__(self, other: GridMoments) -> GridMoments:
        """Return the moments of both sets of tokens together."""
        second, channels = self.second + other.second, {}
        for name, part in self.channels.items():
            found = part.with_second(second)
            channels[name] = found.plus_sums(other.channels[name])
        return GridMoments(second, channels)

    def of(self, operator: str) -> Any:
        """Return what an operator is fitted from."""
        return self.channels.get(operator, self.second)


def grid_zeros(operators: Sequence[str]) -> Callable[..., GridMoments]:
    """Return what makes empty moments for these operators."""
    makers = {name: moments_maker(name) for name in operators if name in CHANNEL}

    def zeros(size: int, device: torch.device | str = "cpu") -> GridMoments:
        second = BoundaryMoments.zeros(size, device)
        channels = {n: make(size, device) for n, make in makers.items() if make is not None}
        return GridMoments(second, {n: part.with_second(second) for n, part in channels.items()})

    return zeros


Key = tuple[str, Boundary]


class GridFitter:
    """Fits the operators of one calibration at many boundaries.

    Args:
        model: The dense model.
        config: Settings.
        calibration: The windows and their massive tokens.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: CompareConfig,
        calibration: Calibration,
        progress: bool = True,
    ) -> None:
        self.model, self.config, self.calibration = model, config, calibration
        self.progress = progress
        self.ids = calibration.windows.ids
        self.size = int(text_config(model.config).hidden_size)

    def fit(self, wanted: Iterable[Key]) -> dict[Key, Ladder]:
        """Fit operators at boundaries, in as few sweeps as the memory for moments allows.

        Raises:
            CalibrationError: If a state is not finite or no token is counted.
        """
        by_boundary: dict[Boundary, list[str]] = {}
        for operator, boundary in sorted(set(wanted)):
            by_boundary.setdefault(boundary, []).append(operator)
        room = self.config.memory("moments_memory")
        found: dict[Key, Ladder] = {}
        group: dict[Boundary, list[str]] = {}
        used = 0
        for boundary, operators in by_boundary.items():
            need = boundary_bytes(operators, self.size)
            if group and used + need > room:
                found |= self._sweep(group)
                group, used = {}, 0
            group[boundary] = operators
            used += need
        return found | (self._sweep(group) if group else {})

    def _sweep(self, group: dict[Boundary, list[str]]) -> dict[Key, Ladder]:
        """Run once up to the last boundary and fit what was collected."""
        batches = batches_of(self.ids, self.config.batch_size)
        accumulators = self._accumulators(group)
        sites = {
            (name, boundary): find_fold_sites(self.model, layer_before(boundary), norms=False).mlp
            for boundary, names in group.items()
            for name in names
            if name in REPLACING
        }
        transforms = {key: self._transform(*key, site) for key, site in sites.items()}
        prefix = prefix_model(self.model, max(boundary.stop for boundary in group))
        layers = decoder_layers(prefix)
        modules = {
            f"{boundary.start - 1}.{site.path}": layers[boundary.start - 1].get_submodule(site.path)
            for (_, boundary), site in sites.items()
        }
        states = {edge for boundary in group for edge in (boundary.start, boundary.stop)}
        bar = progress_bar(batches, f"moments, {self.calibration.name}", self.progress)
        token = 0
        for seen in stream(prefix, bar, states, modules):
            for accumulator in accumulators.values():
                accumulator.update(seen.states, seen.rows)
            held_out = held_out_mask(seen.rows, *self.ids.shape)
            for (_, boundary), moments in transforms.items():
                x, path = seen.states[boundary.start], moments.site.path
                y = seen.states[boundary.stop].to(x.device)
                inputs = {path: seen.inputs[f"{boundary.start - 1}.{path}"]}
                moments.add(BoundaryBatch(x, y, inputs, seen.rows, held_out, token))
            token += len(seen.rows.window)
        found = self._fit_robust(accumulators.pop("robust", None), group)
        for kind, accumulator in accumulators.items():
            found |= self._fit_plain(kind, accumulator, group)
        return found | {key: _lean(moments.fit(), key[0]) for key, moments in transforms.items()}

    def _accumulators(self, group: dict[Boundary, list[str]]) -> dict[str, MomentAccumulator]:
        """Return an accumulator for each kind of moments that is asked for."""
        names = sorted({name for names in group.values() for name in names})
        settings = self._settings(NO_OPERATOR)
        auto = settings.moments_device == "auto"
        shared: dict[str, Any] = {
            "num_windows": self.ids.shape[0],
            "window": self.ids.shape[1],
            "device": None if auto else moments_device(self.model, settings),
        }
        kinds: dict[str, dict[str, Any]] = {
            "second": {"zeros": grid_zeros(names)},
            "norm": {"zeros": moments_of_operator(*NORMALISED, self.model.config)},
            "robust": {"massive": self.calibration.massive},
        }
        found = {}
        for kind, own in kinds.items():
            places = [b for b, asked in group.items() if kind in map(family, asked)]
            if places:
                found[kind] = MomentAccumulator(places, **own, **shared)
        return found

    def _transform(self, operator: str, boundary: Boundary, site: FoldSite) -> TransformMoments:
        runs = BoundaryRuns(self.model, boundary, self.ids, self.config.batch_size)
        return TransformMoments(runs, site, self._settings(operator))

    def _fit_plain(
        self, kind: str, accumulator: MomentAccumulator, group: dict[Boundary, list[str]]
    ) -> dict[Key, Ladder]:
        found: dict[Key, Ladder] = {}
        moments = accumulator.result()
        for boundary in list(moments):
            split = moments.pop(boundary)
            for name in group[boundary]:
                own = split
                if family(name) != kind:
                    continue
                if kind == "second":
                    own = SplitMoments(boundary, split.fit.of(name), split.held_out.of(name))
                found[name, boundary] = self._fitted(own, name)
        return found

    def _fit_robust(
        self, accumulator: MomentAccumulator | None, group: dict[Boundary, list[str]]
    ) -> dict[Key, Ladder]:
        if accumulator is None:
            return {}
        moments = accumulator.result()
        ids, sample = rule_sample(self.ids, self.calibration.massive, RULE_WINDOWS)
        batches = batches_of(ids, self.config.batch_size)
        rules = fit_sink_rules(self.model, batches, moments, sample, progress=self.progress)
        return {
            (name, boundary): self._fitted(split, name, rules.get(boundary))
            for boundary, split in moments.items()
            for name in group[boundary]
            if family(name) == "robust"
        }

    def _fitted(self, moments: SplitMoments[Any], operator: str, sinks: Any = None) -> Ladder:
        settings = self._settings(operator)
        ladder = fit_ladder(
            moments,
            operator=operator,
            ridge=settings.ridge,
            dtype=self.model.dtype,
            sinks=sinks,
            rank=settings.rank,
        )
        return _lean(ladder, operator)

    def _settings(self, operator: str) -> Any:
        return self.config.prune_config(
            num_remove=1, recover=operator, num_windows=self.calibration.num_windows
        )


def _lean(ladder: Sequence[OperatorFit], operator: str) -> Ladder:
    """Drop what only the guard reads where there is none."""
    if operator in GUARDED:
        return tuple(ladder)
    return tuple(replace(fit, fit_part={}, weights_part={}) for fit in ladder)


__all__ = ["GridFitter", "boundary_bytes", "is_shared"]
