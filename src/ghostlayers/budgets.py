"""Budgets by size: the fewest layers whose removal brings a model below a limit.

Layers may differ in size, and operators add to it, so the number of layers depends on which ones
go: the selector is asked for 1, 2, 3, ... layers until its plan meets the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from .budget_values import UNITS, budget_kind, flag, format_quantity, parse_quantity
from .decoder import text_config
from .errors import PlanError
from .model_sizes import (
    HEADER_BYTES,
    ModelSizes,
    byte_sizes,
    counted_parameters,
    operator_sizes,
    structure,
)
from .operators import ATTACHING
from .plan import PruningPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import PruneConfig
    from .loading import ModelSource
    from .selection import Selection

# An attached operator has at most a (C, C) map and this many vectors (bias, shift, direction).
OPERATOR_VECTORS = 3
OPERATOR_TENSORS = 4
Chooser = Callable[[int], "Selection"]


@dataclass(frozen=True)
class SizeBudget:
    """An upper limit on what stays of a model.

    Attributes:
        kind: `sparsity`, `target_params` or `target_bytes`.
        given: Its value as it was given.
        sizes: Parameters or bytes of the dense model.
        operator: What one operator adds at most; 0 if none is attached or counted.
    """

    kind: str
    given: Any
    sizes: ModelSizes
    operator: int = 0

    @property
    def dense(self) -> int:
        """Amount that the dense model has: in its decoder layers for `sparsity`, else in all."""
        return self.sizes.in_layers if self.kind == "sparsity" else self.sizes.total

    @property
    def limit(self) -> Fraction:
        """What may stay."""
        if self.kind == "sparsity":  # the decimal that was written, so that 6 of 30 are 0.2
            return (1 - Fraction(repr(float(self.given)))) * self.dense
        return Fraction(parse_quantity(self.kind, self.given))

    def stays(self, plan: PruningPlan) -> int:
        """Return what stays after a plan, with an operator at every boundary."""
        operators = self.operator * len(plan.boundaries)
        return self.dense - self.sizes.removed(plan.removed) + operators

    def is_met(self, plan: PruningPlan) -> bool:
        """Say whether a plan brings the model below the limit."""
        return self.stays(plan) <= self.limit

    def fewest(self, allowed: Sequence[int]) -> int:
        """Return the least number of allowed layers that could meet the limit.

        Raises:
            PlanError: If the dense model meets it already, or no cut can.
        """
        if self.limit >= self.dense:
            raise PlanError(
                f"`{self.kind}` is {self.given} and the dense model has {self._written(self.dense)}"
                " already: nothing would be removed. Lower it."
            )
        held = sorted((self.sizes.held_by(layer) for layer in allowed), reverse=True)
        most = min(len(held), self.sizes.num_layers - 1)
        stays = self.dense + self.operator
        for count, amount in enumerate(held[:most], start=1):
            stays -= amount
            if stays <= self.limit:
                return count
        removed = self.sizes.removed(allowed) if most == len(held) else sum(held[:most])
        raise self._unreachable(
            self.dense - removed + self.operator,
            f"without all {most} layers that may go",
            "protect fewer layers",
        )

    def choose(self, allowed: Sequence[int], choose: Chooser, select: str) -> Selection:
        """Ask a selector for more and more layers until its plan meets the limit.

        Args:
            allowed: Layers that may go.
            choose: Gives the selection for a number of layers.
            select: Name of the selector, for the message.

        Raises:
            PlanError: If no number of layers meets the limit.
        """
        best = self.dense
        for count in range(self.fewest(allowed), min(len(allowed), self.sizes.num_layers - 1) + 1):
            try:
                chosen = choose(count)
            except PlanError:
                continue  # documented: this selector has no answer for this number
            if self.is_met(chosen.plan):
                return chosen
            best = min(best, self.stays(chosen.plan))
        raise self._unreachable(best, f"with `select` {select}", "choose another selector")

    def _unreachable(self, least: int, how: str, advice: str) -> PlanError:
        if self.kind == "sparsity":
            share = f"{float(1 - Fraction(least, self.dense)):.4f}"
            return PlanError(
                f"`sparsity` is {self.given}, but {how} the share of decoder-layer parameters that "
                f"goes is {share}. Allowed: above 0 to {share}; lower it or {advice}."
            )
        return PlanError(
            f"`{self.kind}` is {self.given}, but {how} {self._written(least)} stay. Allowed: "
            f"{format_quantity(self.kind, least)} to below "
            f"{format_quantity(self.kind, self.dense)}; raise it or {advice}."
        )

    def _written(self, amount: int) -> str:
        what = {"target_params": " parameters", "target_bytes": " of weight files"}
        return format_quantity(self.kind, amount) + what[self.kind]


def size_budget(
    config: PruneConfig,
    model: PreTrainedModel,
    hidden_size: int,
    *,
    source: ModelSource | None = None,
) -> SizeBudget | None:
    """Return the size budget that a configuration gives, or None if it gives another one.

    Args:
        config: Settings.
        model: The dense model; for parameters also one without weights (`structure`).
        hidden_size: C.
        source: Where the weights lie that will be copied; see `byte_sizes`.
    """
    kind = budget_kind(config)
    rows = hidden_size if config.rank is None else 2 * config.rank
    operator = hidden_size * (rows + OPERATOR_VECTORS) if config.recover in ATTACHING else 0
    if kind == "sparsity":
        return SizeBudget(kind, config.sparsity, counted_parameters(model))
    if kind == "target_params":
        return SizeBudget(kind, config.target_params, counted_parameters(model), operator)
    if kind == "target_bytes":
        headers = HEADER_BYTES * OPERATOR_TENSORS if operator else 0
        sizes = byte_sizes(model, source, config.dtype)
        operator = operator * model.dtype.itemsize + headers
        return SizeBudget(kind, config.target_bytes, sizes, operator)
    return None


def check_reachable(config: PruneConfig, model_config: Any, allowed: Sequence[int]) -> None:
    """Refuse a budget by parameters that cannot be met, before any weight is loaded.

    Raises:
        PlanError: If the dense model meets it already, or no cut can.
    """
    if budget_kind(config) in ("sparsity", "target_params"):
        hidden_size = text_config(model_config).hidden_size
        budget = size_budget(config, structure(model_config), hidden_size)
        assert budget is not None
        budget.fewest(allowed)


def budget_record(
    config: PruneConfig,
    plan: PruningPlan,
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    *,
    budget: SizeBudget | None = None,
    probes: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Say which budget was given, what it came to and why, as JSON values.

    Args:
        config: Settings.
        plan: The plan.
        dense: The dense model, or one of its structure without weights.
        pruned: The pruned and repaired model, for the operators that are in it.
        budget: The budget by size, if it is one.
        probes: What `max_ppl_ratio` tried, the last one that passed being the plan.

    Returns:
        `kind`, `value`, `num_remove`, `achieved` (share of decoder-layer parameters; parameters,
        bytes or ratio for those budgets), `reason` (one line) and `probes`.
    """
    kind, num_remove = budget_kind(config), len(plan.removed)
    value = getattr(config, kind)
    achieved: float
    if kind == "max_ppl_ratio":
        achieved = max(probe["ratio"] for probe in probes if probe["num_remove"] == num_remove)
        more = [probe for probe in probes if probe["num_remove"] == num_remove + 1]
        text = f"held-out perplexity {achieved:.4g} x dense"
        text += f"; {num_remove + 1} layers: {_outcome(more[0])}" if more else "; all that may go"
    elif kind in UNITS:
        assert budget is not None
        operators = operator_sizes(pruned)[kind == "target_bytes"]
        achieved = budget.dense - budget.sizes.removed(plan.removed) + operators
        now, before = (format_quantity(kind, amount) for amount in (achieved, budget.dense))
        what = "parameters" if kind == "target_params" else "of weight files"
        text = f"{now} {what}, dense {before}"
    else:
        sizes = counted_parameters(dense) if budget is None else budget.sizes
        achieved = sizes.removed(plan.removed) / max(sizes.in_layers, 1)
        text = f"{100 * achieved:.1f} % of decoder-layer parameters"
    written = f"{num_remove} of {plan.num_layers} layers ({text})"
    return {
        "kind": kind,
        "value": value,
        "num_remove": num_remove,
        "achieved": achieved,
        "reason": f"{flag(kind)} {value} -> {written}",
        "probes": list(probes),
    }


def _outcome(probe: dict[str, Any]) -> str:
    return probe["reason"] or f"{probe['ratio']:.4g} x"
