"""Pictures of the dense model's layers one by one: RLS on its scale, block influence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .report_data import Model, Study
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
    rows_axis,
    spec,
    text,
)
from .selectors.lorp import num_clusters_for

# Bars that are so many times as long as most are cut off, or the others could not be told apart.
LONG_BARS = 2.0
STAGGER = 32  # pixels that the value of the second of two such neighbours stands higher
RLS_ZONES = (  # LoRP: lower end, name
    (0.0, "distributed"),
    (0.7, "intermediate"),
    (1.0, "localized"),
)


def shown_cut(study: Study) -> tuple[Model | None, Sequence[int]]:
    """Return the model of the headline, or any, and what it lacks."""
    known = [model for model in study.main_models if model.removed]
    headline = study.headline
    model = headline if headline in known else known[-1] if known else None
    return model, () if model is None else model.removed or ()


def locality_picture(study: Study) -> Picture:
    """Draw the RLS of each sweep on its scale."""
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
    if len(names) > 1:
        corner = {"x": 0.01, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 9}
        corner |= {"showarrow": False, "font": {"size": 11}}
        notes += [{**corner, "y": name, "text": name} for name in names]
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
        "xaxis": axis("RLS", range=[0, high], showgrid=False),
        "yaxis": {**rows_axis(names), "showgrid": False, "showticklabels": False},
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
        [
            Panel(
                spec([data], layout, 120 + (48 if len(known) > 1 else 26) * max(1, len(known))), alt
            )
        ],
        Table(["calibration", "RLS", "clusters by RLS", "clusters used"], rows),
    )


def influence_picture(study: Study) -> Picture:
    """Draw the block influence of each layer."""
    model, removed = shown_cut(study)
    gone = set(removed)
    first = study.scores[0]
    layers = list(range(first.num_layers))
    data = _bars(study, gone)
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
        "margin": {"l": 8, "r": 12, "t": 40 + max([0, *(n["yshift"] for n in notes)]), "b": 8},
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


def _bars(study: Study, gone: set[int]) -> list[dict[str, Any]]:
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
    return data


def _cut_off(study: Study) -> tuple[float, list[dict[str, Any]]]:
    """Return where the bars end, and the values of those that would be much longer."""
    values = sorted(value for scores in study.scores for value in scores.block_influence)
    limit = LONG_BARS * values[int(0.8 * (len(values) - 1))]
    within = [value for value in values if value <= limit]
    if limit <= 0 or not within or values[-1] < LONG_BARS * within[-1]:
        return 1.05 * values[-1] or 1.0, []
    top = 1.1 * within[-1]
    long = [layer for layer, value in enumerate(study.scores[0].block_influence) if value > top]
    common = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "textangle": -90}
    notes: list[dict[str, Any]] = []
    for layer in long:
        last = notes[-1] if notes else {"x": -2, "yshift": STAGGER}
        beside = layer - last["x"] == 1  # on a phone the bars are narrower than the text
        shift = STAGGER if beside and last["yshift"] == 0 else 0
        label = f"{study.scores[0].block_influence[layer]:.2f}↑"
        notes.append({**common, "x": layer, "text": label, "yshift": shift, "font": {"size": 11}})
    return top, notes


__all__ = ["influence_picture", "locality_picture", "shown_cut"]
