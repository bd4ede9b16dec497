"""Which layers LaCo merges: scans from the top down, and the threshold that fits a budget."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from .decoder import base_model, decoder_layers, input_device, share_tensors
from .errors import UnsupportedModelError
from .layer_collapse import collapse_, mismatch
from .model_checks import evaluating
from .plan import PruningPlan
from .removal_losses import kept_states, start_at
from .suffix import Suffix, SuffixScorer, fed
from .sweep import batches_of, capture, check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Steps of the search for the threshold; each scans the layers once and reuses known cosines.
MAX_STEPS = 20
LOWEST = -1.0


@dataclass(frozen=True)
class Rules:
    """Which merges a scan tries.

    Attributes:
        size: Layers m that become one.
        interval: Layers that a scan goes down after a merge.
        low: Lowest layer that takes part.
        high: Highest layer that takes part.
        allowed: Layers that may go.
        budget: Number of layers that must go.
    """

    size: int
    interval: int
    low: int
    high: int
    allowed: frozenset[int]
    budget: int


@dataclass(frozen=True)
class Merge:
    """Layers that became one: `others` went into `layer`; indices of the dense model."""

    layer: int
    others: tuple[int, ...]
    cosine: float


@dataclass(frozen=True)
class Collapsed:
    """A model with some layers merged.

    Attributes:
        model: It shares the dense model's tensors, but for merged layers.
        layers: Its layers as indices of the dense model.
        merges: What was merged, in order.
    """

    model: PreTrainedModel
    layers: tuple[int, ...]
    merges: tuple[Merge, ...] = ()

    def weights(self) -> Mapping[tuple[int, str], Tensor]:
        """Return the parameters of merged layers, by dense layer and path inside it."""
        stack = decoder_layers(self.model)
        return {
            (layer, name): parameter.detach()
            for layer in {merge.layer for merge in self.merges} & set(self.layers)
            for name, parameter in stack[self.layers.index(layer)].named_parameters()
        }


class CollapseScorer:
    """Mean cosine between the last hidden states of the dense and of collapsed models.

    The raw output of the last layer is compared, before the final norm, token by token over
    channels. Layers below a merge are the dense model's, so only those from the merge on run.

    Args:
        model: The dense model; left as it is.
        ids: (n, T) int64 windows.
        batch_size: Windows per forward pass.
        progress: Show a progress bar when standard error is a terminal.

    Raises:
        UnsupportedModelError: If the last layer does not hand on one (B, T, C) state.
        CalibrationError: If the dense model's last state is not finite.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, *, batch_size: int = 1, progress: bool = True
    ) -> None:
        self.depth = len(decoder_layers(model))
        self.dense = Collapsed(model, tuple(range(self.depth)))
        self.scorer = SuffixScorer(model, ids, batch_size=batch_size, progress=False)
        self.states = kept_states(model, ids, range(1, self.depth))
        self.scorer.keep([*self.states, self.depth])
        found = self.scorer.states[self.depth]
        if found is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} (model_type {model.config.model_type!r}) has no single "
                "last hidden state to compare. Use another selector."
            )
        for part in found:
            check_finite(self.depth, part)
        self.targets = found
        self.cosines: dict[tuple[object, ...], float] = {}
        self.skipped: dict[int, str] = {}
        self.bar = tqdm(desc="laco", disable=None if progress else True, unit="merge")

    def cosine(self, current: Collapsed, position: int, others: tuple[int, ...]) -> float | None:
        """Try a merge; None if the layers cannot be merged, −∞ if the state is not finite.

        Args:
            current: The model so far; its layers up to `position` are the dense model's.
            position: The layer that stays.
            others: Those that go into it.
        """
        key = (tuple((m.layer, m.others) for m in current.merges), position, others)
        if key in self.cosines:
            return self.cosines[key]
        reason = mismatch(current.model, position, len(others))
        if reason is None:
            try:
                found = self._measure(self.merged(current, position, others, 0.0), position)
            except UnsupportedModelError as error:
                reason = str(error)
            else:
                self.cosines[key] = found
                self.bar.update()
                return found
        self.skipped[position] = reason
        return None

    def merged(
        self, current: Collapsed, position: int, others: tuple[int, ...], cosine: float
    ) -> Collapsed:
        """Merge layers; the model given in is left as it is."""
        model = collapse_(share_tensors(current.model), position, len(others))
        layers = tuple(layer for layer in current.layers if layer not in others)
        merge = Merge(current.layers[position], others, cosine)
        return Collapsed(model, layers, (*current.merges, merge))

    def _measure(self, trial: Collapsed, position: int) -> float:
        removed = tuple(set(range(self.depth)) - set(trial.layers))
        start = start_at(self.states, position)
        suffix = self.scorer.suffix(trial.model, PruningPlan(self.depth, removed), start)
        total, count = 0.0, 0
        for found, target in zip(self._last_states(suffix), self.targets, strict=True):
            cosines = F.cosine_similarity(found.float(), target.float(), dim=-1)
            total, count = total + float(cosines.double().sum()), count + cosines.numel()
        return total / count if total == total else float("-inf")

    def _last_states(self, suffix: Suffix) -> list[Tensor]:
        """Return the raw output of the last layer, (B, T, C) for each batch, on the CPU."""
        layers, base = decoder_layers(suffix.model), base_model(suffix.model)
        batches, found = batches_of(self.scorer.ids, self.scorer.batch_size), list[Tensor]()

        def keep(_index: int, state: Tensor) -> None:
            found.append(state.detach().to("cpu", copy=True))

        starts = None if suffix.start is None else self.scorer.states[suffix.start]
        device = input_device(suffix.model)
        with evaluating(suffix.model), capture(layers, [len(layers)], keep):
            for index, part in enumerate(batches):
                if starts is None:
                    base(input_ids=part.to(device), use_cache=False)
                    continue
                with fed(layers[0], starts[index]):
                    base(input_ids=part.to(device), use_cache=False)
        return found


