"""Gradients of offloaded weights, layer by layer: each layer is read once forward, once backward.

The forward pass keeps every hidden state in the store. The backward pass goes from the head down:
a layer is loaded, runs on its stored state with gradients, and turns the gradient of its output
into those of its weights and of its input, which is stored for the layer below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from . import distributed
from .decoder import decoder_layers, input_device
from .layerwise import LayerPass
from .offload import loaded
from .placement import placement_of
from .spill import StateStore
from .sweep import batches_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRADIENT = "gradient"


def salience_layerwise(
    model: PreTrainedModel,
    ids: Tensor,
    layers: Sequence[int],
    weights_of: Callable[[int], Sequence[Tensor]],
    *,
    batch_size: int = 1,
    progress: bool = True,
) -> dict[int, list[Tensor]]:
    """Sum θ·∂loss/∂θ over micro-batches for every weight matrix of layers, reduced to Σ|·|.

    The loss is the mean next-token cross-entropy over all windows. Products are float32, sums
    float64; those of one layer are in memory at a time. The processes of a session share the
    micro-batches, and each gets the sums of all.

    Args:
        model: A causal LM that `runs_layerwise`; gradients and flags are as before afterwards.
        ids: (n, T) int64 windows.
        layers: Layers to score.
        weights_of: Lists the weight matrices of a layer, once it is loaded.
        batch_size: Windows per micro-batch.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Σ|Σ θ·∂loss/∂θ| of each weight matrix, float64 scalars, by layer.
    """
    stack, batches = decoder_layers(model), distributed.share(batches_of(ids, batch_size))
    calls = [{"input_ids": part.to(input_device(model))} for part in batches]
    found: dict[int, list[Tensor]] = {}
    with StateStore(placement_of(model).spill_path) as store:
        states = range(min(layers), len(stack) + 1)
        layer_pass = LayerPass(
            model, calls, store, keep=states, description="taylor", progress=progress
        )
        with layer_pass:
            with distributed.section():
                layer_pass.run(len(stack))
                _from_the_head(layer_pass, batches, ids.shape[0] * (ids.shape[1] - 1))
            for index in range(len(stack) - 1, min(layers) - 1, -1):
                with distributed.section(), loaded(stack[index]):
                    weights = weights_of(index) if index in layers else ()
                    sums = _through_layer(layer_pass, index, weights)
                if index in layers:
                    found[index] = [distributed.sum_(total).abs().sum() for total in sums]
                del sums
    return found


def _from_the_head(layer_pass: LayerPass, batches: Sequence[Tensor], total: int) -> None:
    """Store the gradient of the loss with respect to what leaves the last layer."""
    depth = len(layer_pass.layers)
    for number, leaf in enumerate(layer_pass.head_states()):
        leaf.requires_grad_()
        with torch.enable_grad():
            logits = layer_pass.head(number, leaf.clone())
            predicted = logits[:, :-1].flatten(0, 1).float()
            targets = batches[number][:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(predicted, targets, reduction="sum") / total
        (gradient,) = torch.autograd.grad(loss, [leaf])
        layer_pass.store.put(f"{GRADIENT} {depth}", number, gradient)


def _through_layer(layer_pass: LayerPass, index: int, weights: Sequence[Tensor]) -> list[Tensor]:
    """Turn the stored gradient of a layer's output into that of its input; sum θ·∂loss/∂θ."""
    store = layer_pass.store
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    with _wanting_gradients(weights):
        for number in range(len(layer_pass.calls)):
            leaf = store.get(str(index), number).requires_grad_()
            with torch.enable_grad():
                left = layer_pass.step(index, number, leaf.clone())
            above = store.get(f"{GRADIENT} {index + 1}", number).to(left.device)
            own, *gradients = torch.autograd.grad(left, [leaf, *weights], above, allow_unused=True)
            store.put(f"{GRADIENT} {index}", number, own)
            store.drop(f"{GRADIENT} {index + 1}", number)
            for total, weight, gradient in zip(sums, weights, gradients, strict=True):
                if gradient is not None:
                    total += weight.detach().float() * gradient.float()
    return sums


@contextmanager
def _wanting_gradients(weights: Sequence[Tensor]) -> Iterator[None]:
    """Ask for gradients of weights; their flags come back."""
    before = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight, flag in zip(weights, before, strict=True):
            weight.requires_grad_(flag)
