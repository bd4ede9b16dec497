"""Pictures of quality: perplexity and accuracy against layers removed and against calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .report_data import Model, Study, Value, short_name, unique
from .report_quality_table import quality_table
from .report_quantity import BEYOND, OFF_SCALE, Getter, Quantity, dense_line, error_bars
from .report_style import (
    Mark,
    Panel,
    Picture,
    axis,
    row_labels,
    spec,
    text,
)


def quality_pictures(study: Study, looks: Mapping[str, Mark]) -> Iterator[Picture]:
    """Draw perplexity on each text, then accuracy, then what the calibration changes."""
    for index, label in enumerate(study.texts):
        yield _quality(
            study,
            looks,
            Quantity(f"perplexity-{index + 1}", f"Perplexity on {label}", _on(label)),
        )
    every = [study.dense, *study.models]
    for metric in ("acc", "acc_norm"):
        if any(model is not None and metric in model.accuracy for model in every):
            yield _quality(study, looks, _accuracy(metric, every))
    if len(study.calibrations) > 1 and any(not model.name for model in study.models):
        yield from _sensitivity(study, looks)


def _on(label: str) -> Getter:
    return lambda model: model.perplexity.get(label)


def _accuracy(metric: str, every: Sequence[Model | None]) -> Quantity:
    tasks = next(model.tasks for model in every if model is not None and model.tasks)
    names = [score["task"] for score in tasks["scores"]]
    over = f"mean of {len(names)} tasks" if len(names) > 1 else names[0] if names else "no task"
    title = f"Accuracy ({metric}), {over}"
    return Quantity(metric, title, lambda model: model.accuracy.get(metric), percent=True)


def _quality(study: Study, looks: Mapping[str, Mark], what: Quantity) -> Picture:
    models = [model for model in study.models if what.of(model) is not None]
    drawn = [model for model in study.main_models if what.of(model) is not None]
    counted = {model.num_removed for model in drawn}
    curves = len(counted - {None}) > 1
    if curves:
        drawn = [model for model in drawn if model.num_removed is not None]
    dense = None if study.dense is None else what.of(study.dense)
    what.end_at(dense, drawn)
    values = what.numbers([study.dense, *drawn])
    if curves:
        panels = _curves(drawn, looks, what, dense, values)
    elif drawn:
        panels = [_dots(drawn, looks, what, dense, values)]
    else:
        panels = []
    left_out = len(models) - len(drawn)
    caption = "Marks: measured, with ± one standard error. Dashed line: the dense model. "
    caption += "Higher is better." if what.percent else "Lower is better; the scale is logarithmic."
    if curves:
        caption += " One panel for each selector, on the same scale."
    if any(what.is_beyond(value) for m in drawn if (value := what.of(m)) is not None):
        caption += (
            f" Open triangles at the edge: above {BEYOND:.0f} times the dense model, off the scale."
        )
    if left_out:
        caption += f" {left_out} more in the table (other calibration, or layers not known)."
    used = unique(model.operator_label for model in drawn) if curves else []
    legend = [looks[name] for name in used if name in looks]
    return Picture(
        what.key,
        what.title,
        caption,
        panels,
        quality_table(study, models, what),
        legend,
        wide=curves,
    )


def _curves(
    models: Sequence[Model],
    looks: Mapping[str, Mark],
    what: Quantity,
    dense: Value | None,
    values: Sequence[float],
) -> list[Panel]:
    budgets = sorted({model.num_removed or 0 for model in models})
    gap = min(b - a for a, b in zip(budgets, budgets[1:], strict=False))
    panels = []
    for selector in unique(model.selector or short_name(model.name) for model in models):
        own = [m for m in models if (m.selector or short_name(m.name)) == selector]
        labels = unique(model.operator_label for model in own)
        data = [
            _line(
                [model for model in own if model.operator_label == label],
                looks[label],
                what,
                0.05 * gap * (index - (len(labels) - 1) / 2),
            )
            for index, label in enumerate(labels)
        ]
        layout = {
            "xaxis": axis(
                "layers removed",
                tickvals=budgets,
                range=[budgets[0] - 0.6 * gap, budgets[-1] + 0.6 * gap],
                showgrid=False,
            ),
            "yaxis": what.axis(values),
            **dense_line(what, dense, "y"),
        }
        alt = f"{what.title} for {selector}: " + "; ".join(
            f"{label} "
            + ", ".join(
                f"{what.show(what.of(m))} at {m.num_removed}"
                for m in own
                if m.operator_label == label
            )
            for label in labels
        )
        panels.append(Panel(spec(data, layout, 330), alt, selector))
    return panels


def _line(models: list[Model], mark: Mark, what: Quantity, shift: float) -> dict[str, Any]:
    models = sorted(models, key=lambda model: model.num_removed or 0)
    found = [what.of(model) for model in models]
    known = [(model, value) for model, value in zip(models, found, strict=True) if value]
    beyond = [what.is_beyond(value) for _, value in known]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [(model.num_removed or 0) + shift for model, _ in known],
        "y": [what.place(value) for _, value in known],
        "error_y": error_bars(
            [Value(v.value) if out else v for (_, v), out in zip(known, beyond, strict=True)],
            what.scale,
        ),
        "line": {"color": mark.color, "dash": mark.dash, "width": 2},
        "marker": {
            "color": mark.color,
            "symbol": [OFF_SCALE if out else mark.symbol for out in beyond],
            "size": 9,
        },
        "customdata": [
            f"{text(model.method)}<br>{model.num_removed} layers removed: {text(model.layers)}<br>"
            f"{what.axis_title} {what.show(value)}"
            for model, value in known
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _dots(
    models: Sequence[Model],
    looks: Mapping[str, Mark],
    what: Quantity,
    dense: Value | None,
    values: Sequence[float],
) -> Panel:
    known = [(model, value) for model in models if (value := what.of(model)) is not None]
    known.sort(key=lambda pair: pair[1].value, reverse=what.percent)
    names = _row_names([model for model, _ in known])
    data = []
    for name, (model, value) in zip(names, known, strict=True):
        mark, out = looks[model.operator_label], what.is_beyond(value)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [what.place(value)],
                "y": [name],
                "error_x": error_bars([Value(value.value) if out else value], what.scale),
                "marker": {
                    "color": mark.color,
                    "symbol": OFF_SCALE if out else mark.symbol,
                    "size": 12,
                },
                "hovertemplate": f"{name}<br>{what.show(value)}<extra></extra>",
            }
        )
    line = dense_line(what, dense, "x")
    notes = row_labels(
        {
            name: f"{name}: {what.show(Value(value.value))}"
            for name, (_, value) in zip(names, known, strict=True)
        }
    )
    layout = {
        "xaxis": what.axis(values, showgrid=True),
        "yaxis": axis(
            "",
            range=[len(names) - 0.7, -0.9],
            ticks="",
            type="category",
            showticklabels=False,
            showgrid=False,
        ),
        "margin": {"l": 8, "r": 12, "t": 26, "b": 8},
        "shapes": line.get("shapes", []),
        "annotations": [*line.get("annotations", []), *notes],
    }
    alt = f"{what.title}: " + "; ".join(
        f"{model.method} {what.show(value)}" for model, value in known
    )
    return Panel(spec(data, layout, 90 + 58 * len(known)), alt)


def _row_names(models: Sequence[Model]) -> list[str]:
    """Return a name for each model, all different."""
    names: list[str] = []
    for model in models:
        below = f"−{model.num_removed}" if model.num_removed else ""
        if model.name:
            below = ", ".join(filter(None, [short_name(model.name), below]))
        if model.selector is None:
            name = text(short_name(model.name))
        else:
            name = text(f"{model.method} ({below})" if below else model.method)
        twins = sum(other.split("\u200b")[0] == name for other in names)
        names.append(name + "\u200b" * twins)
    return names


def _sensitivity(study: Study, looks: Mapping[str, Mark]) -> Iterator[Picture]:
    """Draw perplexity on the first text against the windows of each calibration text."""
    if not study.texts or not study.budgets:
        return
    label, budget = study.texts[0], study.budgets[-1]
    what = Quantity("sensitivity", f"Perplexity on {label}", _on(label))
    cells = [m for m in study.models if not m.name and m.num_windows and what.of(m) is not None]
    best = study.best(m for m in cells if m.num_removed == budget)
    if best is None:
        return
    drawn = [m for m in cells if m.num_removed == budget and m.selector == best.selector]
    counts = sorted({model.num_windows or 0 for model in drawn})
    dense = None if study.dense is None else what.of(study.dense)
    what.end_at(dense, drawn)
    values = what.numbers([study.dense, *drawn])
    panels = []
    for source in unique(model.calibration_name for model in drawn):
        own = [model for model in drawn if model.calibration_name == source]
        data = []
        names = unique(model.operator_label for model in own)
        for index, name in enumerate(names):
            chosen = [m for m in own if m.operator_label == name]
            chosen.sort(key=lambda model: model.num_windows or 0)
            line = _line(chosen, looks[name], what, 0.0)
            shift = 0.05 * (index - (len(names) - 1) / 2)
            line["x"] = [counts.index(model.num_windows or 0) + shift for model in chosen]
            data.append(line)
        layout = {
            "xaxis": axis(
                "calibration windows",
                tickvals=list(range(len(counts))),
                ticktext=[str(count) for count in counts],
                range=[-0.5, len(counts) - 0.5],
                showgrid=False,
            ),
            "yaxis": what.axis(values),
            **dense_line(what, dense, "y"),
        }
        alt = f"Perplexity against windows of {source}, {best.selector}, {budget} layers removed."
        panels.append(Panel(spec(data, layout, 320), alt, source))
    yield Picture(
        "sensitivity",
        "What the calibration text changes",
        f"Perplexity on {label} with {budget} layers removed by {best.selector}, against the "
        "number of calibration windows. One panel for each calibration text, on the same scale.",
        panels,
        quality_table(study, drawn, what),
        [looks[name] for name in unique(model.operator_label for model in drawn)],
        wide=True,
    )


__all__ = ["quality_pictures"]
