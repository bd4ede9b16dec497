"""Selectors: which layers to remove. One file per method, one table of names.

A selector is any callable that takes a `SelectionContext` and returns the layers to remove. To add
one: write it in its own file and add a line to `SELECTORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import GhostlayersError, unknown_name

if TYPE_CHECKING:
    from ..similarity import Similarity

SELECTORS: dict[str, str] = {
    "lorp": "lorp:select_lorp",
    "shortgpt": "shortgpt:select_shortgpt",
    "streamline": "streamline:select_streamline",
}
# Not in the table: it looks at repaired models, not at similarities alone (see `search`).
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


Selector = Callable[[SelectionContext], Sequence[int]]


def selector_names() -> tuple[str, ...]:
    """Return the names of the selectors that read similarities."""
    return tuple(SELECTORS)


def select_names() -> tuple[str, ...]:
    """Return the names that `select` accepts."""
    return (*SELECTORS, AUTO)


def get_selector(name: str) -> Selector:
    """Import a selector by name.

    Raises:
        GhostlayersError: If no selector has that name; the nearest name is suggested.
    """
    if name == AUTO:
        raise GhostlayersError(
            f"selector {AUTO!r} needs the model and its calibration, not only similarities. Use "
            f"`prune`, or one of {', '.join(SELECTORS)}."
        )
    if name not in SELECTORS:
        raise unknown_name("selector", name, SELECTORS)
    module, function = SELECTORS[name].split(":")
    selector: Selector = getattr(import_module(f".{module}", __name__), function)
    return selector
