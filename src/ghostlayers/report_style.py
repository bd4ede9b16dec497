"""Colours, marks and the parts that every picture of a report shares."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .operators import NO_OPERATOR
from .report_data import Value, unique

# Okabe and Ito's colours without black and yellow, which vanish on one of the two backgrounds.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
GREY = "#888888"
REMOVED = "#D55E00"
KEPT = "#56B4E9"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star")
GLYPHS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "star": "★",
    "x": "✖",
}
NUMBER = re.compile(r"[+−-]?\d+(\.\d+)?(e[+-]\d+)?×?( ± \d+(\.\d+)?)?")
NO_NUMBER = ("", "–", "not run", "not compared")
DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Mark:
    """How one operator looks in every picture."""

    label: str
    color: str
    symbol: str
    dash: str

    @property
    def glyph(self) -> str:
        """The symbol as a character."""
        return GLYPHS[self.symbol]


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @cached_property
    def right(self) -> list[bool]:
        """Which columns hold numbers."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        return [
            any(map(NUMBER.fullmatch, column))
            and all(cell in NO_NUMBER or NUMBER.fullmatch(cell) for cell in column)
            for column in columns
        ]


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        spec: `{data, layout}` of plotly.
        alt: What it shows, for those who cannot see it.
        title: Heading; empty for none.
        square: Whether its height follows its width.
    """

    spec: Mapping[str, Any]
    alt: str
    title: str = ""
    square: bool = False

    @property
    def height(self) -> int:
        """Height in pixels."""
        return int(self.spec["layout"]["height"])


@dataclass(frozen=True)
class Picture:
    """Plots with one caption, one legend, and the table behind them."""

    key: str
    title: str
    caption: str
    panels: Sequence[Panel]
    table: Table
    legend: Sequence[Mark] = ()
    wide: bool = field(default=False)


def marks(operators: Iterable[str]) -> dict[str, Mark]:
    """Give each operator a colour, a symbol and a dash; `none` is grey and dotted."""
    found: dict[str, Mark] = {}
    index = 0
    for operator in unique(operators):
        if operator == NO_OPERATOR:
            found[operator] = Mark("none (no repair)", GREY, "x", "dot")
            continue
        turn, place = divmod(index, len(PALETTE))
        symbol = SYMBOLS[(place + turn) % len(SYMBOLS)]
        found[operator] = Mark(operator, PALETTE[place], symbol, DASHES[turn % len(DASHES)])
        index += 1
    return found


def text(value: str) -> str:
    """Escape a name for plotly, which reads some HTML tags in its texts."""
    return html.escape(value, quote=False)


def spec(data: Sequence[Any], layout: Mapping[str, Any], height: int) -> dict[str, Any]:
    """Build a plot; plotly checks every name and value.

    Args:
        data: Traces.
        layout: What differs from the common layout.
        height: In pixels.

    Returns:
        JSON values of `data` and `layout`.
    """
    import plotly.graph_objects as go

    common: dict[str, Any] = {
        "template": {"layout": {}},
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "margin": {"l": 8, "r": 12, "t": 10, "b": 8},
        "showlegend": False,
        "dragmode": False,
        "hoverlabel": {"align": "left"},
    }
    figure = go.Figure(data=list(data), layout={**common, **layout})
    found: dict[str, Any] = json.loads(figure.to_json(engine="json"))
    return {"data": found["data"], "layout": found["layout"]}


def axis(title: str, **changes: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    common = {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "fixedrange": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
    }
    return {**common, **changes}


def rows_axis(names: Sequence[str]) -> dict[str, Any]:
    """Return a vertical axis of named rows, the first on top."""
    return axis(
        "",
        type="category",
        categoryorder="array",
        categoryarray=list(names),
        range=[len(names) - 0.4, -0.6],
        ticks="",
    )


def row_labels(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return annotations at the left above the rows of `rows_axis`, by the name of the row.

    Long names beside a plot would leave it no room on a phone.
    """
    corner = {"x": 0.01, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 7}
    corner |= {"showarrow": False, "font": {"size": 11}, "bgcolor": "#ffffff", "borderpad": 2}
    return [{**corner, "y": name, "text": label} for name, label in labels.items()]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two positive ones, 3 to about 8 of them."""
    best: list[float] = []
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1, 1.5, 2, 3, 4, 5, 7)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = range(first, min(last, sys.float_info.max_10_exp) + 1)
        best = [
            step * 10.0**power
            for power in powers[:: 1 + len(powers) // 12]
            for step in steps
            if low <= step * 10.0**power <= high
        ]
        if len(best) >= 4:
            return best
    if len(best) >= 2:
        return best
    return [float(f"{low + share * (high - low):.3g}") for share in (0.1, 0.5, 0.9)]


def log_axis(title: str, values: Sequence[float], **changes: Any) -> dict[str, Any]:
    """Return a logarithmic axis with round ticks around positive values."""
    low, high = min(values), max(values)
    pad = max(1.03, math.exp(0.06 * (math.log(high) - math.log(low))))
    low, high = max(low / pad, sys.float_info.min), min(high * pad, sys.float_info.max)
    ticks = log_ticks(low, high)
    return axis(
        title,
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[f"{tick:.10g}" for tick in ticks],
        **changes,
    )


def number(value: float | None, digits: int = 4) -> str:
    """Write a number with so many significant digits; a dash for none."""
    if value is None:
        return "–"
    if value and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 if value == 0 else digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, places)}f}"


def with_error(value: Value | None, scale: float = 1.0, places: int = 2) -> str:
    """Write a value with its standard error."""
    if value is None:
        return "–"
    spread = "" if value.error is None else f" ± {scale * value.error:.{places}f}"
    return f"{scale * value.value:.{places}f}{spread}"


__all__ = [
    "GREY",
    "KEPT",
    "PALETTE",
    "REMOVED",
    "Mark",
    "Panel",
    "Picture",
    "Table",
    "axis",
    "log_axis",
    "log_ticks",
    "marks",
    "number",
    "row_labels",
    "rows_axis",
    "spec",
    "text",
    "with_error",
]
