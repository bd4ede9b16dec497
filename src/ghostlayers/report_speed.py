"""The picture of speed against quality, with the models that no other beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .report_data import Model, Study, short_name
from .report_quantity import BEYOND, OFF_SCALE, upper_edge
from .report_style import GREY, Mark, Panel, Picture, Table, axis, log_axis, number, spec, text

PHASES = (("decode", "decoding"), ("prefill", "prefill"))


@dataclass(frozen=True)
class Point:
    """A model's speed and perplexity; both relative to nothing but their axes."""

    model: Model
    speed: float
    perplexity: float


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in speed and perplexity, the slowest first.

    One point beats another if it is no worse in both and better in one.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.speed, each.perplexity)):
        if not front or point.perplexity < front[-1].perplexity:
            front.append(point)
    return front[::-1]


def speed_pictures(study: Study, looks: Mapping[str, Mark]) -> Iterator[Picture]:
    """Draw perplexity on the first text against the speed-up, or the share of layers without."""
    if not study.texts:
        return
    label = study.texts[0]
    models = [model for model in study.main_models if label in model.perplexity]
    if not models:
        return
    timed = [model for model in models if model.speed and model.speed["rows"]]
    panels, front_names = [], []
    dense = study.dense if study.dense is not None and label in study.dense.perplexity else None
    if timed:
        for phase, name in PHASES:
            found = [_timed(model, label, phase) for model in timed]
            known = [point for point in found if point is not None]
            if known:
                first = timed[0].speed["rows"][0] if timed[0].speed else {}
                title = f"{name}, batch {first['batch_size']}, prompt {first['length']}"
                panel, front = _panel(known, dense, label, looks, f"speed-up of {name}", title)
                panels.append(panel)
                front_names.append((name, front))
    elif study.num_layers:
        points = [
            Point(m, _promise(m), m.perplexity[label].value)
            for m in models
            if m.num_removed is not None and m.num_layers
        ]
        if points:
            panel, front = _panel(points, dense, label, looks, "dense layers / layers left", "")
            panels.append(panel)
            front_names.append(("by number of layers", front))
    if not panels:
        return
    how = (
        "Times of the dense model divided by times of each model, measured."
        if timed
        else "Speed was not measured: the axis is the ratio that the number of layers promises."
    )
    table = _times(study, timed) if timed else _promised(models, label)
    used = [m.operator_label for m in (timed or models) if m.operator_label in looks]
    yield Picture(
        "speed",
        "Speed against quality",
        f"{how} Perplexity on {label}, lower right is better. Ringed and joined: no other model is "
        "both faster and better (the Pareto front, which takes the numbers without their noise). "
        f"Open triangles: above {BEYOND:.0f} times the dense model."
        + "".join(
            f" Front{f' in {name}' if len(front_names) > 1 else ''}: "
            f"{', '.join(map(_plain, front))}."
            for name, front in front_names
        ),
        panels,
        table,
        [looks[name] for name in dict.fromkeys(used)],
        wide=len(panels) > 1,
    )


def _promise(model: Model) -> float:
    """Return dense layers / layers left."""
    depth = model.num_layers or 1
    return depth / max(1, depth - (model.num_removed or 0))


def _timed(model: Model, label: str, phase: str) -> Point | None:
    speedup = (model.speed or {})["rows"][0][phase].get("speedup")
    return None if speedup is None else Point(model, speedup, model.perplexity[label].value)


