"""Perplexity on non-overlapping windows, with a record that says what was scored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from . import distributed
from .calibration import Windows
from .decoder import check_ids, input_device
from .errors import CalibrationError
from .sweep import batches_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 256


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity and what it was measured on.

    Attributes:
        perplexity: exp of the mean next-token cross-entropy over all predicted tokens.
        window_losses: Mean cross-entropy of each window, in nats.
        tokens: Number of predicted tokens, `window − 1` per window.
        dtype: The model's dtype.
        windows: The windows.
    """

    perplexity: float
    window_losses: tuple[float, ...]
    tokens: int
    dtype: str
    windows: Windows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the number and the whole protocol."""
        return {
            **self.windows.record(),
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "stride": self.windows.ids.shape[1],
            "dtype": self.dtype,
            "window_losses": self.window_losses,
        }


def perplexity(
    model: PreTrainedModel,
    windows: Windows | torch.Tensor,
    *,
    batch_size: int = 1,
    progress: bool = True,
) -> PerplexityResult:
    """Measure perplexity on non-overlapping windows, each scored from an empty context.

    Args:
        model: A causal LM, dense, pruned or recovered.
        windows: (n, T) int64 ids.
        batch_size: Windows per forward pass.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        The result; cross-entropy is taken in float32 and summed in float64.

    Raises:
        CalibrationError: If the windows hold nothing to predict or the logits are not finite.
    """
    if isinstance(windows, torch.Tensor):
        windows = Windows(windows, "windows given in", bos_per_window=False)
    if windows.ids.ndim != 2 or windows.ids.shape[0] == 0 or windows.ids.shape[1] < 2:
        raise CalibrationError(
            f"windows of shape {tuple(windows.ids.shape)} hold no token to predict. Give (n, T) "
            "ids with n of 1 or more and T of 2 or more."
        )
    check_ids(model, windows.ids)
    dtype = str(model.dtype).removeprefix("torch.")
    losses = window_losses(model, windows.ids, batch_size=batch_size, progress=progress)
    if not all(math.isfinite(loss) for loss in losses):
        raise CalibrationError(
            f"the logits are not finite in {dtype}: use float32 or bfloat16, or check the weights."
        )
    mean = math.fsum(losses) / len(losses)
    return PerplexityResult(
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        window_losses=tuple(losses),
        tokens=windows.ids.shape[0] * (windows.ids.shape[1] - 1),
        dtype=dtype,
        windows=windows,
    )


def window_losses(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    batch_size: int = 1,
    description: str = "perplexity",
    progress: bool = True,
) -> list[float]:
    """Mean next-token cross-entropy of each of (n, T) windows, in nats; it may not be finite.

    The processes of a session share the windows; each gets all losses.
    """
    own = distributed.own_windows(len(ids), batch_size)
    with distributed.section():
        losses = local_losses(
            model, ids[own], batch_size=batch_size, description=description, progress=progress
        )
    return distributed.gather(losses)


@torch.no_grad()
def local_losses(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    batch_size: int = 1,
    targets: torch.Tensor | None = None,
    description: str = "perplexity",
    progress: bool = True,
) -> list[float]:
    """As `window_losses`, by this process alone.

    `targets`, (n, T) like `ids`, are the tokens' indices among the logits where these are not those
    of the whole vocabulary.
    """
    from .layerwise import runs_layerwise
    from .layerwise_runs import losses_layerwise

    if runs_layerwise(model):
        return losses_layerwise(
            model,
            ids,
            batch_size=batch_size,
            targets=targets,
            description=description,
            progress=progress,
        )[0]
    device, training = input_device(model), model.training
    losses: list[float] = []
    model.eval()
    try:
        pairs = list(
            zip(
                batches_of(ids, batch_size),
                batches_of(ids if targets is None else targets, batch_size),
                strict=True,
            )
        )
        for part, wanted in tqdm(pairs, desc=description, disable=None if progress else True):
            logits = model(input_ids=part.to(device), use_cache=False).logits
            losses += losses_of_logits(logits, wanted)
    finally:
        model.train(training)
    return losses


def losses_of_logits(logits: torch.Tensor, ids: torch.Tensor) -> list[float]:
    """Mean cross-entropy per window; (B, T, V) logits are cast to float32 a chunk at a time."""
    totals = []
    for row, target in zip(logits, ids.to(logits.device), strict=True):
        parts = [
            F.cross_entropy(
                row[:-1][first : first + CHUNK_TOKENS].float(),
                target[first + 1 : first + 1 + CHUNK_TOKENS],
                reduction="sum",
            ).double()
            for first in range(0, len(target) - 1, CHUNK_TOKENS)
        ]
        totals.append(float(torch.stack(parts).sum()) / (len(target) - 1))
    return totals
