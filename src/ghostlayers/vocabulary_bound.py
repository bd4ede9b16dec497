"""A lower bound of a loss from a part of the vocabulary, where only the lowest loss is wanted.

In a small model with a large vocabulary the head is a third of the work behind a kept state. The
cross-entropy over a subset of tokens that holds the targets is never above that over all of them:
log Σ_subset exp ≤ log Σ_all exp. So the head of every candidate is run on a subset, and the whole
head, on the kept input, only for candidates whose bound is below the lowest loss found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .decoder import decoder_layers, input_device, remove_layers_, share_tensors
from .errors import UnsupportedModelError
from .evaluation import local_losses
from .model_checks import LOW_PRECISION, evaluating
from .suffix import PROBE_TOKENS, Suffix, SuffixScorer, fed
from .sweep import batches_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The subset is the likeliest eighth of the vocabulary under the dense model, and all targets.
SHARE = 8
MIN_VOCABULARY = 4096
# How far rounding may lift a bound above its loss, in nats.
MARGIN = 1e-4
MARGIN_LOW_PRECISION = 0.05


@dataclass(frozen=True)
class Bounded:
    """A candidate: the lower bound of its loss on each window, and what enters the head."""

    lower: list[float]
    inputs: list[Tensor]


@dataclass(frozen=True)
class VocabularyBound:
    """Bounds losses on fixed windows by a part of the vocabulary.

    Attributes:
        head: The rows of the model's head that belong to the subset.
        targets: (n, T) int64, the windows as indices into the subset.
        tail: The model with its last layer only: it turns what enters the head into logits.
        margin: How far rounding may lift a bound above its loss, in nats.
    """

    head: nn.Linear
    targets: Tensor
    tail: PreTrainedModel
    margin: float

    def lower(self, scorer: SuffixScorer, suffix: Suffix) -> Bounded:
        """Bound the loss of a pruned model; its head is back in place afterwards."""
        inputs: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(
            lambda _module, args: inputs.append(args[0].detach().to("cpu", copy=True))
        )
        try:
            with _with_head(suffix.model, self.head):
                losses = scorer.losses(suffix, targets=self.targets)
        finally:
            handle.remove()
        return Bounded(losses, inputs)

    def exact(self, scorer: SuffixScorer, bounded: Bounded) -> list[float]:
        """Return the losses themselves, from what entered the head."""
        losses: list[float] = []
        head: Any = self.tail.get_output_embeddings()
        for part, state in zip(
            batches_of(scorer.ids, scorer.batch_size), bounded.inputs, strict=True
        ):
            with fed(head, state):
                losses += local_losses(
                    self.tail, part, batch_size=scorer.batch_size, progress=False
                )
        return losses


def vocabulary_bound(scorer: SuffixScorer, states: Sequence[int]) -> VocabularyBound | None:
    """Prepare bounds for models made from the scorer's one.

    Args:
        scorer: Its model's losses are measured here, unless they are known.
        states: Hidden states to keep in the same pass.

    Returns:
        The bounds; None where they save nothing or the head is no plain linear map: the vocabulary
        is small, the head is offloaded, wrapped or low-bit, or it is not used as a head alone.
    """
    model = scorer.model
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or hasattr(head, "_hf_hook"):
        return None
    size = head.weight.shape[0]
    if size < MIN_VOCABULARY or head.weight.is_meta or not head.weight.is_floating_point():
        return None
    mass = torch.zeros(size, dtype=torch.float32)

    def add(_module: nn.Module, _args: Any, logits: Tensor) -> None:
        for row in logits.detach():
            mass.add_(row.float().softmax(dim=-1).sum(dim=0).cpu())

    handle = head.register_forward_hook(add)
    try:
        scorer.dense_losses(states)
    finally:
        handle.remove()
    likely = mass.argsort(descending=True)[: size // SHARE]
    tokens = torch.cat([likely, scorer.ids.flatten().cpu()]).unique()
    if len(tokens) * 2 > size:
        return None
    low = model.dtype in LOW_PRECISION
    small = _rows(head, tokens)
    targets = torch.searchsorted(tokens, scorer.ids.cpu().contiguous())
    try:
        tail = remove_layers_(share_tensors(model), range(len(decoder_layers(model)) - 1))
    except UnsupportedModelError:
        return None
    if not _agrees(model, small, tail, tokens, scorer.ids[:1, :PROBE_TOKENS]):
        return None
    return VocabularyBound(small, targets, tail, MARGIN_LOW_PRECISION if low else MARGIN)


def _rows(head: nn.Linear, tokens: Tensor) -> nn.Linear:
    """Return a head for some tokens."""
    weight, bias = head.weight.detach(), head.bias
    small: nn.Linear = torch.nn.utils.skip_init(
        nn.Linear, weight.shape[1], len(tokens), bias=bias is not None, dtype=weight.dtype
    )
    index = tokens.to(weight.device)
    small.weight = nn.Parameter(weight[index], requires_grad=False)
    if bias is not None:
        small.bias = nn.Parameter(bias.detach()[index], requires_grad=False)
    return small


@contextmanager
def _with_head(model: PreTrainedModel, head: nn.Linear) -> Iterator[None]:
    """Give a model another head."""
    own = model.get_output_embeddings()
    model.set_output_embeddings(head)
    try:
        yield
    finally:
        model.set_output_embeddings(own)


def _agrees(
    model: PreTrainedModel, head: nn.Linear, tail: PreTrainedModel, tokens: Tensor, ids: Tensor
) -> bool:
    """Compare the small head's logits and the tail's with the model's on a few tokens."""
    inputs: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    ids = ids.to(input_device(model))
    copy = share_tensors(model)
    try:
        with evaluating(model), evaluating(copy), evaluating(tail):
            wanted = model(input_ids=ids, use_cache=False).logits.float()
            with _with_head(copy, head):
                part = copy(input_ids=ids, use_cache=False).logits.float()
            own: Any = tail.get_output_embeddings()
            with fed(own, inputs[0]):
                whole = tail(input_ids=ids, use_cache=False).logits.float()
        subset = wanted[..., tokens.to(wanted.device)]
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError):
        return False  # the head is not used as one linear map on the last state
    finally:
        handle.remove()
    if part.shape != subset.shape or whole.shape != wanted.shape:
        return False
    tolerance = (0.1 if model.dtype in LOW_PRECISION else 1e-4) * float(wanted.std())
    return bool(
        (part - subset).abs().max() <= tolerance and (whole - wanted).abs().max() <= tolerance
    )