def scan(scorer: CollapseScorer, rules: Rules, threshold: float) -> Collapsed:
    """Merge from the top down wherever the cosine stays above a threshold (paper, algorithm 1).

    A merge takes m − 1 layers, or fewer where the budget or the range ends. Below an accepted merge
    the scan goes on `interval` layers lower, else one layer lower.

    Returns:
        The collapsed model; it may have more layers than the budget asks.
    """
    current, left = scorer.dense, rules.budget
    position = max(rules.low, rules.high - min(rules.size - 1, left))
    while position >= rules.low and left > 0:
        above = current.layers[position + 1 : position + 1 + min(rules.size - 1, left)]
        others = tuple(layer for layer in above if layer <= rules.high)
        cosine = None
        if others and rules.allowed.issuperset(others):
            cosine = scorer.cosine(current, position, others)
        if cosine is None or not cosine > threshold:
            position -= 1
            continue
        current = scorer.merged(current, position, others, cosine)
        left -= len(others)
        fits = len(current.layers) - 1 - min(rules.size - 1, left)
        position = min(position - rules.interval, fits)
    return current


def search_threshold(scorer: CollapseScorer, rules: Rules) -> tuple[float, Collapsed]:
    """Find the highest threshold with which a scan reaches the budget.

    Bisection over the cosines seen so far: with a threshold between two neighbours of them a scan
    does what it does at the lower one.

    Returns:
        The threshold and what the scan makes with it; the lowest threshold, −1, if even that does
        not reach the budget.

    """

    def reaches(found: Collapsed) -> bool:
        return len(scorer.dense.layers) - len(found.layers) >= rules.budget

    low, high = LOWEST, 1.0
    best = scan(scorer, rules, low)
    if not reaches(best):
        return low, best
    for _ in range(MAX_STEPS):
        between = sorted({c for c in scorer.cosines.values() if low < c < high})
        if not between:
            break
        middle = statistics.median_low(between)
        found = scan(scorer, rules, middle)
        if reaches(found):
            low, best = middle, found
        else:
            high = middle
    return low, best
