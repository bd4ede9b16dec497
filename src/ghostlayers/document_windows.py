"""Windows from single documents: how the papers score C4.

As in LinearPatch's `get_c4`: documents are drawn at random until one is longer than the window, and
a window is taken from a random place in it, 256 times, with a generator seeded with 0. The draws
are those of Python's `random`, so the documents and places are the same for the same tokenizer.
What differs: a tokenizer that adds BOS gets it in place of the first token of each window, which is
not scored, so the scored tokens are the same too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_WINDOWS, SEED = 256, 0
MAX_DRAWS = 400  # for each window; of C4's documents about one in forty has 2048 tokens


def document_windows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    column: str,
    *,
    num_windows: int,
    window: int,
    bos: bool,
) -> tuple[Tensor, dict[str, Any]]:
    """Take windows from random places of random documents.

    Args:
        tokenizer: The model's tokenizer.
        rows: Documents under `column`.
        column: Name of the text column.
        num_windows: Windows wanted.
        window: Tokens per window, BOS included.
        bos: Whether each window starts with BOS.

    Returns:
        (n, T) int64 ids, n of at most `num_windows`, and details for the record. It always ends: at
        `MAX_DRAWS` draws for each window wanted.

    Raises:
        CalibrationError: If no document drawn is longer than the window.
    """
    draw, drawn = random.Random(SEED), 0
    found: list[list[int]] = []
    start = [int(tokenizer.bos_token_id)] if bos else []
    while rows and len(found) < num_windows and drawn < MAX_DRAWS * num_windows:
        text = rows[draw.randint(0, len(rows) - 1)][column]
        drawn += 1
        ids = start + tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) > window:
            first = draw.randint(0, len(ids) - window - 1)
            found.append(start + ids[first + len(start) : first + window])
    if not found:
        raise CalibrationError(
            f"none of {drawn} documents drawn has more than {window} tokens. Lower `window`."
        )
    details = {"documents_drawn": drawn, "window_seed": SEED}
    return torch.tensor(found, dtype=torch.int64), details


__all__ = ["NUM_WINDOWS", "document_windows"]
