"""Pictures of the dense model: similarity, clusters, RLS, block influence, what goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from .plan import PruningPlan
from .report_data import LayerScores, Model, Study
from .report_style import (
    GREY,
    KEPT,
    PALETTE,
    REMOVED,
    Mark,
    Panel,
    Picture,
    Table,
    axis,
    number,
    spec,
    text,
)
from .selectors.lorp import num_clusters_for

CLUSTER_MARKS = tuple(
    Mark(f"cluster {letter}", color, "square", "solid")
    for letter, color in zip("ABCDEF", PALETTE, strict=True)
)
# Bars that are so many times as long as most are cut off, or the others could not be told apart.
LONG_BARS = 2.0
RLS_ZONES = (  # LoRP: lower end, name
    (0.0, "distributed"),
    (0.7, "intermediate"),
    (1.0, "localized"),
)


def cluster_mark(index: int) -> Mark:
    """Return colour and letter of a cluster."""
    if index < len(CLUSTER_MARKS):
        return CLUSTER_MARKS[index]
    color = PALETTE[index % len(PALETTE)]
    return Mark(f"cluster {index + 1}", color, "square", "solid")


def _letter(index: int) -> str:
    return cluster_mark(index).label.rsplit(" ", 1)[-1]


def _removed(study: Study) -> tuple[Model | None, Sequence[int]]:
    """Return the model of the headline, or any, and what it lacks."""
    known = [model for model in study.main_models if model.removed]
    headline = study.headline
    model = headline if headline in known else known[-1] if known else None
    return model, () if model is None else model.removed or ()


def dense_pictures(study: Study) -> Iterator[Picture]:
    """Draw what the sweeps over the dense model say, and what is removed."""
    if study.scores:
        yield _similarity(study)
        yield _rls(study)
    if any(model.removed for model in study.models):
        yield _removal(study)
    if study.scores:
        yield _influence(study)


def _similarity(study: Study) -> Picture:
    model, removed = _removed(study)
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


def _rls(study: Study) -> Picture:
    known = [scores for scores in study.scores if scores.rls is not None]
    values = [scores.rls or 0.0 for scores in known]
    high = max([1.4, *(1.1 * value for value in values)])
    ends = [*(low for low, _ in RLS_ZONES[1:]), high]
    shapes, notes = [], []
    for (low, name), end, color in zip(RLS_ZONES, ends, PALETTE[::2], strict=True):
        place = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
        fill = {"fillcolor": color, "opacity": 0.22, "line": {"width": 0}}
        shapes.append({**place, **fill, "x0": low, "x1": end})
        label = f"{name}<br>{num_clusters_for(low)} clusters"
        place = {"x": (low + end) / 2, "y": 1, "yref": "paper", "yanchor": "bottom"}
        notes.append({**place, "text": label, "showarrow": False, "font": {"size": 11}})
    names = [text(scores.calibration) for scores in known]
    data = {
        "type": "scatter",
        "mode": "markers+text",
        "x": values,
        "y": names,
        "text": [f"  <b>{value:.3f}</b>" for value in values],
        "textposition": "middle right",
        "marker": {"size": 15, "symbol": "diamond", "color": "#000000", "line": {"width": 2}},
        "meta": "ink",
        "hovertemplate": "%{y}<br>RLS %{x:.4f}<extra></extra>",
    }
    layout = {
        "xaxis": axis("Representation Locality Score", range=[0, high], showgrid=False),
        "yaxis": axis(
            "", autorange="reversed", showgrid=False, showticklabels=len(known) > 1, ticks=""
        ),
        "shapes": shapes,
        "annotations": notes,
        "margin": {"l": 8, "r": 12, "t": 44, "b": 8},
    }
    rows = [
        [
            scores.calibration,
            number(scores.rls) if scores.rls is not None else "infinite",
            "–" if scores.rls is None else str(num_clusters_for(scores.rls)),
            str(max(scores.clusters) + 1),
        ]
        for scores in study.scores
    ]
    alt = "; ".join(f"RLS {row[1]} on {row[0]}" for row in rows)
    return Picture(
        "rls",
        "How far the similarity reaches",
        "RLS = −log2 of the mean similarity of all pairs of layers (LoRP). A low score: layers far "
        "apart are alike too, and lorp uses more clusters.",
        [Panel(spec([data], layout, 120 + 26 * max(1, len(known))), alt)],
        Table(["calibration", "RLS", "clusters by RLS", "clusters used"], rows),
    )


def _influence(study: Study) -> Picture:
    model, removed = _removed(study)
    gone = set(removed)
    first = study.scores[0]
    layers = list(range(first.num_layers))
    data: list[Any] = [
        {
            "type": "bar",
            "x": shown,
            "y": [first.block_influence[layer] for layer in shown],
            "marker": {"color": color, "pattern": {"shape": pattern}, "line": {"width": 0}},
            "hovertemplate": "layer %{x}<br>block influence %{y:.4f}<extra></extra>",
        }
        for shown, color, pattern in (
            ([layer for layer in layers if layer not in gone], KEPT, ""),
            (sorted(gone), REMOVED, "/"),
        )
    ]
    data += [
        {
            "type": "scatter",
            "mode": "markers",
            "x": layers,
            "y": list(scores.block_influence),
            "marker": {"size": 5, "color": GREY},
            "name": text(scores.calibration),
            "hovertemplate": "layer %{x}<br>%{y:.4f}<extra>%{fullData.name}</extra>",
        }
        for scores in study.scores[1:]
    ]
    legend = [Mark("kept", KEPT, "square", "solid")]
    legend += [Mark(f"removed by {model.method}", REMOVED, "square", "solid")] if model else []
    others = [scores.calibration for scores in study.scores[1:]]
    legend += [Mark(f"other calibrations: {'; '.join(others)}", GREY, "circle", "solid")][
        : len(others)
    ]
    top, notes = _cut_off(study)
    cut = " Bars with a number above are cut off." if notes else ""
    low = min(layers, key=lambda layer: first.block_influence[layer])
    rows = [
        [
            str(layer),
            "removed" if layer in gone else "kept",
            *(f"{scores.block_influence[layer]:.4f}" for scores in study.scores),
        ]
        for layer in layers
    ]
    header = ["layer", "", *(scores.calibration for scores in study.scores)]
    layout = {
        "xaxis": axis("layer", showgrid=False, range=[-0.7, len(layers) - 0.3]),
        "yaxis": axis("block influence", range=[0, top]),
        "annotations": notes,
        "bargap": 0.15,
        "margin": {"l": 8, "r": 12, "t": 24, "b": 8},
        "barmode": "overlay",
    }
    alt = f"Bars of block influence of {len(layers)} layers; the lowest is layer {low}."
    return Picture(
        "influence",
        "How much each layer turns the state",
        "Block influence: 1 − cosine between what enters a layer and what leaves it (ShortGPT). "
        f"A layer with a low bar hardly changes direction.{cut}",
        [Panel(spec(data, layout, 280), alt)],
        Table(header, rows, "Block influence by layer and calibration"),
        legend,
        wide=True,
    )


def _cut_off(study: Study) -> tuple[float, list[dict[str, Any]]]:
    """Return where the bars end, and the values of those that would be much longer."""
    values = sorted(value for scores in study.scores for value in scores.block_influence)
    limit = LONG_BARS * values[int(0.8 * (len(values) - 1))]
    within = [value for value in values if value <= limit]
    if limit <= 0 or not within or values[-1] < LONG_BARS * within[-1]:
        return 1.05 * values[-1] or 1.0, []
    top = 1.1 * within[-1]
    notes = [
        {
            "x": layer,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "text": f"{value:.2f}↑",
            "showarrow": False,
            "font": {"size": 11},
        }
        for layer, value in enumerate(study.scores[0].block_influence)
        if value > top
    ]
    return top, notes


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
        [Panel(spec([data], layout, 70 + 24 * len(order)), alt)],
        Table(["cut", "layers", "first calibration"], rows, "Removed layers"),
    )


__all__ = ["dense_pictures"]
