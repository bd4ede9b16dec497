"""The table behind a picture of quality: every model, as measured."""

from __future__ import annotations

from collections.abc import Sequence

from .report_data import Model, Study, Value, short_name
from .report_quantity import Quantity
from .report_style import Table


def quality_table(study: Study, models: Sequence[Model], what: Quantity) -> Table:
    """Return a row for each model."""
    dense = None if study.dense is None else what.of(study.dense)
    header = ["selector", "repair", "removed", "layers", "calibration"]
    header += [what.axis_title, "difference" if what.percent else "ratio to dense"]
    rows = []
    if dense is not None:
        rows.append(["dense", "–", "0", "none", "–", what.show(dense), "–"])
    for model in models:
        value = what.of(model)
        assert value is not None  # only these are passed
        rows.append(
            [
                model.selector or short_name(model.name),
                model.operator_label or "–",
                "–" if model.num_removed is None else str(model.num_removed),
                model.layers,
                model.calibration or "–",
                what.show(value),
                _against(what, model, value, dense),
            ]
        )
    return Table(header, rows, f"{what.title}, ± standard error")


def _against(what: Quantity, model: Model, value: Value, dense: Value | None) -> str:
    if dense is None:
        return "–"
    if not what.percent:
        return f"{value.value / dense.value:.3f}"
    entry = ((model.tasks or {}).get("average") or {}).get(what.key) or {}
    if entry.get("difference") is None:
        return f"{100 * (value.value - dense.value):+.1f}"
    spread = entry.get("difference_stderr")
    own = "" if spread is None else f" ± {100 * spread:.1f}"
    return f"{100 * entry['difference']:+.1f}{own}"


__all__ = ["quality_table"]
