"""The dense model beside the pruned ones: found in their records when it is not named."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from .errors import CheckpointError
from .loading import ModelSource, locate
from .records import RECORD_FILE, read_record


def with_dense(sources: Sequence[ModelSource]) -> list[ModelSource]:
    """Put the dense model first, unless the first model is no output of `prune`.

    Args:
        sources: Models to evaluate.

    Returns:
        The same, after the source that the first one's record names. If that cannot be found,
        the same alone, and a warning says what to do.
    """
    first = sources[0].folder
    if sources[0].gguf or not (first / RECORD_FILE).is_file():
        return list(sources)
    try:
        dense = locate(_recorded(first))
    except CheckpointError as error:
        warnings.warn(
            f"no dense baseline: {error} Ratios are to {sources[0].name}; give the dense model as "
            "the first PATH.",
            stacklevel=2,
        )
        return list(sources)
    return [dense, *(source for source in sources if _place(source) != _place(dense))]


def _place(source: ModelSource) -> tuple[Path, str | None]:
    return source.folder.resolve(), source.gguf


def _recorded(folder: Path) -> str:
    """Return the dense model that a record names.

    Raises:
        CheckpointError: If it names none.
    """
    origin = read_record(folder).get("source") or {}
    if not origin.get("model"):
        raise CheckpointError(f"the record of {str(folder)!r} names no source.")
    return str(origin["model"])
