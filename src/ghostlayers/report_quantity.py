"""A quality that pictures show: how it is read, scaled and written, and the dense model's line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .report_data import Model, Value
from .report_style import GREY, axis, log_axis, with_error

Getter = Callable[[Model], Value | None]
# Perplexities above this multiple of the dense model's stand at the edge of a picture.
BEYOND = 20.0
LABEL_ROOM = 0.08  # share of an axis that the dense model's label takes
OFF_SCALE = "triangle-up-open"


class Quantity:
    """Perplexity on a log axis, or accuracy in percent.

    Attributes:
        key: Part of the picture's identifier.
        title: Heading.
        of: Returns a model's value.
        percent: Whether it is a share, shown in percent.
        top: Where pictures end, in perplexity; larger values stand there.
    """

    def __init__(self, key: str, title: str, of: Getter, *, percent: bool = False) -> None:
        self.key, self.title, self.of, self.percent = key, title, of, percent
        self.scale = 100.0 if percent else 1.0
        self.axis_title = "accuracy, %" if percent else "perplexity"
        self.top = math.inf

    def end_at(self, dense: Value | None, models: Sequence[Model]) -> None:
        """Let pictures of these models end where readable values do."""
        values = [value.value for model in models if (value := self.of(model)) is not None]
        if not self.percent and values:
            self.top = upper_edge(min(values) if dense is None else dense.value, values)

    def place(self, value: Value) -> float:
        """Return where a value stands on the axis."""
        return min(self.scale * value.value, self.top)

    def is_beyond(self, value: Value) -> bool:
        """Whether a value stands at the edge and is larger."""
        return self.scale * value.value > self.top

    def numbers(self, models: Sequence[Model | None]) -> list[float]:
        """Return all values with their errors' ends."""
        found = []
        for model in models:
            value = None if model is None else self.of(model)
            if value is not None:
                error = value.error or 0.0
                ends = (value.value - error, value.value, value.value + error)
                found += [
                    min(self.scale * end, self.top) for end in ends if self.percent or end > 0
                ]
        return found

    def axis(self, values: Sequence[float], **changes: Any) -> dict[str, Any]:
        """Return an axis around the values."""
        low, high = min(values), max(values)
        if not self.percent:
            span = math.log(high) - math.log(low)
            room = math.exp(math.log(low) - LABEL_ROOM * span)  # 0 below the least number
            return log_axis(self.axis_title, [*values, room or low], **changes)
        pad = 0.06 * (high - low) + 0.5
        return axis(self.axis_title, range=[low - pad, high + pad], **changes)

    def show(self, value: Value | None) -> str:
        """Write a value with its error for people."""
        return with_error(value, self.scale, 1 if self.percent else 2)


def upper_edge(reference: float, values: Sequence[float]) -> float:
    """Return where a picture of perplexities ends: infinity if all are readable together."""
    top = BEYOND * reference
    return top if max(values, default=0.0) > top else math.inf


def error_bars(values: Sequence[Value], scale: float) -> dict[str, Any]:
    """Return the error bars of values: ± one standard error."""
    errors = [scale * (value.error or 0.0) for value in values]
    return {"type": "data", "array": errors, "visible": True, "thickness": 1.4, "width": 4}


def dense_line(what: Quantity, dense: Value | None, along: str) -> dict[str, Any]:
    """Return shapes and annotations that mark the dense model on axis `along`, x or y."""
    if dense is None:
        return {}
    place = what.scale * dense.value
    other = "x" if along == "y" else "y"
    line = {"color": GREY, "width": 1.5, "dash": "dash"}
    ends = {f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1}
    shape = {"type": "line", **ends, f"{along}0": place, f"{along}1": place, "line": line}
    label = {"text": f"dense {what.show(Value(dense.value))}", "font": {"size": 11}}
    # Marks lie above the line of a perplexity and below that of an accuracy.
    side = "bottom" if what.percent else "top"
    corner = {"x": 0.01, "xref": "paper", "xanchor": "left", "yanchor": side}
    if along == "x":
        corner = {"y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    on_axis = place if what.percent else math.log10(place)
    note = {**label, **corner, along: on_axis, "showarrow": False}
    return {"shapes": [shape], "annotations": [note]}


__all__ = ["BEYOND", "OFF_SCALE", "Getter", "Quantity", "dense_line", "error_bars", "upper_edge"]
