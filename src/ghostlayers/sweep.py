"""One forward pass of the model's own base model, hooks on the wanted states, many accumulators.

The head is not run, no activation outlives its batch, and padding is never counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from . import distributed
from .accumulators import Accumulator as Accumulator
from .accumulators import SharedAccumulator
from .decoder import base_model, decoder_layers, input_device, text_config
from .errors import CalibrationError, UnsupportedModelError
from .shared_parts import Parts
from .shared_sweep import SweepPart, model_key, run_sweep
from .token_batches import Batch as Batch
from .token_batches import TokenRows as TokenRows
from .token_batches import batches_of as batches_of
from .token_batches import counted_batches
from .token_batches import split_batch as split_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_state(output: Any) -> Tensor:
    """Take the (B, T, C) hidden state out of what a decoder layer returned."""
    state = output[0] if isinstance(output, list | tuple) else output
    if not isinstance(state, Tensor):
        raise CalibrationError(
            f"a decoder layer returned {type(state).__name__}; a tensor was expected."
        )
    return state


@contextmanager
def capture(
    layers: nn.ModuleList, states: Iterable[int], keep: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call `keep(l, hidden state l)` during each forward pass for the wanted states.

    State l < L is what enters layer l; state L is the raw output of the last layer.
    """
    handles = []

    def before(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(index, args[0] if args else kwargs["hidden_states"])

        return hook

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        keep(len(layers), hidden_state(output))

    try:
        for index in sorted(set(states)):
            if index < len(layers):
                handles.append(
                    layers[index].register_forward_pre_hook(before(index), with_kwargs=True)
                )
            else:
                handles.append(layers[-1].register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Captured:
    """What one batch left behind.

    Attributes:
        states: (N, C) counted tokens by index of the hidden state.
        inputs: (N, K) what entered a watched module, by its name.
        rows: Where the tokens stand.
        batches: How many batches there are up to this one, those without counted tokens included.
    """

    states: dict[int, Tensor]
    inputs: dict[str, Tensor]
    rows: TokenRows
    batches: int


@contextmanager
def _watch(modules: Mapping[str, nn.Module], keep: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `keep(name, input)` during each forward pass for every module."""
    handles = []

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, args: keep(name, args[0])

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def stream(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    states: Iterable[int],
    modules: Mapping[str, nn.Module] | None = None,
    *,
    part: SweepPart | None = None,
) -> Iterator[Captured]:
    """Run the base model batch by batch and yield what the counted tokens look like.

    Args:
        model: A causal LM. It is in evaluation mode during each pass; its weights are not touched.
        batches: (B, T) int64 token ids, or mappings with `input_ids` and `attention_mask`.
        states: Indices of the hidden states to capture.
        modules: Modules of the model whose input to capture, by any name.
        part: Where the batches stand in a sweep of which they are a part.

    Yields:
        One `Captured` per batch; tensors are float32 (float64 if they were). It is emptied when
        the next one is asked for.

    Raises:
        CalibrationError: If a captured state is not finite; the layer and the dtype are named.
        UnsupportedModelError: If there is not one (B, T, C) state per layer and forward pass.
    """
    from .layerwise import runs_layerwise
    from .layerwise_runs import stream_layerwise

    if runs_layerwise(model):
        yield from stream_layerwise(model, batches, states, modules, part=part)
        return
    base, layers, wanted = base_model(model), decoder_layers(model), sorted(set(states))
    captured: dict[int, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    flat, shape = torch.empty(0, dtype=torch.long), (0, 0, 0)

    def keep(index: int, state: Tensor) -> None:
        if index in captured or tuple(state.shape) != shape:
            raise UnsupportedModelError(_not_one_stream(model, index, state, index in captured))
        rows = state.detach().flatten(0, -2)[flat.to(state.device)]  # (N, C), a copy
        check_finite(index, rows)
        captured[index] = wide(rows)

    def keep_input(name: str, value: Tensor) -> None:
        inputs[name] = wide(value.detach().flatten(0, -2)[flat.to(value.device)])

    size = text_config(model.config).hidden_size
    window, idle = (0, False) if part is None else (part.first_window, part.idle)
    for batch in counted_batches(model, batches, window, idle=idle):
        flat, shape = batch.flat, (*batch.ids.shape, size)
        arguments = base_arguments(model, batch.ids, batch.mask)
        captured, inputs, training = {}, {}, model.training
        model.eval()
        try:
            with torch.no_grad(), capture(layers, wanted, keep), _watch(modules or {}, keep_input):
                base(**arguments, use_cache=False)
        finally:
            model.train(training)
        yield Captured(captured, inputs, batch.rows, batch.number)
        captured.clear()  # the consumer may hold on to it during the next pass
        inputs.clear()


def base_arguments(model: PreTrainedModel, ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Return what the base model is called with, on its device."""
    ids = ids.to(input_device(model))
    arguments = {"input_ids": ids}
    if mask is not None:
        arguments["attention_mask"] = mask.to(ids.device)
        if "position_ids" in inspect.signature(base_model(model).forward).parameters:
            # learned positions count from the first real token
            positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
            arguments["position_ids"] = positions.to(ids.device)
    return arguments


def progress_bar(batches: Iterable[Batch], description: str, progress: bool) -> Iterable[Batch]:
    """Show a progress bar over batches when standard error is a terminal."""
    bar: Iterable[Batch] = tqdm(
        batches, desc=description, disable=None if progress else True, unit="batch"
    )
    return bar


def sweep(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    accumulators: Sequence[Accumulator],
    *,
    description: str = "sweep",
    progress: bool = True,
) -> None:
    """Run the base model over all batches and feed the accumulators.

    Args:
        model: A causal LM; see `stream`.
        batches: (B, T) int64 token ids, or mappings with `input_ids` and `attention_mask`.
        accumulators: Each names the states it wants; a state is captured once for all.
        description: Label of the progress bar.
        progress: Show a progress bar when standard error is a terminal.

    Raises:
        CalibrationError: If a captured state is not finite; the layer and the dtype are named.
    """
    wanted = {state for accumulator in accumulators for state in accumulator.states}
    shared = [each for each in accumulators if isinstance(each, SharedAccumulator)]
    if len(shared) < len(accumulators):
        if distributed.size() > 1:
            raise CalibrationError(
                "an accumulator without `parts`, `key` and `begin` reads a sweep of several "
                "processes. Add them, or run one process."
            )
        for seen in stream(model, progress_bar(batches, description, progress), wanted):
            for accumulator in accumulators:
                accumulator.update(seen.states, seen.rows)
        return
    parts = Parts()
    for number, accumulator in enumerate(shared):
        parts.add(f"{number}", accumulator.parts)

    def passes(batches: Iterable[Batch], part: SweepPart) -> Iterator[int]:
        for seen in stream(model, batches, wanted, part=part):
            for accumulator in accumulators:
                accumulator.update(seen.states, seen.rows)
            yield seen.batches

    def begin(token: int) -> None:
        for accumulator in shared:
            accumulator.begin(token)

    run_sweep(
        batches,
        parts,
        passes,
        bar=lambda items: progress_bar(items, description, progress),
        begin=begin,
        key=lambda: {
            "sweep": description,
            "accumulators": [accumulator.key for accumulator in shared],
            **model_key(model),
        },
    )


def _not_one_stream(model: PreTrainedModel, index: int, state: Tensor, repeated: bool) -> str:
    found = "runs more than once per forward pass" if repeated else f"is {tuple(state.shape)}"
    return (
        f"{type(model).__name__} (model_type {model.config.model_type!r}): hidden state {index} "
        f"{found}; one (batch, positions, channels) state per layer is needed to measure it. Name "
        "the layers (`layers`) and use `recover` none."
    )


def wide(rows: Tensor) -> Tensor:
    """Return float64 rows as they are, others in float32."""
    return rows if rows.dtype == torch.float64 else rows.float()


def check_finite(index: int, state: Tensor) -> None:
    """Check a hidden state for nan and infinity.

    Raises:
        CalibrationError: Naming the layer that the state leaves, and its dtype.
    """
    where = f"what leaves layer {index - 1}" if index else "the token embeddings"
    require_finite(state, f"hidden state {index} ({where})")


def require_finite(values: Tensor, what: str) -> None:
    """Check for nan and infinity what a model computed.

    Raises:
        CalibrationError: Naming it and its dtype.
    """
    if torch.isfinite(values).all():
        return
    name = str(values.dtype).removeprefix("torch.")
    advice = "use float32 or bfloat16" if values.dtype == torch.float16 else "check the weights"
    raise CalibrationError(f"{what} is not finite in {name}: {advice}.")
