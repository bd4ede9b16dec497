"""Score cuts cheaply: run only the layers behind the first removed one.

Every cut leaves the layers below its first boundary as they were, so their output is that of the
dense model. It is kept once per window and put in front of the first layer that still runs. The
model's own forward does the rest: masks, positions, operators, norm and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from tqdm.auto import tqdm

from . import distributed
from .decoder import base_model, decoder_layers, input_device, remove_layers_, share_tensors
from .errors import UnsupportedModelError
from .evaluation import local_losses
from .layerwise import PROBE_ERRORS, runs_layerwise
from .layerwise_runs import losses_layerwise, states_layerwise
from .model_checks import LOW_PRECISION, evaluating
from .operators import OperatorFit
from .plan import Boundary, PruningPlan
from .steps import attach_operators_, prefix_model
from .sweep import batches_of, capture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Before a suffix is used, its logits on this many tokens are compared with the whole model's.
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Suffix:
    """A pruned model of which only the last layers run.

    Attributes:
        model: The model; it shares its tensors with the one it was made from.
        plan: What it lacks of the dense model: the layers below `start` count as removed.
        start: The dense hidden state that enters its first layer; None if the model is whole.
    """

    model: PreTrainedModel
    plan: PruningPlan
    start: int | None

    def with_operators(self, fits: Mapping[Boundary, OperatorFit]) -> Suffix:
        """Return a suffix with operators; this one is left as it is.

        Args:
            fits: By boundary of the pruned model's plan; those of any subset of its boundaries.
        """
        if not fits:
            return self
        model = attach_operators_(share_tensors(self.model), self.plan, fits)
        return replace(self, model=model)


def first_state(plan: PruningPlan) -> int:
    """Return the first hidden state from which a pruned model differs from the dense one.

    It is the start of the first boundary; if that boundary ends the model, what enters the last
    kept layer, so that one layer remains to run.
    """
    start = plan.boundaries[0].start if plan.removed else plan.num_layers
    return start if plan.kept[-1] >= start else plan.kept[-1]


@contextmanager
def fed(layer: nn.Module, state: Tensor) -> Iterator[None]:
    """Let a layer, or the head, read a given (B, T, C) state instead of what the model hands it."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        new = state.to(given.device, copy=True)  # a layer may write into its input
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class SuffixScorer:
    """Losses of pruned and repaired models on fixed windows, without running the lower layers.

    Where an architecture refuses to lose its lower layers, or its layers hand on more than one
    hidden state, the whole pruned model runs: the same numbers for more work.

    Args:
        model: The dense model.
        ids: (n, T) int64 windows, without padding.
        batch_size: Windows per forward pass.
        description: Label of the progress bars.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        *,
        batch_size: int = 1,
        description: str = "scoring",
        progress: bool = True,
    ) -> None:
        self.model = model
        self.ids = ids
        self.own = distributed.own_windows(len(ids), batch_size)
        self.batch_size = batch_size
        self.description = description
        self.progress = progress
        # By index, one (B, T, C) tensor for each of this process' batches, on the CPU in the
        # model's dtype; None: unusable.
        self.states: dict[int, list[Tensor] | None] = {}
        self._dense: list[float] | None = None

    def dense_losses(self, states: Iterable[int] = ()) -> list[float]:
        """Mean cross-entropy of the dense model on each window, in nats.

        Args:
            states: Hidden states to keep in the same forward pass.
        """
        states = {state for state in states if state > 0}
        if self._dense is not None:
            self.keep(states)
            return self._dense
        found: dict[int, list[Tensor]] = {state: [] for state in states}
        with distributed.section():
            if runs_layerwise(self.model):
                losses, found = losses_layerwise(
                    self.model,
                    self.ids[self.own],
                    batch_size=self.batch_size,
                    keep=states,
                    description=self.description,
                    progress=self.progress,
                )
            else:
                with _copying(self.model, found):
                    losses = local_losses(
                        self.model,
                        self.ids[self.own],
                        batch_size=self.batch_size,
                        description=self.description,
                        progress=self.progress,
                    )
        self._store(found)
        self._dense = distributed.gather(losses)
        return self._dense

    def keep(self, states: Iterable[int]) -> None:
        """Keep dense hidden states that are not kept yet, in one forward pass up to the last.

        Each takes n · T · C numbers of the model's dtype in main memory.
        """
        missing = {state for state in states if state not in self.states and state > 0}
        if not missing:
            return
        prefix = prefix_model(self.model, max(missing))
        found: dict[int, list[Tensor]] = {state: [] for state in missing}
        with distributed.section():
            if runs_layerwise(prefix):
                own, size = self.ids[self.own], self.batch_size
                found = states_layerwise(prefix, own, missing, batch_size=size)
            else:
                base, device = base_model(prefix), input_device(prefix)
                with evaluating(prefix), _copying(prefix, found):
                    for part in self.batches():
                        base(input_ids=part.to(device), use_cache=False)
        self._store(found)

    def batches(self, values: Tensor | None = None) -> list[Tensor]:
        """Return this process' batches of the windows, or of other (n, T) values."""
        values = self.ids if values is None else values
        return batches_of(values[self.own], self.batch_size)

    @contextmanager
    def keeping(self, model: PreTrainedModel, states: Iterable[int]) -> Iterator[None]:
        """Keep dense hidden states of the forward passes over `batches()`."""
        found: dict[int, list[Tensor]] = {state: [] for state in states if state > 0}
        with _copying(model, found):
            yield
        self._store(found)

    def _store(self, found: Mapping[int, list[Tensor]]) -> None:
        """Keep what was captured, where it is one (B, T, C) state per batch on every process."""
        expected = [tuple(batch.shape) for batch in self.batches()]
        for index in sorted(found):
            parts = found[index]
            usable = [tuple(part.shape[:2]) for part in parts] == expected
            self.states[index] = parts if distributed.everyone(usable) else None

    def suffix(
        self, pruned: PreTrainedModel, plan: PruningPlan, start: int | None = None
    ) -> Suffix:
        """Cut the layers below the first boundary off a pruned model.

        Args:
            pruned: The pruned model without operators; it is left as it is.
            plan: The plan by which it was pruned.
            start: First layer of the dense model that must run; None is `first_state(plan)`.

        Returns:
            The suffix; the whole pruned model where that is the only way.
        """
        start = first_state(plan) if start is None else start
        whole = Suffix(pruned, plan, None)
        self.keep([start])
        parts = self.states.get(start)
        if parts is None:
            return whole
        below = range(sum(layer < start for layer in plan.kept))
        try:
            model = remove_layers_(share_tensors(pruned), below)
        except UnsupportedModelError:
            return whole
        lower = {layer for layer in plan.kept if layer < start}
        lacking = PruningPlan(plan.num_layers, (*plan.removed, *lower))
        suffix = Suffix(model, lacking, start)
        with distributed.section():
            agrees = not parts or self._agrees(pruned, model, parts[0])
        return suffix if distributed.everyone(agrees) else whole

    def _agrees(self, pruned: PreTrainedModel, model: PreTrainedModel, state: Tensor) -> bool:
        """Compare a suffix with its whole model on a few tokens: layers may share more states."""
        ids = self.ids[self.own][:1, :PROBE_TOKENS].to(input_device(pruned))
        with evaluating(pruned):
            wanted = pruned(input_ids=ids, use_cache=False).logits.float()
        feeding = fed(decoder_layers(model)[0], state[:1, :PROBE_TOKENS])
        try:
            with evaluating(model), feeding:
                found = model(input_ids=ids, use_cache=False).logits.float()
        except PROBE_ERRORS:
            return False  # a layer that needs what a lower one hands on
        tolerance = (0.5 if pruned.dtype in LOW_PRECISION else 0.01) * float(wanted.std())
        return bool((found - wanted).abs().max() <= tolerance)

    def losses(self, suffix: Suffix, targets: Tensor | None = None) -> list[float]:
        """Mean cross-entropy of a pruned model on each window, in nats; it may not be finite.

        Args:
            suffix: The model.
            targets: (n, T), see `window_losses`.
        """
        states: Sequence[Tensor] | None = None
        if suffix.start is not None:
            states = self.states[suffix.start]
        with distributed.section():
            own = self._own_losses(suffix.model, targets, states)
        return distributed.gather(own)

    def _own_losses(
        self, model: PreTrainedModel, targets: Tensor | None, states: Sequence[Tensor] | None
    ) -> list[float]:
        """Return the losses of this process' windows."""
        if states is None or runs_layerwise(model):
            own, more = self.ids[self.own], None if targets is None else targets[self.own]
            shared: dict[str, Any] = {"batch_size": self.batch_size, "targets": more}
            shared |= {"description": self.description, "progress": self.progress}
            if states is None:
                return local_losses(model, own, **shared)
            return losses_layerwise(model, own, entering=states, **shared)[0]
        first, losses = decoder_layers(model)[0], list[float]()
        bar = tqdm(self.batches(), self.description, disable=None if self.progress else True)
        for part, target, state in zip(bar, self.batches(targets), states, strict=True):
            with fed(first, state):
                losses += local_losses(
                    model, part, batch_size=self.batch_size, targets=target, progress=False
                )
        return losses


@contextmanager
def _copying(model: PreTrainedModel, found: Mapping[int, list[Tensor]]) -> Iterator[None]:
    """Append a copy of the wanted hidden states of each forward pass, on the CPU."""

    def keep(index: int, state: Tensor) -> None:
        found[index].append(state.detach().to("cpu", copy=True))

    with capture(decoder_layers(model), found, keep):
        yield
