"""Measure a grid of cuts and operators from few sweeps. Read this page for the order of things.

texts -> one first sweep each -> every selector's cuts -> dense model, states in front of the cuts
cuts -> groups -> one second sweep a group -> operators -> cells, those with the same start together

Each line of the result is stored when it is known; what is stored is not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import distributed
from .compare_calibration import Calibration, measure_calibrations
from .compare_cells import Job, Repairer, measured_line
from .compare_config import CompareConfig
from .compare_cuts import Cut, CutFinder
from .compare_evaluator import Evaluator
from .compare_fits import boundary_bytes
from .compare_results import CellLine, CompareResults, DenseLine, ResultsFile
from .compare_save import save_cell
from .compare_shared import share_cells
from .decoder import text_config
from .errors import GhostlayersError
from .model_checks import check_cache, check_causal, check_reloadable
from .operators import NO_OPERATOR
from .steps import cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .compare_fits import Key
    from .loading import ModelSource
    from .recovered import Ladder


@dataclass
class Comparison:
    """A comparison that runs.

    Attributes:
        model: The dense model; it is left as it is.
        tokenizer: Its tokenizer.
        config: Settings.
        file: What is there already, and where more goes.
        evaluator: What every model is measured on.
        source: Where the weights lie that checkpoints are copied from; None without.
        progress: Show progress bars when standard error is a terminal.
        say: Called with one line about each finished cell.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: CompareConfig
    file: ResultsFile
    evaluator: Evaluator
    source: ModelSource | None = None
    progress: bool = True
    say: Callable[[str], None] = lambda _line: None

    def run(self) -> CompareResults:
        """Measure what is not there yet.

        Raises:
            UnsupportedModelError: If the model is no decoder-only LM.
            CalibrationError: If a text is missing, or a state of the dense model is not finite.
        """
        check_reloadable(self.model)
        check_causal(self.model)
        check_cache(self.model, what="the dense model")
        calibrations = measure_calibrations(
            self.model, self.tokenizer, self.config, self.file, progress=self.progress
        )
        finder = CutFinder(self.model, self.config, self.file, self.progress)
        plain_cuts = {id(each): finder.find(each) for each in calibrations}
        jobs = {id(each): self._jobs(plain_cuts[id(each)]) for each in calibrations}
        if self.file.results.dense is None:
            order = [job.start for each in calibrations for job in jobs[id(each)]]
            with distributed.alone():  # every process keeps the states that its cells start from
                line = self.evaluator.dense(self.model, order)
            self.file.add(distributed.same(line))
        for each in calibrations:
            self._cells(each, jobs[id(each)])
            with distributed.alone():
                self._merged(each, finder)
        return self.file.results

    @property
    def dense(self) -> DenseLine:
        """The dense model's line."""
        assert self.file.results.dense is not None
        return self.file.results.dense

    def _done(self) -> dict[tuple[Any, ...], CellLine]:
        return {cell.key: cell for cell in self.file.results.cells}

    def _jobs(self, cuts: Sequence[Cut]) -> list[Job]:
        """List the cells that are not there yet, those with the same start together."""
        done = self._done()
        jobs = [
            Job(each, operator, fit)
            for each in cuts
            for operator in self.config.recover
            for fit in (self.config.fit if operator != NO_OPERATOR else ("dense",))
        ]
        order = {NO_OPERATOR: 0}
        jobs.sort(key=lambda job: (job.cut.plan.removed, order.get(job.operator, 1)))
        return [job for job in jobs if job.key not in done]

    def _cells(self, calibration: Calibration, jobs: Sequence[Job]) -> None:
        repairer = Repairer(self.model, self.config, calibration, self.progress)
        ready = []
        for job in jobs:
            known = self._without_calibration(job)
            if known is not None:
                self._store(known)
                continue
            try:
                repairer.check(job)
            except GhostlayersError as error:
                self._store(job.line(refused=str(error)))
                continue
            ready.append(job)

        def measure(own: Sequence[Job]) -> None:
            for group in self._groups(own):
                self._measure(repairer, group)

        share_cells(self.file, ready, measure)

    def _without_calibration(self, job: Job) -> CellLine | None:
        """Return a cell without operator from that of another calibration: the same model."""
        cell = None if job.operator != NO_OPERATOR or job.cut.weights else self._bare(job)
        place = job.cut.calibration
        return cell and replace(
            cell, calibration=place.name, num_windows=place.num_windows, seconds=0.0
        )

    def _bare(self, job: Job) -> CellLine | None:
        """Return a stored cell of the same cut without operator, of any calibration."""
        layers = list(job.cut.plan.removed)
        for cell in self.file.results.cells:
            if cell.operator == NO_OPERATOR and cell.layers == layers and cell.selector is None:
                return cell
        return None

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Split cells so that the moments and the operators of a group fit into memory."""
        size = int(text_config(self.model.config).hidden_size)
        room = self.config.memory("moments_memory")
        group: list[Job] = []
        keys: set[Key] = set()
        for index, job in enumerate(jobs):
            new_cut = index == 0 or jobs[index - 1].cut is not job.cut
            rest = [other for other in jobs[index:] if other.cut is job.cut] if new_cut else []
            more = keys.union(*(other.wanted for other in rest)) if rest else keys
            if group and new_cut and _bytes(more, size) > room:
                yield group
                group, more = [], set().union(*(other.wanted for other in rest))
            group.append(job)
            keys = more
        if group:
            yield group

    def _measure(self, repairer: Repairer, jobs: Sequence[Job]) -> None:
        ladders, reason = self._ladders(repairer, jobs)
        pruned: PreTrainedModel | None = None
        for index, job in enumerate(jobs):
            start = time.perf_counter()
            try:
                if pruned is None or jobs[index - 1].cut is not job.cut:
                    pruned = None
                    pruned = cut(self.model, job.cut.plan)
                if job.shared and reason is not None:
                    raise reason
                if self.evaluator.texts is not None:
                    self.evaluator.texts.prepare([other.start for other in jobs[index:]])
                line = self._cell(repairer, job, pruned, ladders)
            except GhostlayersError as error:
                line = job.line(refused=str(error))
            self._store(replace(line, seconds=round(time.perf_counter() - start, 3)))
        repairer.forget()

    def _ladders(
        self, repairer: Repairer, jobs: Sequence[Job]
    ) -> tuple[dict[Key, Ladder], GhostlayersError | None]:
        """Fit what a group needs; or say why that cannot be done."""
        from .compare_fits import GridFitter

        wanted = [key for job in jobs for key in job.wanted]
        fitter = GridFitter(self.model, self.config, repairer.calibration, self.progress)
        try:
            return fitter.fit(wanted), None
        except GhostlayersError as error:
            return {}, error

    def _cell(
        self,
        repairer: Repairer,
        job: Job,
        pruned: PreTrainedModel,
        ladders: dict[Key, Ladder],
    ) -> CellLine:
        recovery, model = repairer.repair(job, pruned, ladders)
        fits, plan = recovery.used, job.cut.plan
        if self.config.save_checkpoints and (distributed.is_main() or not job.cut.weights):
            save_cell(self, job, recovery, model, repairer.settings(job))
        bare = self._bare(job) if not fits and job.operator != NO_OPERATOR else None
        if bare is not None:  # the guard left nothing: the model is that of another cell
            line = measured_line(job, recovery, {}, self.dense, {})
            same = ("perplexity", "tasks", "speed", "parameters")
            return replace(line, **{name: getattr(bare, name) for name in same})
        perplexity: dict[str, Any] = {}
        if self.evaluator.texts is not None:
            if job.cut.weights:
                perplexity = self.evaluator.texts.score_whole(model, plan)
            else:
                perplexity = self.evaluator.texts.score(pruned, plan, job.start, fits)
        whole = self.evaluator.whole(model, self.dense)
        return measured_line(job, recovery, perplexity, self.dense, whole)

    def _merged(self, calibration: Calibration, finder: CutFinder) -> None:
        """Measure cuts with merged weights; no operator is fitted to those."""
        done = self._done()
        repairer = Repairer(self.model, self.config, calibration, self.progress)
        for line, make in finder.merged(calibration):
            key = (calibration.name, calibration.num_windows, tuple(line.layers))
            if (*key, NO_OPERATOR, "dense", line.selector) not in done:
                self._measure(repairer, [Job(make(), NO_OPERATOR, "dense")])

    def _store(self, line: CellLine) -> None:
        self.file.add(line)
        done, what = len(self.file.results.cells), f"{line.operator} ({line.fit})"
        values = {n: v["perplexity"] for n, v in line.perplexity.items()}  # null: infinite
        texts = ", ".join(f"{n} {'inf' if v is None else f'{v:.3f}'}" for n, v in values.items())
        result = f"refused: {line.refused}" if line.refused else texts
        self.say(f"cell {done}: layers {line.layers}, {what}: {result} ({line.seconds:.1f} s)")


def _bytes(keys: set[Key], size: int) -> int:
    """Estimate the memory of the moments of operators at boundaries."""
    by_boundary: dict[Any, list[str]] = {}
    for operator, boundary in keys:
        by_boundary.setdefault(boundary, []).append(operator)
    return sum(boundary_bytes(operators, size) for operators in by_boundary.values())


__all__ = ["Comparison"]
