"""One cell of a comparison: a cut with one operator, repaired and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .boundary_record import boundary_entries
from .compare_calibration import Calibration
from .compare_config import CompareConfig
from .compare_cuts import Cut
from .compare_fits import is_shared
from .compare_results import CellLine, DenseLine
from .compare_scoring import compared
from .decoder import share_tensors, text_config
from .fold_plan import plan_folds
from .guard_text import GuardScorer, guard_scorer
from .model_checks import check_attachable
from .model_selection import change_layers_
from .operators import (
    ATTACHING,
    FOLDING,
    GUARDED,
    NO_OPERATOR,
    REPLACING,
    check_size,
)
from .recovered import Recovery, finish_
from .recovery import recover_
from .suffix import first_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .compare_fits import Key
    from .recovered import Ladder


@dataclass(frozen=True)
class Job:
    """A cell to measure.

    Attributes:
        cut: The cut.
        operator: Operator asked for.
        fit: States to fit on.
    """

    cut: Cut
    operator: str
    fit: str

    @property
    def key(self) -> tuple[Any, ...]:
        """As `CellLine.key`."""
        place = self.cut.calibration.name, self.cut.calibration.num_windows
        return (*place, self.cut.plan.removed, self.operator, self.fit, self.cut.selector)

    @property
    def start(self) -> int:
        """First layer of the dense model that the cut or its repair changes."""
        plan = self.cut.plan
        if self.operator in FOLDING:
            return max(0, plan.boundaries[0].start - 1)
        return first_state(plan)

    @property
    def shared(self) -> bool:
        """Whether its repairs are fitted from a sweep that other cells share."""
        alone = self.fit == "sequential" and len(self.cut.plan.boundaries) > 1
        return is_shared(self.operator) and not alone

    @property
    def wanted(self) -> list[Key]:
        """What is fitted for it in the shared sweep."""
        if not self.shared:
            return []
        return [(self.operator, boundary) for boundary in self.cut.plan.boundaries]

    def line(self, **values: Any) -> CellLine:
        """Return a line of this cell."""
        calibration, plan = self.cut.calibration, self.cut.plan
        return CellLine(
            calibration=calibration.name,
            num_windows=calibration.num_windows,
            layers=list(plan.removed),
            operator=self.operator,
            fit=self.fit,
            selector=self.cut.selector,
            **values,
        )


class Repairer:
    """Repairs the cuts of one calibration.

    Args:
        model: The dense model.
        config: Settings.
        calibration: What operators are fitted on.
        progress: Show progress bars when standard error is a terminal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: CompareConfig,
        calibration: Calibration,
        progress: bool = True,
    ) -> None:
        self.model, self.config, self.calibration = model, config, calibration
        self.progress = progress
        self.guard: GuardScorer | None = None

    def settings(self, job: Job) -> Any:
        """Return the settings with which `prune` would make the cell."""
        return self.config.prune_config(
            layers=",".join(map(str, job.cut.plan.removed)),
            recover=job.operator,
            fit=job.fit,
            calibration=self.calibration.source,
            num_windows=self.calibration.num_windows,
        )

    def check(self, job: Job) -> None:
        """Check, before any sweep, that a cut can be repaired as asked.

        Raises:
            GhostlayersError: If the architecture cannot take the operator.
        """
        if job.operator == NO_OPERATOR:
            return
        settings = self.settings(job)
        size = int(text_config(self.model.config).hidden_size)
        check_size(settings.rank, size)
        if job.operator in ATTACHING:
            check_attachable(self.model)
        if job.operator in FOLDING:
            plan_folds(self.model, job.cut.plan, settings)

    def repair(
        self, job: Job, pruned: PreTrainedModel, ladders: Mapping[Key, Ladder]
    ) -> tuple[Recovery, PreTrainedModel]:
        """Repair a cut.

        Args:
            job: The cell.
            pruned: The pruned model; it is left as it is.
            ladders: What the shared sweep fitted.

        Returns:
            The repairs and the repaired model.
        """
        plan, model = job.cut.plan, share_tensors(pruned)
        if job.operator == NO_OPERATOR:
            changed = change_layers_(model, plan, job.cut.weights)
            return Recovery(changed=changed), model
        settings, ids = self.settings(job), self.calibration.windows.ids
        guard = self._guard() if job.operator in GUARDED else None
        if not job.shared:
            massive = self.calibration.massive
            repaired = recover_(
                model,
                self.model,
                plan,
                settings,
                ids,
                massive,
                scorer=guard,
                progress=self.progress,
            )
            return repaired, model
        own = {boundary: ladders[job.operator, boundary] for boundary in plan.boundaries}
        replacing = job.operator in REPLACING
        repaired = finish_(
            model,
            self.model,
            plan,
            settings,
            ids,
            own,
            warnings=plan_folds(self.model, plan, settings).warnings if replacing else (),
            scorer=guard,
            progress=self.progress,
        )
        return repaired, model

    def forget(self) -> None:
        """Free the guard's states."""
        if self.guard is not None:
            self.guard.forget()

    def _guard(self) -> GuardScorer:
        if self.guard is None:
            self.guard = guard_scorer(
                self.model,
                self.calibration.windows.ids,
                batch_size=self.config.batch_size,
                progress=self.progress,
            )
        return self.guard


def measured_line(
    job: Job,
    recovery: Recovery,
    perplexity: Mapping[str, Mapping[str, Any]],
    dense: DenseLine,
    whole: Mapping[str, Any],
) -> CellLine:
    """Put together what is known of a cell."""
    entries = boundary_entries(job.cut.plan, recovery)
    verdict = recovery.verdict
    return job.line(
        used=[entry["operator"] for entry in entries],
        boundaries=entries,
        guard=None if verdict is None else verdict.record,
        perplexity=compared(perplexity, dense.perplexity),
        refinement=recovery.refinement,
        warnings=list(recovery.warnings),
        **whole,
    )


__all__ = ["Job", "Repairer", "measured_line"]
