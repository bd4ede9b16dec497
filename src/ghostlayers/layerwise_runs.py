"""Sweeps and losses of models whose weights are offloaded: `layerwise` in place of whole passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from tqdm.auto import tqdm

from .decoder import decoder_layers, input_device, text_config
from .evaluation import losses_of_logits
from .layerwise import LayerPass
from .placement import placement_of
from .spill import StateStore
from .sweep import Captured, base_arguments, check_finite, wide
from .token_batches import Batch, CountedBatch, batches_of, counted_batches

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from .shared_sweep import SweepPart


def _store(model: PreTrainedModel) -> StateStore:
    return StateStore(placement_of(model).spill_path)


def _groups(
    model: PreTrainedModel, sizes: Sequence[int], per_token: int
) -> Iterator[tuple[int, int]]:
    """Cut micro-batches into runs whose states fit into the store; all of them if it can be.

    Args:
        model: The model.
        sizes: Tokens of each micro-batch.
        per_token: Numbers of the model's dtype to store for each.

    Yields:
        First micro-batch and the one behind the last.
    """
    if not sizes:
        return
    limit, first, total = _store(model).limit, 0, 0
    for number, size in enumerate(sizes):
        need = size * per_token * model.dtype.itemsize
        if number > first and total + need > limit:
            yield first, number
            first, total = number, 0
        total += need
    yield first, len(sizes)


def _depth_of(layers: nn.ModuleList, modules: Mapping[str, nn.Module]) -> int:
    """Return the number of layers that must run for all these modules to be called."""
    wanted, last = set(modules.values()), 0
    for index, layer in enumerate(layers):
        if any(part in wanted for part in layer.modules()):
            last = index + 1
    return last


def stream_layerwise(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    states: Iterable[int],
    modules: Mapping[str, nn.Module] | None = None,
    *,
    part: SweepPart | None = None,
) -> Iterator[Captured]:
    """Do what `sweep.stream` does, with all batches in flight at once.

    The states that are asked for stay in the store until the last layer has run, in the spill
    folder if there is one. If it is too small for all batches, they go in several passes. A sweep
    that is saved goes on behind the last pass.
    """
    wanted, modules = sorted(set(states)), dict(modules or {})
    description, progress = "layers", True
    if isinstance(batches, tqdm):  # a bar over layers takes its place
        description, progress = getattr(batches, "desc", description), not batches.disable
        batches.leave = False
        batches.close()
        batches = batches.iterable
    window, idle = (0, False) if part is None else (part.first_window, part.idle)
    counted = list(counted_batches(model, batches, window, idle=idle))
    hidden = int(text_config(model.config).hidden_size)
    per_token = (len(wanted) + 3) * hidden + sum(map(_width, modules.values()))
    last = max([*wanted, _depth_of(decoder_layers(model), modules)])
    for first, stop in _groups(model, [each.ids.numel() for each in counted], per_token):
        parts = counted[first:stop]
        with _store(model) as store:
            calls = [base_arguments(model, each.ids, each.mask) for each in parts]
            layer_pass = LayerPass(
                model, calls, store, keep=wanted, description=description, progress=progress
            )
            with layer_pass, _watching(modules, layer_pass, parts):
                layer_pass.run(last)
            for number, each in enumerate(parts):
                captured = {
                    state: _rows(store.get(str(state), number).flatten(0, -2)[each.flat], state)
                    for state in wanted
                }
                inputs = {name: wide(store.get(f"input {name}", number)) for name in modules}
                yield Captured(captured, inputs, each.rows, each.number)
                captured.clear()
                inputs.clear()


@contextmanager
def _watching(
    modules: Mapping[str, nn.Module], layer_pass: LayerPass, parts: Sequence[CountedBatch]
) -> Iterator[None]:
    """Put what enters modules into the store, the counted tokens only."""

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            number, value = layer_pass.number, args[0].detach().flatten(0, -2)
            rows = value[parts[number].flat.to(value.device)]
            layer_pass.store.put(f"input {name}", number, rows)

        return module.register_forward_pre_hook(keep)

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(watch(name, module).remove)
        yield


def _width(module: nn.Module) -> int:
    """Bound the number of a map's inputs."""
    return max((max(p.shape) for p in module.parameters()), default=0)


def _rows(rows: Tensor, state: int) -> Tensor:
    check_finite(state, rows)
    return wide(rows)


def losses_layerwise(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    batch_size: int = 1,
    targets: Tensor | None = None,
    entering: Sequence[Tensor] | None = None,
    keep: Collection[int] = (),
    description: str = "perplexity",
    progress: bool = True,
) -> tuple[list[float], dict[int, list[Tensor]]]:
    """Do what `evaluation.window_losses` does, with all batches in flight at once.

    Args:
        model: A causal LM.
        ids: (n, T) windows.
        batch_size: Windows per micro-batch.
        targets: See `window_losses`.
        entering: (B, T, C) states that enter the first layer, by micro-batch; None runs the
            embeddings.
        keep: Hidden states to return.
        description: Label of the progress bar.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Mean cross-entropy of each window, in nats; the states, one tensor per micro-batch.
    """
    batches = batches_of(ids, batch_size)
    wanted = batches_of(ids if targets is None else targets, batch_size)
    losses: list[float] = []
    kept: dict[int, list[Tensor]] = {state: [] for state in keep}
    hidden = int(text_config(model.config).hidden_size)
    sizes = [part.numel() for part in batches]
    for first, stop in _groups(model, sizes, (len(kept) + 3) * hidden):
        calls = [{"input_ids": part.to(input_device(model))} for part in batches[first:stop]]
        with _store(model) as store:
            layer_pass = LayerPass(
                model,
                calls,
                store,
                entering=None if entering is None else entering[first:stop],
                keep=kept,
                description=description,
                progress=progress,
            )
            with layer_pass:
                layer_pass.run(len(decoder_layers(model)))
                for logits, target in zip(layer_pass.logits(), wanted[first:stop], strict=True):
                    losses += losses_of_logits(logits, target)
            for state, parts in kept.items():
                parts += [store.get(str(state), number) for number in range(len(calls))]
    return losses, kept


def states_layerwise(
    model: PreTrainedModel, ids: Tensor, states: Collection[int], *, batch_size: int = 1
) -> dict[int, list[Tensor]]:
    """Return hidden states of (n, T) windows, one (B, T, C) tensor per micro-batch."""
    batches = batches_of(ids, batch_size)
    kept: dict[int, list[Tensor]] = {state: [] for state in states}
    hidden = int(text_config(model.config).hidden_size)
    sizes = [part.numel() for part in batches]
    for first, stop in _groups(model, sizes, (len(kept) + 3) * hidden):
        calls = [{"input_ids": part.to(input_device(model))} for part in batches[first:stop]]
        with _store(model) as store:
            with LayerPass(model, calls, store, keep=kept, progress=False) as layer_pass:
                layer_pass.run(max(states))
            for state, parts in kept.items():
                parts += [store.get(str(state), number) for number in range(len(calls))]
    return kept
