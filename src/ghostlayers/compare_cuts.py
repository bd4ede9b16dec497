"""Which layers every selector removes, each ranking found once for all budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .compare_calibration import Calibration, lorp_clusters
from .compare_config import GIVEN_LAYERS, CompareConfig
from .compare_results import CutLine, ResultsFile
from .decoder import decoder_layers
from .errors import DistributedError, GhostlayersError
from .model_selection import check_model_selector
from .operators import NO_OPERATOR
from .pipeline import allowed_layers
from .plan import PruningPlan, parse_layers
from .quantized import is_quantized
from .selection import Selection, choose_layers
from .selectors import AUTO, MERGING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import PruneConfig

# `auto` searches with this operator, the default of `prune`, unless only `none` is compared.
SEARCH_OPERATOR = "ghost-robust"
# Selectors whose choice for a budget is the first of a ranking, and where their record has it.
RANKED_BY = {
    "shortened-ppl": "loss",
    "shortened-taylor": "score",
    "shortened-magnitude": "score",
}
IN_ORDER = ("greedy-ppl",)


@dataclass(frozen=True)
class Cut:
    """A cut that is there to be measured.

    Attributes:
        calibration: Where it was found, and what its operators are fitted on.
        plan: The layers.
        weights: New weights of kept layers, for selectors that merge layers.
        selector: Name of that selector; None for a plain cut.
    """

    calibration: Calibration
    plan: PruningPlan
    weights: Mapping[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    selector: str | None = None


class CutFinder:
    """Finds and stores cuts.

    Args:
        model: The dense model.
        config: Settings.
        file: Where cuts are stored.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self, model: PreTrainedModel, config: CompareConfig, file: ResultsFile, progress: bool
    ) -> None:
        self.model, self.config, self.file, self.progress = model, config, file, progress
        self.depth = len(decoder_layers(model))
        self.rankings: dict[tuple[str, str, int], tuple[list[int], dict[str, Any]]] = {}
        # Merged weights that were found in this run, until their cell is measured.
        self.fresh: dict[tuple[str, int, str, int], Selection] = {}

    def find(self, calibration: Calibration) -> list[Cut]:
        """Return the plain cuts of one calibration, each once; store a line for every selector.

        Cuts with merged weights are not among them: see `merged`.
        """
        lines = [self._given(calibration, text) for text in self.config.layers]
        selectors = self.config.select if self.config.num_remove else ()
        for num_remove in self.config.num_remove:
            for name in selectors:
                line = self._stored(calibration, name, num_remove)
                lines.append(line or self._choose(calibration, name, num_remove))
        cuts = dict[tuple[int, ...], Cut]()
        for line in lines:
            if line.refused is None and not line.merged:
                layers = tuple(line.layers)
                cuts.setdefault(layers, Cut(calibration, PruningPlan(self.depth, layers)))
        return list(cuts.values())

    def merged(self, calibration: Calibration) -> list[tuple[CutLine, Callable[[], Cut]]]:
        """Return the cuts with merged weights, and what finds these weights again."""
        found = []
        for line in self.file.results.cuts:
            if line.merged and (line.calibration, line.num_windows) == _place(calibration):
                found.append((line, self._again(calibration, line)))
        return found

    def _again(self, calibration: Calibration, line: CutLine) -> Callable[[], Cut]:
        def make() -> Cut:
            key = (*_place(calibration), line.selector, line.num_remove)
            chosen = self.fresh.pop(key, None)
            if chosen is None:
                chosen = self._select(calibration, line.selector, line.num_remove)
            return Cut(calibration, chosen.plan, chosen.weights, line.selector)

        return make

    def _stored(self, calibration: Calibration, selector: str, budget: int) -> CutLine | None:
        wanted = (*_place(calibration), selector, budget)
        lines = self.file.results.cuts
        same = (
            x for x in lines if (x.calibration, x.num_windows, x.selector, x.num_remove) == wanted
        )
        return next(same, None)

    def _given(self, calibration: Calibration, text: str) -> CutLine:
        layers = list(parse_layers(text, self.depth))
        place = _place(calibration)
        for line in self.file.results.cuts:
            known = line.calibration, line.num_windows, line.selector, line.layers
            if known == (*place, GIVEN_LAYERS, layers):
                return line
        line = CutLine(*place, GIVEN_LAYERS, len(layers), layers)
        self.file.add(line)
        return line

    def _choose(self, calibration: Calibration, selector: str, budget: int) -> CutLine:
        start, place = time.perf_counter(), (*_place(calibration), selector, budget)
        try:
            chosen = self._select(calibration, selector, budget)
        except DistributedError:
            raise
        except GhostlayersError as error:
            line = CutLine(*place, refused=str(error))
        else:
            if selector in MERGING:
                self.fresh[place] = chosen
            line = CutLine(
                *place,
                layers=list(chosen.plan.removed),
                clusters=self._clusters(calibration) if selector == "lorp" else None,
                merged=selector in MERGING,
                selection=chosen.search or chosen.selection,
                seconds=round(time.perf_counter() - start, 3),
            )
        self.file.add(line)
        return line

    def _clusters(self, calibration: Calibration) -> list[list[int]]:
        settings = self.config.prune_config(num_remove=1)
        similarity = calibration.measured.similarity
        return lorp_clusters(similarity, settings.num_clusters, settings.seed)

    def _select(self, calibration: Calibration, selector: str, budget: int) -> Selection:
        """Let a selector choose; a ranking that serves every budget is made once."""
        place = calibration.name, selector, calibration.num_windows
        if place not in self.rankings and (selector in RANKED_BY or selector in IN_ORDER):
            ranking = self._ranking(calibration, selector)
            if ranking is not None:
                self.rankings[place] = ranking
        if place in self.rankings and budget <= len(self.rankings[place][0]):
            ranked, record = self.rankings[place]
            plan = PruningPlan(self.depth, tuple(sorted(ranked[:budget])))
            return Selection(plan, selection=record)
        return self._call(calibration, selector, budget)

    def _ranking(
        self, calibration: Calibration, selector: str
    ) -> tuple[list[int], dict[str, Any]] | None:
        """Rank the layers by a cut that is stored, or let the selector rank them."""
        most, place = max(self.config.num_remove), _place(calibration)
        for line in self.file.results.cuts:
            if (line.calibration, line.num_windows, line.selector) == (*place, selector):
                ranked = _ranked(selector, line.selection) if line.selection else []
                if len(ranked) >= most:
                    return ranked, line.selection or {}
        try:
            record = self._call(calibration, selector, most).selection
        except DistributedError:
            raise
        except GhostlayersError:
            return None  # the largest budget is refused: each is asked for by itself
        assert record is not None
        return _ranked(selector, record), record

    def _call(self, calibration: Calibration, selector: str, budget: int) -> Selection:
        settings = self._settings(calibration, selector, budget)
        allowed = allowed_layers(settings, self.model.config)
        quantized = is_quantized(self.model.config)
        check_model_selector(settings, self.depth, allowed, quantized=quantized)
        return choose_layers(
            self.model,
            calibration.windows.ids,
            settings,
            allowed=allowed,
            measured=calibration.measured,
            progress=self.progress,
        )

    def _settings(self, calibration: Calibration, selector: str, budget: int) -> PruneConfig:
        only_none = set(self.config.recover) == {NO_OPERATOR}
        operator = SEARCH_OPERATOR if selector == AUTO and not only_none else NO_OPERATOR
        return self.config.prune_config(
            num_remove=budget,
            select=selector,
            recover=operator,
            calibration=calibration.source,
            num_windows=calibration.num_windows,
        )


def _ranked(selector: str, record: dict[str, Any]) -> list[int]:
    """Return the layers in the order in which a selector removes them."""
    if selector in IN_ORDER:
        return [step["layer"] for step in record["order"]]
    by = RANKED_BY[selector]
    ordered = sorted(record["scores"], key=lambda entry: (entry[by], entry["layer"]))
    return [entry["layer"] for entry in ordered]


def _place(calibration: Calibration) -> tuple[str, int]:
    return calibration.name, calibration.num_windows


__all__ = ["Cut", "CutFinder"]
