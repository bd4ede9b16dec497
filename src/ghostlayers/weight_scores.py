"""Scores of decoder layers from their weights and gradients (Shortened LLaMA, arXiv 2402.02834).

A layer's weights are its parameters of two or more dimensions, as in the paper: linear maps,
transposed ones and stacked experts. Norm weights and biases are left out (the published code counts
norm weights as well).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from . import distributed
from .decoder import check_ids, decoder_layers, frozen_copy, input_device
from .errors import CalibrationError, UnsupportedModelError
from .layerwise import runs_layerwise
from .layerwise_taylor import salience_layerwise
from .offload import loaded
from .sweep import batches_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# With several batches, sums of as many layers as fit in this are kept in one backward pass.
MAX_SUMS_BYTES = 4 * 2**30


def weight_matrices(model: PreTrainedModel, layer: int) -> list[nn.Parameter]:
    """List a decoder layer's weights, each once.

    Raises:
        UnsupportedModelError: If one is not in memory, or not of a floating-point dtype.
    """
    found = [p for p in decoder_layers(model)[layer].parameters() if p.ndim >= 2]
    for parameter in found:
        if parameter.is_meta or not parameter.is_floating_point():
            what = "offloaded" if parameter.is_meta else f"stored as {parameter.dtype}"
            raise UnsupportedModelError(
                f"weights of layer {layer} are {what}: they cannot be scored. Load the model whole "
                "and unquantized, or use `select` shortened-ppl."
            )
    return found


@torch.no_grad()
def magnitude_scores(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, float]:
    """Sum |θ| over the weights of each layer, in float64 of float32 absolute values.

    Raises:
        UnsupportedModelError: See `weight_matrices`.
        CalibrationError: If a sum is not finite.
    """
    scores = {}
    for layer in layers:
        with loaded(decoder_layers(model)[layer]):
            scores[layer] = math.fsum(_absolute_sum(p) for p in weight_matrices(model, layer))
    return _finite(scores, "the weights")


def taylor_scores(
    model: PreTrainedModel,
    ids: Tensor,
    layers: Sequence[int],
    *,
    batch_size: int = 1,
    max_sums_bytes: int = MAX_SUMS_BYTES,
    progress: bool = True,
) -> dict[int, float]:
    """Sum |Σ_batches θ·∂loss/∂θ| over the weights of each layer.

    The loss is the mean next-token cross-entropy over all windows, so that the batch size changes
    nothing but rounding. Forward and backward run in the model's dtype, products are float32 and
    sums float64. A gradient lives until its product is taken. With one batch no sum over batches is
    kept; with more, one float64 number per weight, for as many layers at a time as fit in
    `max_sums_bytes`; each group of layers costs one forward and backward pass. The processes of a
    session share the batches.

    Args:
        model: The dense model; its parameters, gradients, flags and mode are not touched.
        ids: (n, T) int64 windows.
        layers: Layers to score.
        batch_size: Windows per pass.
        max_sums_bytes: See above.
        progress: Show a progress bar when standard error is a terminal.

    Raises:
        UnsupportedModelError: See `weight_matrices`.
        CalibrationError: If ids are not in the vocabulary, or a score is not finite.
    """
    check_ids(model, ids)
    if any(distributed.gather_each(runs_layerwise(model))):
        weights_of = partial(weight_matrices, model)
        parts = salience_layerwise(
            model, ids, layers, weights_of, batch_size=batch_size, progress=progress
        )
        return _finite({k: math.fsum(map(float, parts[k])) for k in layers}, "the gradients")
    batches = batches_of(ids, batch_size)
    sizes = {k: 8 * sum(p.numel() for p in weight_matrices(model, k)) for k in layers}
    limit = math.inf if len(batches) == 1 else max_sums_bytes
    groups = list(_groups(sizes, limit))
    twin = frozen_copy(model)
    scores: dict[int, float] = {}
    bar = tqdm(total=len(groups) * len(batches), desc="taylor", disable=None if progress else True)
    with bar:
        for group in groups:
            salience = _Salience(twin, group, keep_sums=len(batches) > 1)
            with salience.collecting():
                with distributed.section():
                    for part in distributed.share(batches):
                        _backward(twin, part, total=ids.shape[0] * (ids.shape[1] - 1))
                        bar.update()
                salience.combine()
            scores |= salience.scores()
    return _finite({layer: scores[layer] for layer in layers}, "the gradients")


def _groups(sizes: dict[int, int], limit: float) -> Iterator[list[int]]:
    """Cut layers into groups of at most `limit` bytes, from the top: backward stops below them."""
    group: list[int] = []
    for layer in sorted(sizes, reverse=True):
        if group and sum(sizes[k] for k in group) + sizes[layer] > limit:
            yield group
            group = []
        group.append(layer)
    if group:
        yield group


class _Salience:
    """Takes θ·∂loss/∂θ out of a backward pass as soon as a gradient is there."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], *, keep_sums: bool) -> None:
        self.keep_sums = keep_sums
        self.weights = {layer: weight_matrices(model, layer) for layer in layers}
        self.sums: dict[int, Tensor] = {}
        self.totals: dict[int, float] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Ask for gradients of the weights, and take them."""
        unique = {id(p): p for weights in self.weights.values() for p in weights}
        for parameter in unique.values():
            parameter.requires_grad_(True)
        handles = [p.register_post_accumulate_grad_hook(self._take) for p in unique.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in unique.values():
                parameter.requires_grad_(False)
                parameter.grad = None

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        product = parameter.detach().float() * parameter.grad.float()
        parameter.grad = None
        if not self.keep_sums:
            self.totals[id(parameter)] = _absolute_sum(product)
        elif id(parameter) in self.sums:
            self.sums[id(parameter)] += product
        else:
            self.sums[id(parameter)] = product.double()

    def combine(self) -> None:
        """Add up the sums of all processes; float32 terms lose next to nothing in float64."""
        if distributed.size() == 1:
            return
        unique = {id(p): p for weights in self.weights.values() for p in weights}
        have = [key in self.sums or key in self.totals for key in unique]
        anywhere = [any(each) for each in zip(*distributed.gather_each(have), strict=True)]
        for (key, parameter), wanted in zip(unique.items(), anywhere, strict=True):
            if not wanted:
                continue
            if not self.keep_sums:  # one batch, which one process ran
                self.totals[key] = sum(distributed.gather_each(self.totals.get(key, 0.0)))
                continue
            own = self.sums.get(key)
            if own is None:
                own = torch.zeros_like(parameter, dtype=torch.float64)
            self.sums[key] = distributed.sum_(own)

    def scores(self) -> dict[int, float]:
        """Sum over each layer's weights; one that got no gradient counts as 0."""
        if self.keep_sums:
            self.totals = {key: _absolute_sum(total) for key, total in self.sums.items()}
        return {
            layer: math.fsum(self.totals.get(id(p), 0.0) for p in weights)
            for layer, weights in self.weights.items()
        }


def _backward(model: PreTrainedModel, ids: Tensor, total: int) -> None:
    """Backward pass of (cross-entropy summed over a batch) / (predicted tokens of all batches)."""
    with torch.enable_grad():
        logits = model(input_ids=ids.to(input_device(model)), use_cache=False).logits
        predicted = logits[:, :-1].flatten(0, 1).float()
        targets = ids[:, 1:].flatten().to(logits.device)
        loss = F.cross_entropy(predicted, targets, reduction="sum") / total
        loss.backward()


def _absolute_sum(tensor: Tensor) -> float:
    wide = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    return float(wide.abs().sum(dtype=torch.float64))


def _finite(scores: dict[int, float], what: str) -> dict[int, float]:
    wrong = [layer for layer, score in scores.items() if not math.isfinite(score)]
    if wrong:
        raise CalibrationError(
            f"{what} of layers {wrong} are not finite: use float32 or bfloat16, or check the "
            "weights."
        )
    return scores
