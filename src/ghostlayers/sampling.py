"""Let a model write text: windows that owe nothing to any corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm.auto import trange

from . import distributed
from .decoder import decoder_layers, input_device
from .sweep import capture, check_finite, require_finite

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


def sample_ids(
    model: PreTrainedModel,
    prompts: Callable[[int], Tensor],
    *,
    num_windows: int,
    window: int,
    pad: int = 0,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = True,
) -> Tensor:
    """Sample at temperature 1 over the whole vocabulary, never ended by EOS.

    Args:
        model: The model; it and the global random state stay as they were.
        prompts: Gives (n, 1) first tokens; called with the sampler's seed set.
        num_windows: Windows wanted.
        window: Tokens per window, the first one included.
        pad: Id for padding; no window gets any.
        seed: Seed of the sampler.
        batch_size: Windows sampled at once.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        (num_windows, window) int64 ids on the CPU.

    Raises:
        CalibrationError: If a hidden state or a logit is not finite; the layer and the dtype are
            named.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    def finite(_ids: Tensor, logits: Tensor) -> Tensor:
        lowest = torch.finfo(model.dtype).min  # a model may rule tokens out
        require_finite(logits.to(model.dtype).clamp(min=lowest), "a logit of the next token")
        return logits

    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=window - 1,
        max_new_tokens=window - 1,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=pad,
    )
    bar = {"desc": "sampling", "disable": None if progress else True}
    layers, rows = decoder_layers(model), []
    with (
        _generating(model, settings, seed),
        capture(layers, range(len(layers) + 1), check_finite),
    ):
        for first in trange(0, num_windows, batch_size, **bar):
            prompt = prompts(min(batch_size, num_windows - first)).to(input_device(model))
            mask = torch.ones_like(prompt)
            given = {"input_ids": prompt, "attention_mask": mask}
            checks = LogitsProcessorList([finite])
            rows.append(model.generate(**given, logits_processor=checks).cpu())  # type: ignore[operator]
    return torch.cat(rows)


def written_ids(
    model: PreTrainedModel,
    like: Tensor,
    *,
    num_windows: int,
    window: int,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Let the dense model write windows beside given ones; the same on every process.

    Where all given windows start with one token (BOS), so do the new ones; else each starts with
    a token drawn from the given windows.

    Args:
        model: The dense model, none of its weights offloaded.
        like: (n, T) int64 windows.
        num_windows: Windows wanted.
        window: Tokens per window, 2 or more.
        seed: Seed of the sampler.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        (num_windows, window) int64 ids on the CPU.

    Raises:
        CalibrationError: If a hidden state is not finite; the layer and the dtype are named.
    """
    tokens = like.cpu()
    starts = tokens[:, 0] if bool((tokens[:, 0] == tokens[0, 0]).all()) else tokens.flatten()

    def prompts(count: int) -> Tensor:
        return starts[torch.randint(len(starts), (count, 1))]

    ids = sample_ids(
        model, prompts, num_windows=num_windows, window=window, seed=seed, progress=progress
    )
    return distributed.same(ids)


@contextmanager
def _generating(model: PreTrainedModel, settings: GenerationConfig, seed: int) -> Iterator[None]:
    """Generate by these settings alone; the model and the global random state stay as they were."""
    device, training = input_device(model), model.training
    own = model.generation_config
    model.generation_config = settings  # those passed to `generate` are merged with the model's
    model.eval()
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            yield
    finally:
        model.generation_config = own
        model.train(training)
