"""What the dense model's similarities say, without changing anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .calibration import Windows
from .config import PruneConfig
from .decoder import input_device, num_decoder_layers, text_config
from .errors import CalibrationError, PlanError, configured
from .model_checks import check_causal, check_reloadable
from .pipeline import allowed_layers, calibration_windows
from .rank_errors import checked_cuts
from .rank_errors import rank_errors as measure_rank_errors
from .records import versions
from .recoverability import Recoverability, RecoverabilityAccumulator
from .scores import Scores
from .selection import Measured, measure
from .selectors import selector_names
from .selectors.lorp import num_clusters_for
from .similarity import Similarity
from .steps import measure_similarity, select_layers
from .sweep import batches_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Analysis:
    """Scores of the dense model and what each selector would remove.

    Attributes:
        similarity: S over all hidden states.
        num_clusters: Clusters that `lorp` uses: by its policy, or as asked for.
        selections: `{selector: {k: removed layers}}` for every budget that may be removed; a
            budget for which a selector has no answer is left out.
        windows: The calibration windows.
        recoverability: Errors of every contiguous cut before and after a linear repair; None if
            there are too few tokens.
        scores: What `prune` needs of it to run no first sweep.
        rank_errors: Error against rank at the cuts that were asked for, see `rank_errors`.
    """

    similarity: Similarity
    num_clusters: int
    selections: dict[str, dict[int, tuple[int, ...]]]
    windows: Windows
    recoverability: Recoverability | None
    scores: Scores
    rank_errors: tuple[dict[str, Any], ...] = ()

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the scores to a safetensors file; see `load_scores` and `Scores.save`."""
        return self.scores.save(path, force=force)

    @property
    def locality(self) -> str:
        """What RLS means: how far the similarity of representations reaches.

        `localized` (RLS ≥ 1.0): only near layers are alike, few clusters. `distributed` (RLS
        < 0.7): layers far apart are alike too, many clusters. `intermediate` in between.
        """
        rls = self.similarity.rls
        return "localized" if rls >= 1.0 else "intermediate" if rls >= 0.7 else "distributed"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values under the documented keys."""
        return {
            "similarity": self.similarity.matrix,
            "cosine_over": self.scores.settings["cosine_over"],
            "rls": self.similarity.rls,
            "locality": self.locality,
            "num_clusters": self.num_clusters,
            "block_influence": self.similarity.block_influence,
            "selections": self.selections,
            "recoverability": self.recoverability and self.recoverability.to_dict(),
            "rank_errors": list(self.rank_errors),
            "calibration": self.windows.record(),
            "versions": versions(),
        }


def analyze(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PruneConfig | None = None,
    *,
    windows: Windows | torch.Tensor | None = None,
    rank_errors: str | Sequence[str] = (),
    recoverability: bool = True,
    progress: bool = True,
    **settings: Any,
) -> Analysis:
    """Measure a dense model in one sweep and say what each selector would remove.

    Args:
        model: A causal LM; nothing is changed.
        tokenizer: Its tokenizer; needed unless `windows` are given.
        config: Settings; or give them as keyword arguments. The budget is not used.
        windows: Calibration windows, (n, T) int64 ids.
        rank_errors: Cuts at which `ghost` is fitted at every rank, as layer lists (`12-18,21` are
            two cuts); one more sweep for all of them.
        recoverability: Fit a linear map at every contiguous cut; more work than the sweep itself.
        progress: Show progress bars when standard error is a terminal.
        **settings: Fields of `PruneConfig`.

    Returns:
        The analysis.

    Raises:
        UnsupportedModelError: If the model is no decoder-only LM.
        CalibrationError: If there is no text, or a hidden state is not finite.
        PlanError: If `rank_errors` names layers that the model does not have.
    """
    import torch

    config = config or configured(PruneConfig, {"num_remove": 1, **settings})
    check_reloadable(model)
    check_causal(model)
    cuts = checked_cuts(rank_errors, model.config)
    if windows is None:
        if tokenizer is None:
            raise CalibrationError("`tokenizer` is None. Give the model's tokenizer or `windows`.")
        windows = calibration_windows(model, tokenizer, config, progress=progress)
    if isinstance(windows, torch.Tensor):
        windows = Windows(windows, "windows given in", bos_per_window=False)
    allowed = allowed_layers(config, model.config)
    found: Recoverability | None = None
    if recoverability:
        measured, found = _sweep(model, windows.ids, config, allowed, progress)
    else:
        measured = measure(model, windows.ids, config, progress=progress)
    similarity = measured.similarity
    by_rank = measure_rank_errors(
        model, windows.ids, cuts, batch_size=config.batch_size, progress=progress
    )
    return Analysis(
        similarity=similarity,
        num_clusters=config.num_clusters or num_clusters_for(similarity.rls),
        selections=_selections(similarity, config, allowed),
        windows=windows,
        recoverability=found,
        scores=Scores.of(model, config, windows, measured, found),
        rank_errors=tuple(by_rank),
    )


def _sweep(
    model: PreTrainedModel,
    ids: torch.Tensor,
    config: PruneConfig,
    allowed: Sequence[int],
    progress: bool,
) -> tuple[Measured, Recoverability | None]:
    """Run the first sweep; it keeps states of some tokens to see what a linear map repairs."""
    probe = RecoverabilityAccumulator(
        num_decoder_layers(model.config),
        text_config(model.config).hidden_size,
        num_windows=ids.shape[0],
        window=ids.shape[1],
        seed=config.seed,
    )
    batches = batches_of(ids, config.batch_size)
    similarity = measure_similarity(
        model, batches, also=[probe], over=config.cosine_over, progress=progress
    )
    found = probe.result(allowed, device=input_device(model), progress=progress)
    return Measured(similarity, probe.norms.massive()), found


def _selections(
    similarity: Similarity, config: PruneConfig, allowed: Sequence[int]
) -> dict[str, dict[int, tuple[int, ...]]]:
    """List what each selector that reads similarities would remove, for every budget."""
    selections: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in selector_names()}
    for name, budgets in selections.items():
        for budget in range(1, len(allowed) + 1):
            try:
                plan = select_layers(
                    similarity,
                    selector=name,
                    num_remove=budget,
                    num_clusters=config.num_clusters,
                    allowed=allowed,
                    seed=config.seed,
                )
            except PlanError:
                continue  # documented: this selector has no answer for this budget
            budgets[budget] = plan.removed
    return selections
