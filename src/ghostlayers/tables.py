"""Plain-text tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .plan import format_layers

BAR_WIDTH = 30
SHOWN_CANDIDATES = 8
MAX_WIDTH = 100
MARGIN = 7
SHADES = "·░▒▓█"
LEGEND = "error of the state behind the cut after a linear repair, percent of its norm, held-out"


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows in columns; columns of numbers are set to the right.

    Args:
        header: Column names; a header of empty names is not printed.
        rows: Cells as text, one sequence per row.

    Returns:
        Lines joined by newlines, without trailing blanks.
    """
    columns = list(zip(*[header, *rows], strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = [line(header), line(["-" * width for width in widths])] if any(header) else []
    return "\n".join([*head, *(line(row) for row in rows)])


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).replace("-", "", 1).replace(" M", "").isdecimal() or cell == "-"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-"


def bar(share: float) -> str:
    """Draw a share in [0, 1] as a bar."""
    return "█" * max(0, round(min(share, 1.0) * BAR_WIDTH))


def boundary_table(boundaries: Sequence[dict[str, Any]]) -> str:
    """Lay out the boundaries of a record: errors of the hidden state behind each cut."""
    names = ("error_before", "error_after", "held_out_error_before", "held_out_error_after")
    rows = [
        [
            f"[{entry['start']}, {entry['stop']})",
            entry["operator"],
            *(_number(entry.get(name)) for name in names),
        ]
        for entry in boundaries
    ]
    header = ["removed", "operator", "error before", "after", "held-out before", "after"]
    return render_table(header, rows)


def rank_table(boundaries: Sequence[dict[str, Any]]) -> str:
    """Lay out the error against the rank of the map, held-out where there is such a part.

    Returns:
        One column per boundary; empty if no fit was measured by rank.
    """
    columns = {}
    for entry in boundaries:
        fit = {**(entry.get("guard") or {}).get("fit", {}), **entry}
        errors = fit.get("held_out_error_by_rank") or fit.get("error_by_rank")
        if errors:
            columns[f"[{entry['start']}, {entry['stop']})"] = errors
    ranks = list(next(iter(columns.values()), {}))
    rows = [[rank, *(_number(errors[rank]) for errors in columns.values())] for rank in ranks]
    return render_table(["rank", *columns], rows) if rows else ""


def search_table(search: dict[str, Any]) -> str:
    """Lay out the candidates of a search, the best first: those of selectors always, some swaps."""
    rows, hidden = [], 0
    for rank, entry in enumerate(search["candidates"]):
        if rank >= SHOWN_CANDIDATES and entry["source"] in ("swap", "block"):
            hidden += 1
            continue
        numbers = (entry[name] for name in ("loss", "perplexity", "loss_none"))
        rows.append([format_layers(entry["layers"]), entry["source"], *map(_number, numbers)])
    header = ["layers", "source", "held-out loss", "perplexity", "loss without repair"]
    dense = f"dense model: loss {_number(search['loss_dense'])}"
    more = f"; {hidden} more in the record" if hidden else ""
    text = f"{render_table(header, rows)}\n{dense}{more}"
    if search["taken"] != search["candidates"][0]["layers"]:
        text += (
            f"\n{format_layers(search['taken'])} is taken: what stands above it is not better by "
            "more than chance"
        )
    return text


def heat_map(errors: Sequence[Sequence[float]]) -> str:
    """Draw the recoverability of contiguous cuts: a row per first layer, a column per length.

    Args:
        errors: (L+1, L+1), error of the cut [s, e) after its repair; nan where there is none.

    Returns:
        Two digits per cut, or one shade where these do not fit in `MAX_WIDTH` columns, and a
        legend.
    """
    rows = {
        start: [value for value in row[start + 1 :] if not math.isnan(value)]
        for start, row in enumerate(errors)
    }
    rows = {start: values for start, values in rows.items() if values}
    if not rows:
        return "no layer may be removed"
    lengths = range(1, max(map(len, rows.values())) + 1)
    digits = MARGIN + 3 * len(lengths) <= MAX_WIDTH

    def cell(value: float) -> str:
        if digits:
            return f" {min(round(100 * value), 99):2d}"
        return SHADES[min(int(value * len(SHADES)), len(SHADES) - 1)]

    if digits:
        head = "".join(f" {length:2d}" for length in lengths)
        legend = f"{LEGEND}; 99: or more"
    else:
        head = "".join(str(length // 10) if length % 10 == 0 else "." for length in lengths)
        limits = [round(100 * step / len(SHADES)) for step in range(len(SHADES) + 1)]
        legend = f"{LEGEND}: " + ", ".join(
            f"{shade} {low}-{high}"
            for shade, low, high in zip(SHADES, limits, limits[1:], strict=False)
        )
    lines = [f"{start:>{MARGIN - 1}} " + "".join(map(cell, row)) for start, row in rows.items()]
    title = f"{'first':>{MARGIN - 1}}  layers removed\n{'layer':>{MARGIN - 1}} {head}"
    return "\n".join([title, *lines, legend])
