"""Perplexity of many cuts on several texts; the layers below a cut run once for all that share it.

Legend: n windows, T tokens a window, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .calibration import Windows
from .compare_config import CompareConfig, short_names
from .decoder import check_ids, share_tensors, text_config
from .errors import CalibrationError
from .evaluation import PerplexityResult
from .guard_gain import gain
from .operators import OperatorFit
from .plan import Boundary, PruningPlan
from .repairs import apply_repairs_
from .suffix import Suffix, SuffixScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def scoring_windows(
    tokenizer: PreTrainedTokenizerBase, config: CompareConfig, window: int
) -> dict[str, Windows]:
    """Cut every text to score into windows of the same length, as `eval` does.

    Raises:
        CalibrationError: If a text is missing or too short.
    """
    from .calibration import text_windows

    return {
        name: text_windows(
            tokenizer, source, num_windows=config.eval_windows, window=window, evaluation=True
        )
        for source, name in short_names(config.texts).items()
    }


class TextScorer:
    """Scores pruned models on all texts at once.

    Dense states in front of cuts are kept in main memory, as many as fit in a bound: n · T · C
    numbers of the model's dtype each. Where not even one fits, whole models run.

    Args:
        model: The dense model.
        texts: Windows by name; all of the same length T.
        batch_size: Windows per forward pass.
        max_bytes: Bound of the kept states.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Mapping[str, Windows],
        *,
        batch_size: int,
        max_bytes: int,
        progress: bool = True,
    ) -> None:
        self.model, self.texts = model, texts
        ids = torch.cat([windows.ids for windows in texts.values()])
        check_ids(model, ids)
        self.scorer = SuffixScorer(
            model, ids, batch_size=batch_size, description="perplexity", progress=progress
        )
        size = int(text_config(model.config).hidden_size)
        self.most = max_bytes // (ids.numel() * size * model.dtype.itemsize)
        self.suffixes: dict[tuple[tuple[int, ...], int], Suffix] = {}

    def dense(self, starts: Sequence[int] = ()) -> dict[str, dict[str, Any]]:
        """Score the dense model; keep the first states of `starts` that there is room for."""
        first = list(dict.fromkeys(starts))[: self.most]
        return self._by_text(self.scorer.dense_losses(first))

    def prepare(self, starts: Sequence[int]) -> None:
        """Make room and keep states, in one pass.

        Args:
            starts: First layers of the cells to come, in order; the first one is needed now.
        """
        wanted = [start for start in dict.fromkeys(starts) if start > 0][: self.most]
        if not wanted or wanted[0] in self.scorer.states:
            return
        for start in set(self.scorer.states) - set(wanted):
            del self.scorer.states[start]
        self.scorer.keep(wanted)

    def score(
        self,
        pruned: PreTrainedModel,
        plan: PruningPlan,
        start: int,
        fits: Mapping[Boundary, OperatorFit],
    ) -> dict[str, dict[str, Any]]:
        """Score a pruned model with repairs.

        Args:
            pruned: The pruned model without repairs; it is left as it is.
            plan: The plan by which it was pruned.
            start: First layer of the dense model that the cut or a repair changes.
            fits: Repairs by boundary.

        Returns:
            By text, the values of `PerplexityResult` and a standard error.

        Raises:
            CalibrationError: If logits are not finite.
        """
        suffix = self._suffix(pruned, plan, start)
        if fits:
            model = share_tensors(suffix.model)
            apply_repairs_(model, suffix.plan, fits)
            suffix = replace(suffix, model=model)
        return self._by_text(self.scorer.losses(suffix))

    def score_whole(self, model: PreTrainedModel, plan: PruningPlan) -> dict[str, dict[str, Any]]:
        """Score a model all of whose layers run."""
        return self._by_text(self.scorer.losses(Suffix(model, plan, None)))

    def _suffix(self, pruned: PreTrainedModel, plan: PruningPlan, start: int) -> Suffix:
        if start not in self.scorer.states:
            return Suffix(pruned, plan, None)
        key = plan.removed, start
        if key not in self.suffixes:
            kept = {k: v for k, v in self.suffixes.items() if k[0] == plan.removed}
            self.suffixes = {**kept, key: self.scorer.suffix(pruned, plan, start)}
        return self.suffixes[key]

    def _by_text(self, losses: Sequence[float]) -> dict[str, dict[str, Any]]:
        parts, found = iter(losses), dict[str, dict[str, Any]]()
        dtype = str(self.model.dtype).removeprefix("torch.")
        for name, windows in self.texts.items():
            own = tuple(next(parts) for _ in windows.ids)
            if not all(map(math.isfinite, own)):
                raise CalibrationError(
                    f"the logits are not finite in {dtype}: use float32 or bfloat16, or check the "
                    "weights."
                )
            mean = math.fsum(own) / len(own)
            value = math.exp(mean) if mean < 700 else math.inf
            tokens = windows.ids.shape[0] * (windows.ids.shape[1] - 1)
            result = PerplexityResult(value, own, tokens, dtype, windows)
            error = standard_error(own)
            found[name] = {
                **result.to_dict(),
                "loss": mean,
                "standard_error": None if error is None else value * error,
            }
        return found


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def compared(
    own: Mapping[str, Mapping[str, Any]], dense: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Put perplexities beside those of the dense model on the same windows.

    Returns:
        `own` with `ratio`, its logarithm (the mean loss that is added) and the standard error of
        that over pairs of windows.
    """
    found = {}
    for name, value in own.items():
        added = gain(value["window_losses"], dense[name]["window_losses"])
        pairs = len(value["window_losses"])
        found[name] = {
            **value,
            "ratio": value["perplexity"] / dense[name]["perplexity"],
            "log_ratio": added.mean,
            "log_ratio_standard_error": added.error if pairs > 1 else None,
        }
    return found


__all__ = ["TextScorer", "compared", "scoring_windows", "standard_error"]
