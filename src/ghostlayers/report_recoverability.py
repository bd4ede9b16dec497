"""The picture of what a linear repair leaves of each contiguous cut's error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .plan import PruningPlan
from .report_data import Study
from .report_layers import shown_cut
from .report_parts import CutErrors, best_cuts
from .report_style import PALETTE, Mark, Panel, Picture, Table, axis, spec

BEST = Mark("least error after repair of that many layers", PALETTE[4], "diamond", "solid")


def recoverability_picture(study: Study) -> Picture:
    """Draw, for every contiguous cut, the error after a linear repair and the share it leaves."""
    model, removed = shown_cut(study)
    titled = len(study.recoverability) > 1
    panels, rows = [], []
    for errors in study.recoverability:
        where = f", {errors.calibration}" if titled else ""
        panels.append(_heat_map(errors, errors.after, "error after repair, %", where, removed))
        panels.append(_heat_map(errors, errors.ratio, "share of the error left, %", where, removed))
        rows += _rows(errors)
    first = study.recoverability[0]
    tokens = ""
    if first.held_out_tokens is not None:
        tokens = f"Measured on {first.held_out_tokens} tokens that the fit has not seen. "
    frames = f" White frames: what {model.method} removes." if model is not None else ""
    return Picture(
        "recoverability",
        "How well a linear map repairs each cut",
        "Every contiguous cut: its first layer and how many layers go. Left: relative error of the "
        "hidden state behind the cut after the best linear map. Right: that error as a share of "
        f"the error without repair. {tokens}Dark is good.{frames} A small error is no promise of a "
        "low perplexity.",
        panels,
        Table(
            ["first layer", "last layer", "removed", "before, %", "after, %", "left, %", "text"],
            rows,
            "Relative error before and after a linear repair, and the share that is left",
        ),
        [BEST],
        wide=True,
    )


def _heat_map(
    errors: CutErrors,
    matrix: Sequence[Sequence[float | None]],
    unit: str,
    where: str,
    removed: Sequence[int],
) -> Panel:
    depth = errors.num_layers
    cuts = [(start, stop) for start, stop, *_ in errors.cuts()]
    sizes = range(1, 1 + max(stop - start for start, stop in cuts))
    z: list[list[float | None]] = [[None] * depth for _ in sizes]
    hover: list[list[str]] = [[""] * depth for _ in sizes]
    for start, stop, before, after, ratio in errors.cuts():
        value = matrix[start][stop]
        z[stop - start - 1][start] = None if value is None else 100 * value
        hover[stop - start - 1][start] = (
            f"{_named(start, stop)}<br>before {100 * before:.2f} %<br>"
            f"after {100 * after:.2f} %<br>left {100 * ratio:.1f} %"
        )
    known = sorted(value for row in z for value in row if value is not None)
    top = min(known[-1], 2 * known[int(0.9 * (len(known) - 1))]) or 1.0
    bar = {"orientation": "h", "thickness": 10, "len": 0.9, "y": -0.17, "yanchor": "top"}
    title = unit if top == known[-1] else f"{unit}; {top:.0f} and more alike"
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "x": list(range(depth)),
            "y": list(sizes),
            "z": z,
            "customdata": hover,
            "colorscale": "Cividis",
            "zmin": 0,
            "zmax": top,
            "hoverongaps": False,
            "hovertemplate": "%{customdata}<extra></extra>",
            "colorbar": {**bar, "title": {"text": title, "side": "bottom"}},
        }
    ]
    data.append(_best_marks(errors))
    ticks = {"dtick": 5 if depth > 12 else 1, "tick0": 0, "showgrid": False}
    layout = {
        "xaxis": axis("first layer removed", range=[-0.5, depth - 0.5], **ticks),
        "yaxis": axis("layers removed", range=[0.5, sizes[-1] + 0.5], **ticks),
        "shapes": _frames(depth, removed, {(start, stop) for start, stop in cuts}),
    }
    least = min(errors.cuts(), key=lambda cut: cut[3])
    alt = (
        f"Heat map of {len(cuts)} contiguous cuts of {depth} layers, {unit}, from {known[0]:.1f} "
        f"to {known[-1]:.1f}; the least error after repair is that of {_named(*least[:2])}."
    )
    return Panel(spec(data, layout, 400), alt, unit[0].upper() + unit[1:] + where)


def _best_marks(errors: CutErrors) -> dict[str, Any]:
    """Return the marks of the least error after repair, one for each number of layers."""
    best, outline = best_cuts(errors), {"color": "#ffffff", "width": 1}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(best.values()),
        "y": list(best),
        "marker": {"symbol": BEST.symbol, "size": 8, "color": BEST.color, "line": outline},
        "hoverinfo": "skip",
    }


def _frames(depth: int, removed: Sequence[int], known: set[tuple[int, int]]) -> list[Any]:
    shapes = []
    for boundary in PruningPlan(depth, tuple(removed)).boundaries if removed else ():
        if (boundary.start, boundary.stop) in known:
            size = boundary.stop - boundary.start
            place: dict[str, Any] = {"type": "rect", "x0": boundary.start - 0.5}
            place |= {"x1": boundary.start + 0.5, "y0": size - 0.5, "y1": size + 0.5}
            shapes.append({**place, "line": {"color": "#000000", "width": 4}})
            shapes.append({**place, "line": {"color": "#ffffff", "width": 2}})
    return shapes


def _named(start: int, stop: int) -> str:
    return f"layers {start}–{stop - 1}" if stop - start > 1 else f"layer {start}"


def _rows(errors: CutErrors) -> list[list[str]]:
    order = sorted(errors.cuts(), key=lambda cut: (cut[1] - cut[0], cut[0]))
    return [
        [
            str(start),
            str(stop - 1),
            str(stop - start),
            f"{100 * before:.2f}",
            f"{100 * after:.2f}",
            f"{100 * ratio:.1f}",
            errors.calibration,
        ]
        for start, stop, before, after, ratio in order
    ]


__all__ = ["recoverability_picture"]
