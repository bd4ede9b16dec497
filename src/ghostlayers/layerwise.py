"""Run a model layer by layer over many micro-batches, so that each layer's weights are read once.

For every layer and micro-batch the model's own forward is called, in which this layer alone runs:
it reads its micro-batch's state from a store, the other layers hand on what they get. Masks,
positions, rotary embeddings and every keyword of the layer thus come from the model. What enters
the next layer goes into the store. An architecture whose layers hand on more than one hidden state
is recognised by a comparison on a few tokens and runs batch by batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .decoder import base_model, decoder_layers, input_device, input_embeddings, text_config
from .errors import UnsupportedModelError
from .model_checks import LOW_PRECISION, evaluating
from .offload import is_offloaded, loaded, replaced_forwards
from .spill import StateStore
from .sweep import capture, hidden_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Call = Mapping[str, Tensor]
PROBE_TOKENS = 12
EMBEDDINGS = "embeddings"
VERDICT = "_ghostlayers_layerwise"
# What a layer raises that misses something which another layer hands on.
PROBE_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)


class _Skipping:
    """Lets one decoder layer at a time run inside the model's own forward.

    Attributes:
        index: The layer that runs; L: none.
        state: (B, T, C) what enters it, or of L what leaves the last layer; None takes what the
            model hands on.
        entered: What entered it, if `state` is None.
        left: What entered the layer behind it, or left the last layer.
        calls: How often it was called.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        self.rest: tuple[type, list[Any]] | None = None
        self.begin(0, None)

    def begin(self, index: int, state: Tensor | None) -> None:
        """Prepare for one forward of the model."""
        self.index, self.state, self.calls = index, state, 0
        self.entered: Tensor | None = None
        self.left: Tensor | None = None

    def routes(self) -> dict[nn.Module, Callable[..., Any]]:
        """Return the forward of every layer that does this."""
        return {
            layer: partial(self._forward, number, layer.forward)
            for number, layer in enumerate(self.layers)
        }

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given: Tensor = args[0] if args else kwargs["hidden_states"]
        last = len(self.layers) - 1
        if number == self.index + 1:
            self.left = given
        fed = number == self.index or number == last < self.index
        if fed and self.state is not None:
            given = self.state.to(given.device)
        if number != self.index:
            return self._like_a_layer(given)
        self.calls += 1
        if self.state is None:
            self.entered = given.detach().clone()  # a layer may write into its input
        if args:
            output = forward(given, *args[1:], **kwargs)
        else:
            output = forward(**{**kwargs, "hidden_states": given})
        self.rest = None
        if isinstance(output, list | tuple):
            rest = [None if isinstance(part, Tensor) else part for part in output[1:]]
            self.rest = type(output), rest
        if number == last:
            self.left = hidden_state(output)
        return output

    def _like_a_layer(self, state: Tensor) -> Any:
        """Return a state the way the layer that ran last returned its own."""
        return state if self.rest is None else self.rest[0]([state, *self.rest[1]])


