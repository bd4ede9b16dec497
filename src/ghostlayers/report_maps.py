"""Pictures of the dense model: similarity, clusters, RLS, block influence, what goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from .plan import PruningPlan
from .report_data import LayerScores, Study
from .report_layers import influence_picture, locality_picture, shown_cut
from .report_recoverability import recoverability_picture
from .report_style import (
    PALETTE,
    REMOVED,
    Mark,
    Panel,
    Picture,
    Table,
    axis,
    spec,
    text,
)

CLUSTER_MARKS = tuple(
    Mark(f"cluster {letter}", color, "square", "solid")
    for letter, color in zip("ABCDEF", PALETTE, strict=True)
)


def cluster_mark(index: int) -> Mark:
    """Return colour and letter of a cluster."""
    if index < len(CLUSTER_MARKS):
        return CLUSTER_MARKS[index]
    color = PALETTE[index % len(PALETTE)]
    return Mark(f"cluster {index + 1}", color, "square", "solid")


def _letter(index: int) -> str:
    return cluster_mark(index).label.rsplit(" ", 1)[-1]


def dense_pictures(study: Study) -> Iterator[Picture]:
    """Draw what the sweeps over the dense model say, and what is removed."""
    if study.scores:
        yield _similarity(study)
        yield locality_picture(study)
    if any(model.removed for model in study.models):
        yield _removal(study)
    if study.recoverability:
        yield recoverability_picture(study)
    if study.scores:
        yield influence_picture(study)


def _similarity(study: Study) -> Picture:
    model, removed = shown_cut(study)
    panels = [_heat_map(scores, removed, len(study.scores) > 1) for scores in study.scores]
    first = study.scores[0]
    rows = [
        [str(i), _letter(first.clusters[i]), *(f"{value:.3f}" for value in row[:-1])]
        for i, row in enumerate(first.similarity[:-1])
    ]
    header = ["layer", "cluster", *(str(i) for i in range(first.num_layers))]
    what = f" White frames: layers removed by {model.method}." if model is not None else ""
    count = max(map(max, (scores.clusters for scores in study.scores))) + 1
    return Picture(
        "similarity",
        "How alike the layers' inputs are",
        "Mean cosine between the hidden states that enter each pair of layers. Bars along the "
        f"edges: the clusters that lorp finds in this matrix.{what}",
        panels,
        Table(header, rows, f"Similarity on {first.calibration}"),
        [cluster_mark(index) for index in range(count)],
        wide=len(panels) > 1,
    )


def _heat_map(scores: LayerScores, removed: Sequence[int], titled: bool) -> Panel:
    depth = scores.num_layers
    matrix = [list(row[:-1]) for row in scores.similarity[:-1]]
    wide = max(1.0, depth / 22)
    shapes, notes = _cluster_bars(scores.clusters, wide)
    for boundary in PruningPlan(depth, tuple(removed)).boundaries if removed else ():
        place: dict[str, Any] = {"x0": boundary.start - 0.5, "x1": boundary.stop - 0.5}
        place |= {"y0": place["x0"], "y1": place["x1"], "type": "rect"}
        shapes.append({**place, "line": {"color": "#000000", "width": 4}})
        shapes.append({**place, "line": {"color": "#ffffff", "width": 2}})
    ticks = {"dtick": 5 if depth > 12 else 1, "tick0": 0, "showgrid": False}
    reach = [-0.5 - 1.7 * wide, depth - 0.5]
    bar = {"orientation": "h", "thickness": 10, "len": 0.9, "y": -0.13, "yanchor": "top"}
    data = {
        "type": "heatmap",
        "z": matrix,
        "colorscale": "Cividis",
        "zmax": 1,
        "zmin": min(map(min, matrix)),
        "hovertemplate": "layers %{y} and %{x}<br>cosine %{z:.3f}<extra></extra>",
        "colorbar": {**bar, "title": {"text": "mean cosine", "side": "bottom"}},
    }
    layout = {
        "xaxis": axis("layer", range=reach, constrain="domain", **ticks),
        "yaxis": axis("layer", range=reach[::-1], scaleanchor="x", constrain="domain", **ticks),
        "shapes": shapes,
        "annotations": notes,
    }
    alt = (
        f"Heat map of the similarity of {depth} layers measured on {scores.calibration}, "
        f"from {min(map(min, matrix)):.2f} to 1."
    )
    title = scores.calibration if titled else ""
    return Panel(spec([data], layout, 520), alt, title, square=True)


def _cluster_bars(clusters: Sequence[int], wide: float) -> tuple[list[Any], list[Any]]:
    shapes: list[Any] = []
    notes: list[Any] = []
    near, far = -0.5 - 0.4 * wide, -0.5 - 1.4 * wide
    for cluster, run in groupby(range(len(clusters)), key=lambda layer: clusters[layer]):
        layers = list(run)
        low, high = layers[0] - 0.5, layers[-1] + 0.5
        fill = {"type": "rect", "fillcolor": cluster_mark(cluster).color, "line": {"width": 0}}
        shapes.append({**fill, "x0": low, "x1": high, "y0": near, "y1": far})
        shapes.append({**fill, "x0": near, "x1": far, "y0": low, "y1": high})
        if len(layers) >= len(clusters) / 20:
            note = {"text": f"<b>{_letter(cluster)}</b>", "showarrow": False}
            note["font"] = {"color": "#000000", "size": 11}
            middle, off = (low + high) / 2, (near + far) / 2
            notes += [{**note, "x": middle, "y": off}, {**note, "x": off, "y": middle}]
    return shapes, notes


def _removal(study: Study) -> Picture:
    known: dict[tuple[str, tuple[int, ...]], str] = {}
    for model in study.models:
        if model.removed:
            label = f"{model.selector} −{len(model.removed)}"
            known.setdefault((label, model.removed), model.calibration)
    order = sorted(known, key=lambda key: (len(key[1]), key[0]))
    depth = study.num_layers or 1 + max(max(removed) for _, removed in order)
    counts = [sum(layer in removed for _, removed in order) for layer in range(depth)]
    names: list[str] = []
    for label, _ in order:
        twins = sum(name.split(" (")[0] == text(label) for name in names)
        names.append(text(label) + (f" ({twins + 1})" if twins else ""))
    data = {
        "type": "heatmap",
        "z": [[int(layer in removed) for layer in range(depth)] for _, removed in order],
        "y": names,
        "colorscale": [[0, "rgba(128,128,128,0.18)"], [1, REMOVED]],
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "%{y}: layer %{x}<extra></extra>",
    }
    layout = {
        "xaxis": axis("layer", showgrid=False, dtick=5 if depth > 12 else 1),
        "yaxis": axis("", autorange="reversed", showgrid=False, ticks=""),
    }
    often = max(range(depth), key=lambda layer: counts[layer])
    rows = [
        [name.replace("−", "removes "), ", ".join(map(str, removed)), known[label, removed] or "–"]
        for name, (label, removed) in zip(names, order, strict=True)
    ]
    alt = f"{len(order)} cuts of {depth} layers; layer {often} goes most often."
    return Picture(
        "removal",
        "Which layers go",
        "One row a cut: selector and number of layers. Filled: removed.",
        [Panel(spec([data], layout, 96 + 24 * len(order)), alt)],
        Table(["cut", "layers", "first calibration"], rows, "Removed layers"),
    )


__all__ = ["dense_pictures"]
