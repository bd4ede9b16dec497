"""Run the dense model and a student side by side up to one boundary, batch by batch.

The dense model gives the target states. The student, whose layers before the boundary may be
repaired or changed, gives the states that really arrive there. Only prefixes are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .changed_weights import change_weights_, layers_prefix
from .decoder import decoder_layers, share_tensors
from .moments import MomentAccumulator, held_out_mask
from .operators import OperatorFit
from .plan import Boundary, PruningPlan
from .repairs import apply_repairs_
from .shared_parts import Parts
from .shared_sweep import SweepPart, model_key, run_sweep
from .steps import fit_sink_rules, prefix_model
from .sweep import Batch, Captured, TokenRows, batches_of, progress_bar, stream
from .token_classes import SinkRule, rule_sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .moments import RobustMoments, SplitMoments

# The thresholds that tell massive tokens from others are placed on about this many windows.
RULE_WINDOWS = 16


@dataclass(frozen=True)
class Student:
    """A model whose layer `layer` stands before the cut; what leaves it enters the boundary."""

    model: PreTrainedModel
    layer: int


@dataclass(frozen=True)
class BoundaryBatch:
    """One batch at a boundary.

    Attributes:
        x: (N, C) states that enter it, from the student.
        y: (N, C) states that should leave it, from the dense model.
        inputs: (N, K) what enters maps of the layer before it, by the map's path in the layer.
        rows: Where the tokens stand.
        held_out: (N,) bool.
        token: Number of counted tokens before the first of them.
    """

    x: Tensor
    y: Tensor
    inputs: dict[str, Tensor]
    rows: TokenRows
    held_out: Tensor
    token: int


def repaired_student(
    pruned: PreTrainedModel,
    plan: PruningPlan,
    boundary: Boundary,
    fits: Mapping[Boundary, OperatorFit],
) -> Student:
    """Build the pruned model up to a boundary with the repairs of those before it."""
    layer = plan.kept.index(boundary.start - 1)
    model = prefix_model(pruned, layer + 1)
    model = share_tensors(model) if model is pruned else model
    apply_repairs_(model, plan, fits)
    return Student(model, layer)


@dataclass(frozen=True)
class BoundaryRuns:
    """Runs up to one boundary.

    Attributes:
        dense: The dense model.
        boundary: The boundary.
        ids: (n, T) calibration windows.
        batch_size: Windows per forward pass.
        student: The repaired prefix; None takes the states of the dense model itself.
        progress: Show progress bars when standard error is a terminal.
    """

    dense: PreTrainedModel
    boundary: Boundary
    ids: Tensor
    batch_size: int = 1
    student: Student | None = None
    progress: bool = field(default=True)

    def changed(self, weights: Mapping[str, Tensor]) -> Student:
        """Return the student with changed weights (by path) in the layer before the cut."""
        if self.student is None:
            start = self.boundary.start
            base = Student(prefix_model(self.dense, max(start, 1)), start - 1)
        else:
            base = self.student
        if not weights:
            return base
        model = share_tensors(base.model)
        prefix = layers_prefix(model)
        change_weights_(model, {f"{prefix}{base.layer}.{p}": w for p, w in weights.items()})
        return Student(model, base.layer)

    def run(
        self,
        consume: Callable[[BoundaryBatch], None],
        paths: Sequence[str] = (),
        weights: Mapping[str, Tensor] | None = None,
        *,
        parts: Parts | None = None,
        key: Mapping[str, Any] | None = None,
        targets: bool = True,
    ) -> None:
        """Hand over what arrives at the boundary, batch by batch; nothing is kept.

        The processes of a session share the batches, and each gets the sums of all.

        Args:
            consume: Called with every batch of this process.
            paths: Maps of the layer before the cut whose input to capture.
            weights: Changed weights of that layer, by path.
            parts: What is added up; needed where processes share the batches.
            key: JSON values that say what it is.
            targets: Whether y is wanted; without it, y is x and the removed layers do not run.
        """
        teacher = prefix_model(self.dense, self.boundary.stop) if targets else None
        student = None
        if self.student is not None or weights or not targets:
            student = self.changed(weights or {})

        def passes(batches: Iterable[Batch], part: SweepPart) -> Iterator[int]:
            token = part.first_token
            for done, batch in self._passes(teacher, student, paths, batches, part):
                consume(replace(batch, token=token))
                token += len(batch.rows.window)
                del batch  # no state outlives its batch
                yield done

        models = [] if teacher is None else [teacher]
        models += [] if student is None else [student.model]
        run_sweep(
            batches_of(self.ids, self.batch_size),
            parts or Parts(),
            passes,
            bar=lambda items: progress_bar(items, f"boundary {self.boundary}", self.progress),
            begin=lambda token: None,
            key=lambda: {
                "boundary": str(self.boundary),
                "maps": list(paths),
                "sums": dict(key or {}),
                **model_key(*models),
            },
        )

    def _passes(
        self,
        teacher: PreTrainedModel | None,
        student: Student | None,
        paths: Sequence[str],
        batches: Iterable[Batch],
        part: SweepPart,
    ) -> Iterator[tuple[int, BoundaryBatch]]:
        """Run the teacher, and the student if there is one; yields how many batches are done."""
        start, stop = self.boundary.start, self.boundary.stop
        if student is None:
            assert teacher is not None
            modules = _maps(teacher, start - 1, paths)
            for seen in stream(teacher, batches, (start, stop), modules, part=part):
                yield seen.batches, self._batch(seen, start, seen, stop)
            return
        modules = _maps(student.model, student.layer, paths)
        state = student.layer + 1
        if teacher is None:
            for seen in stream(student.model, batches, (state,), modules, part=part):
                yield seen.batches, self._batch(seen, state, seen, state)
            return
        pairs = zip(
            stream(teacher, batches, (stop,), part=part),
            stream(student.model, part.batches, (state,), modules, part=part),
            strict=True,
        )
        for target, seen in pairs:
            yield seen.batches, self._batch(seen, state, target, stop)
            for each in (target, seen):  # the teacher's next pass comes before the student's
                each.states.clear()
                each.inputs.clear()

    def _batch(self, seen: Captured, state: int, target: Captured, stop: int) -> BoundaryBatch:
        x = seen.states[state]
        held_out = held_out_mask(seen.rows, *self.ids.shape)
        return BoundaryBatch(
            x, target.states[stop].to(x.device), dict(seen.inputs), seen.rows, held_out, 0
        )

    def split_moments(
        self,
        weights: Mapping[str, Tensor] | None = None,
        *,
        massive: Tensor | None = None,
        device: torch.device | None = None,
        zeros: Callable[..., Any] | None = None,
    ) -> SplitMoments[Any]:
        """Collect the moments of what arrives at the boundary against what should leave it.

        Args:
            weights: Changed weights of the layer before the cut, by path.
            massive: See `MomentAccumulator`, like the rest.
            device: Where to keep the moments.
            zeros: Makes the empty moments.
        """
        boundary = self.boundary
        num_windows, window = self.ids.shape
        accumulator = MomentAccumulator(
            [boundary],
            num_windows=num_windows,
            window=window,
            device=device,
            massive=massive,
            zeros=zeros,
        )

        def add(batch: BoundaryBatch) -> None:
            accumulator.begin(batch.token)
            accumulator.update({boundary.start: batch.x, boundary.stop: batch.y}, batch.rows)

        self.run(add, weights=weights, parts=accumulator.parts, key=accumulator.key)
        return accumulator.result()[boundary]

    def sink_rule(
        self,
        moments: SplitMoments[RobustMoments],
        massive: Tensor,
        weights: Mapping[str, Tensor] | None = None,
    ) -> SinkRule | None:
        """Find the direction that tells massive tokens at this boundary; see `fit_sink_rules`."""
        student = self.changed(weights or {})
        ids, sample = rule_sample(self.ids, massive, RULE_WINDOWS)
        place = Boundary(student.layer + 1, student.layer + 2)
        rules = fit_sink_rules(
            student.model,
            batches_of(ids, self.batch_size),
            {place: moments},
            sample,
            progress=self.progress,
        )
        return rules.get(place)


def _maps(model: PreTrainedModel, layer: int, paths: Sequence[str]) -> dict[str, torch.nn.Module]:
    if not paths:
        return {}
    return {path: decoder_layers(model)[layer].get_submodule(path) for path in paths}
