"""The first sweep of a comparison: one per text, whatever the numbers of windows.

Fewer windows of a text are the first of more, so one sweep over the most of them is read off on
the way. What it gives is stored as `Scores`, with which a run that is started again continues.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import distributed
from .calibration import Windows
from .compare_config import CompareConfig, short_names
from .compare_growth import check_same_tokens
from .compare_lock import SCORES_FOLDER
from .compare_results import CalibrationLine, ResultsFile
from .decoder import decoder_layers
from .pipeline import calibration_windows
from .scores import Scores
from .scores_file import load_scores
from .selection import Measured
from .selectors.lorp import cluster_layers, num_clusters_for
from .similarity import SimilarityAccumulator
from .sweep import batches_of, sweep
from .token_classes import NormAccumulator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .similarity import Similarity


@dataclass(frozen=True)
class Calibration:
    """One calibration text at one number of windows.

    Attributes:
        name: Short name of the text.
        source: The text as it was given.
        num_windows: Windows asked for.
        windows: The windows.
        measured: What the first sweep gave.
    """

    name: str
    source: str
    num_windows: int
    windows: Windows
    measured: Measured

    @property
    def massive(self) -> torch.Tensor:
        """(n·T,) bool: the massive tokens."""
        assert self.measured.massive is not None
        return self.measured.massive


def measure_calibrations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: CompareConfig,
    file: ResultsFile,
    *,
    progress: bool = True,
) -> list[Calibration]:
    """Make the windows of every calibration and measure them; store a line for each.

    Raises:
        CalibrationError: If a text is missing or too short, or gives other tokens than those of a
            stored line, or a state is not finite.
    """
    names = short_names(config.calibration)
    known: dict[tuple[str, int], Scores] = {}
    made: dict[str, dict[int, Windows]] = {}
    for source, name in names.items():  # all texts before the first sweep: one may be too short
        kept = {n: _stored(file, name, n, model) for n in config.num_windows}
        known |= {(name, n): scores for n, scores in kept.items() if scores is not None}
        missing = [n for n in sorted(config.num_windows) if kept[n] is None]
        read = sorted(config.num_windows) if _read_again(source, missing) else missing
        own = {n: _windows(model, tokenizer, config, source, n, progress) for n in read}
        for line in file.results.calibrations:
            if line.name == name and line.num_windows in own:
                now = own[line.num_windows].ids_sha256
                check_same_tokens(name, line.hash, now, file.path.parent)
        made[name] = {n: own[n] for n in missing}
    found = []
    for source, name in names.items():
        new = _measure(model, config, file, source, name, made[name], progress)
        for n in config.num_windows:
            scores = new[n] if n in new else known[name, n]
            found.append(Calibration(name, source, n, scores.windows, scores.measured))
    return found


def _read_again(source: str, missing: Sequence[int]) -> bool:
    """Whether a text is read also for numbers of windows whose scores are stored, to compare it.

    A file always is; a dataset of the Hub only where some of it is read anyway, and what the model
    sampled, which the model and the seed decide, never.
    """
    return source != "self" and (bool(missing) or Path(source).is_file())


def scores_path(file: ResultsFile, name: str, num_windows: int) -> Path:
    """Return where the scores of a calibration lie."""
    readable, digest = readable_name(name)
    folder = file.path.parent / SCORES_FOLDER
    return folder / f"{readable}-{digest}-{num_windows}.safetensors"


def readable_name(name: str) -> tuple[str, str]:
    """Return the end of a name in characters that a file name may have, and a hash of it all."""
    readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[-60:]
    return readable, hashlib.sha256(name.encode()).hexdigest()[:8]


def _stored(
    file: ResultsFile, name: str, num_windows: int, model: PreTrainedModel
) -> Scores | None:
    """Return the scores of a finished sweep."""
    lines = file.results.calibrations
    path = scores_path(file, name, num_windows)
    if not any((line.name, line.num_windows) == (name, num_windows) for line in lines):
        return None
    if not distributed.everyone(path.is_file()):
        return None
    scores = load_scores(path)
    scores.check_model(model)
    return scores


def _windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: CompareConfig,
    source: str,
    num_windows: int,
    progress: bool,
) -> Windows:
    asked = config.prune_config(num_remove=1, calibration=source, num_windows=num_windows)
    return calibration_windows(model, tokenizer, asked, progress=progress)


def chains(made: Mapping[int, Windows]) -> list[list[int]]:
    """Group numbers of windows so that in each group the fewer are the first of the more."""
    groups: list[list[int]] = []
    for n in sorted(made):
        ids = made[n].ids
        for group in groups:
            last = made[group[-1]].ids
            if last.shape[1] == ids.shape[1] and torch.equal(last, ids[: len(last)]):
                group.append(n)
                break
        else:
            groups.append([n])
    return groups


def _measure(
    model: PreTrainedModel,
    config: CompareConfig,
    file: ResultsFile,
    source: str,
    name: str,
    made: Mapping[int, Windows],
    progress: bool,
) -> dict[int, Scores]:
    depth, found = len(decoder_layers(model)), dict[int, Scores]()
    over = config.prune_config(num_remove=1).cosine_over
    for group in chains(made):
        norms, done = NormAccumulator(depth), 0
        similarity = SimilarityAccumulator(depth, over)
        for n in group:
            start, ids = time.perf_counter(), made[n].ids
            if len(ids) > done:
                more = SimilarityAccumulator(depth, over), NormAccumulator(depth)
                batches = batches_of(ids[done:], config.batch_size)
                sweep(model, batches, more, description=f"similarity, {name}", progress=progress)
                similarity.running.merge(more[0].running)
                norms.norms.merge(more[1].norms)
            done = len(ids)
            measured = Measured(similarity.result(), norms.massive())
            settings = config.prune_config(num_remove=1, calibration=source, num_windows=n)
            found[n] = Scores.of(model, settings, made[n], measured)
            with distributed.section():
                if distributed.is_main():
                    path = scores_path(file, name, n)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    found[n].save(path, force=True)
            seconds = time.perf_counter() - start
            _store(file, name, n, found[n], config, seconds)
    return found


def _store(
    file: ResultsFile,
    name: str,
    num_windows: int,
    scores: Scores,
    config: CompareConfig,
    seconds: float,
) -> None:
    if any((x.name, x.num_windows) == (name, num_windows) for x in file.results.calibrations):
        return  # its scores were lost and are measured again
    similarity, windows = scores.measured.similarity, scores.windows
    settings = config.prune_config(num_remove=1)
    clusters = lorp_clusters(similarity, settings.num_clusters, settings.seed)
    labels = {layer: index for index, cluster in enumerate(clusters) for layer in cluster}
    file.add(
        CalibrationLine(
            name=name,
            num_windows=num_windows,
            hash=windows.ids_sha256,
            window=windows.ids.shape[1],
            tokens=windows.ids.numel(),
            calibration=windows.record(),
            similarity=similarity.matrix.tolist(),
            rls=similarity.rls,
            locality=locality(similarity.rls),
            num_clusters=len(clusters),
            clusters=[labels[layer] for layer in range(similarity.num_layers)],
            block_influence=similarity.block_influence.tolist(),
            seconds=round(seconds, 3),
        )
    )


def lorp_clusters(similarity: Similarity, num_clusters: int | None, seed: int) -> list[list[int]]:
    """Return the clusters of layers that `lorp` uses."""
    count = num_clusters or num_clusters_for(similarity.rls)
    return cluster_layers(similarity.inputs, count, seed)


def locality(rls: float) -> str:
    """Say what RLS means; see `Analysis.locality`."""
    return "localized" if rls >= 1.0 else "intermediate" if rls >= 0.7 else "distributed"


__all__: Sequence[str] = [
    "Calibration",
    "lorp_clusters",
    "measure_calibrations",
    "readable_name",
    "scores_path",
]