class LayerPass:
    """One pass of a model over micro-batches, layer by layer; used as a context manager.

    Args:
        model: A causal LM; its weights may be offloaded.
        calls: Arguments of the base model, one mapping per micro-batch.
        store: Keeps the states in flight.
        entering: (B, T, C) states that enter the first layer, by micro-batch, instead of what the
            model makes of the ids.
        keep: Hidden states that stay in the store.
        description: Label of the progress bar.
        progress: Show it when standard error is a terminal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calls: Sequence[Call],
        store: StateStore,
        *,
        entering: Sequence[Tensor] | None = None,
        keep: Collection[int] = (),
        description: str = "layers",
        progress: bool = True,
    ) -> None:
        self.model, self.calls, self.store = model, calls, store
        self.entering, self.keep = entering, set(keep)
        self.description, self.progress = description, progress
        self.base, self.layers = base_model(model), decoder_layers(model)
        self.embedding: nn.Module = model.get_input_embeddings()
        self.number = 0
        self._skipping = _Skipping(self.layers)
        self._stack = ExitStack()

    def __enter__(self) -> LayerPass:
        routes = self._skipping.routes()
        if is_offloaded(self.embedding):
            routes[self.embedding] = partial(self._embed, self.embedding.forward)
        self._stack.enter_context(evaluating(self.model))
        self._stack.enter_context(replaced_forwards(routes))
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def _embed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings of a micro-batch up once: their weights are read once, too."""
        if self._skipping.index == 0:
            found = forward(*args, **kwargs)
            self.store.put(EMBEDDINGS, self.number, found)
            return found
        return self.store.get(EMBEDDINGS, self.number).to(input_device(self.model))

    def run(self, last: int) -> None:
        """Run the layers below hidden state `last`; it and the states to keep are then stored.

        Raises:
            UnsupportedModelError: If a layer does not run once per forward pass, or its state is
                not (B, T, C).
        """
        numbers = range(max(last, 1) if self.calls else 0)
        bar = tqdm(numbers, self.description, disable=None if self.progress else True, unit="layer")
        for index in bar:
            first = [self.embedding] if index == 0 else []
            with loaded(self.layers[index], *first):
                for number in range(len(self.calls)):
                    self._step(index, number)

    def _step(self, index: int, number: int) -> None:
        skipping = self._skipping
        if index:
            state: Tensor | None = self.store.get(str(index), number)
        else:
            state = None if self.entering is None else self.entering[number].clone()
        if index == 0 and state is not None and 0 in self.keep:
            self.store.put("0", number, state)
        left = self.step(index, number, state)
        if index == 0 and state is None and 0 in self.keep:
            assert skipping.entered is not None
            self.store.put("0", number, skipping.entered)
        self.store.put(str(index + 1), number, left)
        if index not in self.keep:
            self.store.drop(str(index), number)
        skipping.begin(index, None)

    def step(self, index: int, number: int, state: Tensor | None) -> Tensor:
        """Run one layer on one micro-batch; return what enters the next, (B, T, C).

        Args:
            index: The layer.
            number: The micro-batch.
            state: (B, T, C) what enters the layer; None takes what the model makes of the ids.
        """
        self.number = number
        self._skipping.begin(index, state)
        self.base(**self.calls[number], use_cache=False)
        self._check(index)
        left = self._skipping.left
        assert left is not None
        return left

    def _check(self, index: int) -> None:
        ids, left = self.calls[self.number]["input_ids"], self._skipping.left
        shape = (*ids.shape, text_config(self.model.config).hidden_size)
        found = None if left is None else tuple(left.shape)
        if self._skipping.calls != 1 or found != shape:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} (model_type {self.model.config.model_type!r}): "
                f"layer {index} ran {self._skipping.calls} times in a forward pass, its state is "
                f"{found}; once and {shape} are needed to measure it."
            )

    def logits(self) -> Iterator[Tensor]:
        """Run what stands behind the layers, after `run(L)`; yields (B, T, V) by micro-batch."""
        for number, state in enumerate(self.head_states()):
            yield self.head(number, state)

    def head_states(self) -> Iterator[Tensor]:
        """Yield what left the last layer; the head is in memory as long as this runs."""
        depth = len(self.layers)
        with loaded(*self._outside()):
            for number in range(len(self.calls)):
                yield self.store.get(str(depth), number)

    def head(self, number: int, state: Tensor) -> Tensor:
        """Return (B, T, V) logits of a micro-batch from what left the last layer."""
        self.number = number
        self._skipping.begin(len(self.layers), state)
        logits: Tensor = self.model(**self.calls[number], use_cache=False).logits
        return logits

    def _outside(self) -> list[nn.Module]:
        """List the modules that hold no decoder layer and are not the input embeddings."""
        inside = set(self.layers.modules())
        return [
            module
            for module in self.model.modules()
            if module is not self.embedding and not any(part in inside for part in module.modules())
        ]


def runs_layerwise(model: PreTrainedModel) -> bool:
    """Whether a model's sweeps go layer by layer: weights are offloaded, and the layers allow it.

    The answer is found once, by two short forward passes, and goes with copies of the model. Where
    layers hand on more than one hidden state, a warning says that sweeps go batch by batch.
    """
    if not is_offloaded(model) or not is_offloaded(decoder_layers(model)):
        return False
    if VERDICT not in vars(model):
        reason = _why_not(model)
        if reason:
            warnings.warn(
                f"{type(model).__name__} (model_type {model.config.model_type!r}): {reason}: every "
                "sweep reads the offloaded weights once per batch. A larger `batch_size` helps.",
                stacklevel=2,
            )
        setattr(model, VERDICT, not reason)
    return bool(vars(model)[VERDICT])


def _why_not(model: PreTrainedModel) -> str:
    """Compare every hidden state of a few tokens with those of a whole forward pass."""
    layers, vocabulary = decoder_layers(model), len(input_embeddings(model))
    ids = torch.arange(5, 5 + 2 * PROBE_TOKENS, device=input_device(model)) % vocabulary
    ids = ids.view(2, PROBE_TOKENS)  # two micro-batches: one must not see what the other left
    calls = [{"input_ids": part} for part in ids.split(1)]
    states, wanted = range(len(layers) + 1), dict[int, Tensor]()

    def keep(index: int, state: Tensor) -> None:
        wanted[index] = state.detach().to("cpu", torch.float32, copy=True)

    with evaluating(model), capture(layers, states, keep):
        base_model(model)(input_ids=ids, use_cache=False)
    near = 5e-2 if model.dtype in LOW_PRECISION else 1e-3
    try:
        with (
            StateStore() as store,
            LayerPass(model, calls, store, keep=states, progress=False) as layer_pass,
        ):
            layer_pass.run(len(layers))
            found = {
                state: torch.cat([store.get(str(state), number).float() for number in range(2)])
                for state in states
            }
    except PROBE_ERRORS as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return f"its layers cannot run one by one ({type(error).__name__}: {reason})"
    except UnsupportedModelError as error:
        return str(error).rstrip(".")
    for state in states:
        size = float(wanted[state].std())
        if float((found[state] - wanted[state]).abs().max()) > near * size:
            return f"what enters layer {state} depends on more than the hidden state before it"
    return ""
