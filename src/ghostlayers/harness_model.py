"""A model in memory as lm-evaluation-harness wants it, under the BOS rule of calibration.

The harness asks the tokenizer for special tokens, of which BOS is only one (a tokenizer that adds
EOS would end each context), and cuts too long a context at its start, BOS included.
"""

from __future__ import annotations

import copy
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM

from .calibration import adds_bos
from .decoder import check_ids, input_device
from .errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HarnessModel(HFLM):
    """The harness's own Hugging Face model with BOS as `calibration.adds_bos` says.

    Args:
        model: A causal LM, dense, pruned or recovered; it is used as it is.
        tokenizer: Its tokenizer; a copy is used, since the harness sets its pad token.
        batch_size: Requests per forward pass.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int
    ) -> None:
        self.bos = tokenizer.bos_token_id if adds_bos(tokenizer) else None
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),
            backend="causal",
            batch_size=batch_size,
        )
        self._device = input_device(model)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_keywords: Any,
    ) -> list[int]:
        """Encode text: BOS in front if the tokenizer puts it there by itself, nothing behind."""
        ids: list[int] = self.tokenizer(string, add_special_tokens=False, verbose=False).input_ids
        if self.bos is not None and add_special_tokens is not False and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Like the harness's own, with a progress bar only on a terminal."""
        quiet = disable_tqdm or not sys.stderr.isatty()
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=quiet)
        return found

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score (text pair, context ids, continuation ids).

        Raises:
            CalibrationError: If an id is not in the vocabulary, or a log-likelihood is nan.
        """
        fitted = [(pair, self._fit(ctx, cont), cont) for pair, ctx, cont in requests]
        used = {token for _, ctx, cont in fitted for token in (*ctx, *cont)}
        check_ids(self.model, torch.tensor(sorted(used)))
        results: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            fitted, disable_tqdm=disable_tqdm, override_bs=override_bs
        )
        if any(math.isnan(result[0]) for result in results):
            raise CalibrationError(
                f"the logits are not finite in {str(self.model.dtype).removeprefix('torch.')}: use "
                "float32 or bfloat16, or check the weights."
            )
        return results

    def _fit(self, context: list[int], continuation: list[int]) -> list[int]:
        """Cut too long a context at its start, but for BOS."""
        room = self.max_length + 1 - len(continuation)
        if self.bos is None or len(context) <= room or room < 1 or context[0] != self.bos:
            return context
        return [self.bos, *context[len(context) - room + 1 :]]


__all__ = ["HarnessModel"]
