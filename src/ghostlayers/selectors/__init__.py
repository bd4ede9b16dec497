"""Selectors: which layers to remove. One file per method, two tables of names.

A selector of `SELECTORS` is any callable that takes a `SelectionContext` and returns the layers to
remove: it reads similarities alone. One of `MODEL_SELECTORS` takes a `ModelContext` and returns a
`Choice`: it runs the model itself. To add one: write it in its own file and add a line to a table.
A user's own selector needs no entry: see `own`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import GhostlayersError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..config import PruneConfig
    from ..similarity import Similarity

SELECTORS: dict[str, str] = {
    "lorp": "lorp:select_lorp",
    "shortgpt": "shortgpt:select_shortgpt",
    "streamline": "streamline:select_streamline",
}
MODEL_SELECTORS: dict[str, str] = {
    "shortened-ppl": "shortened_ppl:select_shortened_ppl",
    "shortened-taylor": "shortened_weights:select_shortened_taylor",
    "shortened-magnitude": "shortened_weights:select_shortened_magnitude",
    "greedy-ppl": "greedy_ppl:select_greedy_ppl",
    "laco": "laco:select_laco",
}
# Those that need no calibration, that read the weights themselves, that apply the "+" protection,
# and that change weights of kept layers.
WITHOUT_WINDOWS = ("shortened-magnitude",)
READ_WEIGHTS = ("shortened-taylor", "shortened-magnitude", "laco")
PLUS = ("shortened-taylor", "shortened-magnitude")
MERGING = ("laco",)
# Not in the tables: it looks at repaired models, not at similarities alone (see `search`).
AUTO = "auto"
AUTO_MIN_WINDOWS = 4


@dataclass(frozen=True)
class SelectionContext:
    """What a selector may look at.

    Attributes:
        similarity: Mean cosine similarities of the dense model's hidden states.
        num_remove: Budget k.
        allowed: Layers that may be removed, ascending.
        num_clusters: Forced number of clusters of `lorp`, or None for its policy.
        seed: Seed of anything random.
    """

    similarity: Similarity
    num_remove: int
    allowed: tuple[int, ...]
    num_clusters: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class ModelContext:
    """What a selector that runs the model may look at; it has all of `SelectionContext` too.

    Attributes:
        model: The dense model. A selector must leave it as it is.
        ids: (n, T) int64, all calibration windows; (0, 0) without calibration.
        config: Settings of the run.
        allowed: Layers that may be removed, ascending.
        measure: Runs the similarity sweep; `similarity` calls it once, when it is first read.
        progress: Show progress bars when standard error is a terminal.
    """

    model: PreTrainedModel
    ids: Tensor
    config: PruneConfig
    allowed: tuple[int, ...]
    measure: Callable[[], Similarity]
    progress: bool = True

    @cached_property
    def similarity(self) -> Similarity:
        """Mean cosine similarities of the dense model's hidden states; costs one sweep."""
        return self.measure()

    @property
    def num_remove(self) -> int:
        """Budget k."""
        return int(self.config.num_remove or 0)

    @property
    def num_clusters(self) -> int | None:
        """Forced number of clusters of `lorp`, or None for its policy."""
        return self.config.num_clusters

    @property
    def seed(self) -> int:
        """Seed of anything random."""
        return self.config.seed

    @property
    def score_ids(self) -> Tensor:
        """(n, T) int64: the first `score_window` tokens of the first `score_windows` windows."""
        return self.ids[: self.config.score_windows, : self.config.score_window]


@dataclass(frozen=True)
class Choice:
    """What a selector that runs the model decides.

    Attributes:
        removed: Layers to remove, ascending.
        record: JSON values: what was measured, on how many tokens.
        weights: New weights of kept layers, by dense layer and path inside it.
        warnings: What the user should know, one line each.
    """

    removed: tuple[int, ...]
    record: dict[str, Any] = field(default_factory=dict)
    weights: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


Selector = Callable[[SelectionContext], Sequence[int]]
ModelSelector = Callable[[ModelContext], Choice]


def selector_names() -> tuple[str, ...]:
    """Return the names of the selectors that read similarities."""
    return tuple(SELECTORS)


def select_names() -> tuple[str, ...]:
    """Return the names that `select` accepts, beside ``module:function``."""
    return (*SELECTORS, *MODEL_SELECTORS, AUTO)


def get_selector(name: str) -> Selector:
    """Import a selector by name.

    Raises:
        GhostlayersError: If no selector has that name; the nearest name is suggested.
    """
    if name in (AUTO, *MODEL_SELECTORS):
        raise GhostlayersError(
            f"selector {name!r} needs the model and its calibration, not only similarities. Use "
            f"`prune`, or one of {', '.join(SELECTORS)}."
        )
    if name not in SELECTORS:
        raise unknown_name("selector", name, SELECTORS)
    selector: Selector = _load(SELECTORS[name])
    return selector


def get_model_selector(name: str) -> ModelSelector:
    """Import a selector that runs the model by its name in `MODEL_SELECTORS`, or a user's own."""
    if name in MODEL_SELECTORS:
        selector: ModelSelector = _load(MODEL_SELECTORS[name])
        return selector
    from .own import own_selector

    return own_selector(name)


def _load(place: str) -> Any:
    module, function = place.split(":")
    return getattr(import_module(f".{module}", __name__), function)