def _panel(
    points: Sequence[Point],
    dense: Model | None,
    label: str,
    looks: Mapping[str, Mark],
    axis_title: str,
    title: str,
) -> tuple[Panel, list[Point]]:
    every = list(points)
    if dense is not None:
        every.append(Point(dense, 1.0, dense.perplexity[label].value))
    perplexities = [point.perplexity for point in every]
    top = upper_edge(min(perplexities) if dense is None else perplexities[-1], perplexities)
    front = pareto_front(every)
    data: list[Any] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [point.speed for point in front],
            "y": [min(point.perplexity, top) for point in front],
            "line": {"color": GREY, "width": 1.5, "dash": "dot"},
            "marker": {"size": 19, "symbol": "circle-open", "color": GREY, "line": {"width": 2}},
            "hoverinfo": "skip",
        }
    ]
    operators = dict.fromkeys(point.model.operator_label for point in points)
    for operator in operators:
        own = [point for point in points if point.model.operator_label == operator]
        mark = looks[operator]
        data.append(_scatter(own, mark.color, mark.symbol, top))
    if dense is not None:
        data.append(_scatter(every[-1:], GREY, "star", top))
    speeds = [point.speed for point in every]
    pad = 0.12 * (max(speeds) - min(speeds)) + 0.01
    notes = [
        {
            "x": point.speed,
            "y": math.log10(min(point.perplexity, top)),
            "text": _note(point),
            "showarrow": False,
            "font": {"size": 11},
            "xanchor": "left",
            "xshift": 11,
            "yshift": -11,
        }
        for point in front
    ]
    layout = {
        "xaxis": axis(f"{axis_title}, ×", range=[min(speeds) - pad, max(speeds) + 3 * pad]),
        "yaxis": log_axis("perplexity", [min(each, top) for each in perplexities]),
        "annotations": notes,
    }
    alt = "Pareto front: " + "; ".join(
        f"{_plain(point)} at {point.speed:.2f} times the speed, perplexity {point.perplexity:.2f}"
        for point in front
    )
    return Panel(spec(data, layout, 400), alt, title), front


def _plain(point: Point) -> str:
    model = point.model
    if model.selector is None:
        return "dense" if point.speed == 1.0 else short_name(model.name)
    return f"{model.method} −{model.num_removed}"


def _note(point: Point) -> str:
    model = point.model
    if model.selector is None:
        return text(_plain(point))
    return f"−{model.num_removed}"


def _scatter(points: Sequence[Point], color: str, symbol: str, top: float) -> dict[str, Any]:
    symbols = [OFF_SCALE if point.perplexity > top else symbol for point in points]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [point.speed for point in points],
        "y": [min(point.perplexity, top) for point in points],
        "marker": {"color": color, "symbol": symbols, "size": 10},
        "customdata": [
            f"{text(_plain(point))}<br>perplexity {point.perplexity:.2f}" for point in points
        ],
        "hovertemplate": "%{customdata}<br>%{x:.3f} ×<extra></extra>",
    }


def _times(study: Study, timed: Sequence[Model]) -> Table:
    rows = []
    every = [study.dense, *timed] if study.dense is not None else list(timed)
    for model in every:
        if model is None or not model.speed:
            continue
        for row in model.speed["rows"]:
            cells = [model.method if model.selector else short_name(model.name or "dense")]
            cells += ["–" if model.num_removed is None else str(model.num_removed)]
            cells += [str(row["batch_size"]), str(row["length"])]
            for phase, _ in PHASES:
                part = row[phase]
                spread = "" if part.get("iqr_s") is None else f" ± {500 * part['iqr_s']:.2f}"
                cells += [f"{1000 * part['median_s']:.2f}{spread}", number(part.get("speedup"), 3)]
            cells.append(number(model.speed.get("promised_speedup"), 3))
            share = ((row.get("operator") or {}).get("decode") or {}).get("share")
            cells.append("–" if share is None else f"{100 * share:.1f}")
            peak = row.get("peak_memory_bytes")
            cells.append("–" if peak is None else f"{peak / 1e6:.0f}")
            rows.append(cells)
    header = ["model", "removed", "batch", "prompt", "decode, ms a token", "×", "prefill, ms", "×"]
    header += ["× promised by layers", "repair's share of decoding, %", "peak memory, MB"]
    return Table(header, rows, "Median ± half the interquartile range")


def _promised(models: Sequence[Model], label: str) -> Table:
    rows = [
        [
            model.method,
            "–" if model.num_removed is None else str(model.num_removed),
            "–" if not model.num_layers or model.num_removed is None else f"{_promise(model):.3f}",
            f"{model.perplexity[label].value:.2f}",
        ]
        for model in models
    ]
    return Table(["model", "removed", "× promised by layers", "perplexity"], rows, label)


__all__ = ["Point", "pareto_front", "speed_pictures"]
