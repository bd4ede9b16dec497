"""Text to token windows, by one rule that measuring and evaluating share.

The whole text is tokenised once without special tokens and cut into consecutive windows from its
start. A tokenizer that puts BOS in front of text by itself gets BOS in front of every window,
followed by `window − 1` tokens of text.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import distributed
from .decoder import input_device, input_embeddings, text_config
from .errors import CalibrationError
from .sampling import sample_ids
from .text_sources import HubText, parse_source, read_table, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_WINDOW = 2048
# Text is read until it has this many characters for each token wanted; more is read on demand.
CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True)
class Windows:
    """Token windows and where they come from.

    Attributes:
        ids: (n, T) int64 token ids.
        source: The text source as it was given.
        bos_per_window: Whether each window starts with BOS.
        requested: Number of windows asked for, or None for all there are.
        details: What the source adds, such as a dataset's revision.
    """

    ids: Tensor
    source: str
    bos_per_window: bool
    requested: int | None = None
    details: dict[str, Any] | None = None

    @property
    def ids_sha256(self) -> str:
        """SHA-256 of the (n, T) ids as little-endian int32, row-major."""
        return hashlib.sha256(self.ids.cpu().numpy().astype("<i4").tobytes()).hexdigest()

    def require_targets(self) -> None:
        """Raise a CalibrationError unless a token can be predicted in a window."""
        if self.ids.ndim != 2 or not len(self.ids) or self.ids.shape[1] < 2:
            raise CalibrationError(
                f"no calibration tokens to predict in windows of shape {tuple(self.ids.shape)}. "
                "Give (n, T) ids with n of 1 or more and T of 2 or more."
            )

    def record(self) -> dict[str, Any]:
        """Return what a result must say about its windows, as JSON values."""
        return {
            "source": self.source,
            "windows": self.ids.shape[0],
            "window": self.ids.shape[1],
            "bos_per_window": self.bos_per_window,
            "tokens": self.ids.numel(),
            "requested_windows": self.requested,
            "ids_sha256": self.ids_sha256,
            **(self.details or {}),
        }


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Say whether a tokenizer puts BOS in front of text by itself; decided from the ids."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def max_window(config: Any) -> int | None:
    """Return the longest window a model allows, or None if its config names none."""
    limit = getattr(text_config(config), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def resolve_window(window: int | None, config: Any, *, option: str = "window") -> int:
    """Choose the window length and check it against the model.

    Raises:
        CalibrationError: If the window is longer than the model allows.
    """
    limit = max_window(config)
    if window is None:
        return min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    if limit is not None and window > limit:
        raise CalibrationError(
            f"`{option}` is {window} tokens, but the model allows {limit} "
            f"(max_position_embeddings). Lower `{option}`."
        )
    return window


def text_windows(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    num_windows: int | None,
    window: int,
    evaluation: bool = False,
) -> Windows:
    """Cut text into consecutive token windows.

    Args:
        tokenizer: The model's tokenizer.
        source: A text source; see `text_sources.read_text`.
        num_windows: Windows wanted; None takes every full window.
        window: Tokens per window, BOS included.
        evaluation: Take the evaluation split of a short name such as `c4`, and its protocol: that
            of `c4` takes windows from single documents, 256 if `num_windows` is None.

    Returns:
        The windows. Fewer than asked for give a warning that says how many there are.

    Raises:
        CalibrationError: If the text is missing, empty, or shorter than one window.
    """
    bos = adds_bos(tokenizer)
    parsed = parse_source(source, evaluation=evaluation)
    if isinstance(parsed, HubText) and parsed.data_file is not None:
        return _windows_of_documents(tokenizer, source, parsed, num_windows, window)
    stride = window - bos
    budget = None if num_windows is None else num_windows * window * CHARACTERS_PER_TOKEN
    while True:
        text, complete, details = read_text(source, max_characters=budget, evaluation=evaluation)
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        # The end of cut text may tokenise differently, so a margin of one window is asked for.
        if complete or num_windows is None or len(ids) >= (num_windows + 1) * stride:
            break
        budget = None if budget is None else budget * 4
    available = len(ids) // stride
    if available == 0:
        raise CalibrationError(
            f"the text of {source!r} has {len(ids)} tokens, fewer than one window of {window}. "
            "Give more text or a shorter `window`."
        )
    count = available if num_windows is None else min(num_windows, available)
    _warn_of_few(source, num_windows, window, available)
    tokens = torch.tensor(ids[: count * stride], dtype=torch.int64).reshape(count, stride)
    if bos:
        start = torch.full((count, 1), int(tokenizer.bos_token_id), dtype=torch.int64)
        tokens = torch.cat([start, tokens], dim=1)
    return Windows(tokens, source, bos, requested=num_windows, details=details)


def _windows_of_documents(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    parsed: HubText,
    num_windows: int | None,
    window: int,
) -> Windows:
    from .document_windows import NUM_WINDOWS, document_windows

    bos, wanted = adds_bos(tokenizer), num_windows or NUM_WINDOWS
    rows, details = read_table(parsed)
    ids, more = document_windows(
        tokenizer, rows, parsed.column, num_windows=wanted, window=window, bos=bos
    )
    _warn_of_few(source, wanted, window, len(ids))
    return Windows(ids, source, bos, requested=num_windows, details={**details, **more})


def _warn_of_few(source: str, wanted: int | None, window: int, available: int) -> None:
    if wanted is not None and available < wanted:
        warnings.warn(
            f"{source}: {wanted} windows of {window} tokens asked for, the text has "
            f"{available}; using {available}.",
            stacklevel=3,
        )


def shared_windows(windows: Windows) -> Windows:
    """Return the first process' windows on all of them.

    Raises:
        CalibrationError: If they are of a text that another process reads otherwise.
    """
    found = distributed.gather_each(windows.ids_sha256)
    if len(set(found)) == 1:
        return windows
    if windows.source != "self":  # what a model samples may differ between unlike machines
        hashes = ", ".join(digest[:12] for digest in found)
        raise CalibrationError(
            f"the processes read different tokens from {windows.source!r} (ids sha256 {hashes}). "
            "Give all machines the same text and tokenizer."
        )
    return replace(windows, ids=distributed.same(windows.ids))


def sampled_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_windows: int,
    window: int,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = True,
) -> Windows:
    """Let the model write its own calibration text: the source `self`.

    Each window is sampled at temperature 1 over the whole vocabulary, from BOS (or from a random
    token where the tokenizer adds no BOS), never ended by EOS. One seed gives the same windows on
    one machine; the global random state is left as it was.

    Args:
        model: The dense model.
        tokenizer: Its tokenizer, for the BOS rule.
        num_windows: Windows wanted.
        window: Tokens per window.
        seed: Seed of the sampler.
        batch_size: Windows sampled at once.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Exactly the windows asked for.

    Raises:
        CalibrationError: If a hidden state is not finite; the layer and the dtype are named.
    """
    ids = sample_ids(
        model,
        partial(_prompts, model, tokenizer),
        num_windows=num_windows,
        window=window,
        pad=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    details = {"sampler_seed": seed}
    return Windows(ids, "self", adds_bos(tokenizer), requested=num_windows, details=details)


def _prompts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int) -> Tensor:
    """Return (count, 1) first tokens: BOS, or drawn from the ordinary tokens."""
    if adds_bos(tokenizer):
        prompts = torch.full((count, 1), int(tokenizer.bos_token_id))
    else:
        special, size = set(tokenizer.all_special_ids), len(input_embeddings(model))
        ordinary = [i for i in range(min(len(tokenizer), size)) if i not in special]
        prompts = torch.tensor(ordinary)[torch.randint(len(ordinary), (count, 1))]
    return prompts.to(input_device(model))
