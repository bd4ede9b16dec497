"""Plain-text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .plan import format_layers

BAR_WIDTH = 30
SHOWN_CANDIDATES = 8


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
    return f"{render_table(header, rows)}\n{dense}{more}"
