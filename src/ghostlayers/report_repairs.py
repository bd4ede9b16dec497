"""Pictures of the repairs: errors at each boundary, what the guard decided, speed and quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .report_data import Model, Study, short_name, unique
from .report_style import (
    GREY,
    Mark,
    Panel,
    Picture,
    Table,
    axis,
    number,
    row_labels,
    rows_axis,
    spec,
    text,
)

MAX_ROWS, MAX_TRIALS = 20, 16  # with them a picture fits a printed page
DECIDED = (Mark("kept", "#0072B2", "circle", "solid"), Mark("dropped", "#D55E00", "x", "solid"))


def repair_pictures(study: Study, looks: Mapping[str, Mark]) -> Iterator[Picture]:
    """Draw errors before and after each repair, then the guard's decisions."""
    rows = list(_errors(study.models))
    if rows:
        yield _error_picture(study, rows, looks)
    trials = list(_trials(study.models))
    if trials:
        yield _guard_picture(trials)


def _errors(models: Sequence[Model]) -> Iterator[tuple[Model, Mapping[str, Any], float, Any, str]]:
    """Yield model, boundary, error before, error after (None: no repair), and on what."""
    for model in models:
        for entry in model.boundaries:
            fit = {**((entry.get("guard") or {}).get("fit") or {}), **entry}
            for prefix, where in (("held_out_", "held-out"), ("", "calibration")):
                before = fit.get(f"{prefix}error_before")
                if before is not None:
                    yield model, entry, before, entry.get(f"{prefix}error_after"), where
                    break


def _error_picture(study: Study, rows: list[Any], looks: Mapping[str, Mark]) -> Picture:
    main = {id(model) for model in study.main_models}
    places: dict[tuple[int, int, str, str], list[Any]] = {}  # by what is the same without repair
    for row in rows:
        model, entry, before, *_ = row
        if id(model) in main:
            key = (entry["start"], entry["stop"], model.calibration, f"{before:.3g}")
            places.setdefault(key, []).append(row)
    order = sorted(places)
    hidden = max(0, len(order) - MAX_ROWS)
    shown = sorted(order, key=lambda key: (key[0] - key[1], key))[:MAX_ROWS]
    shown = [key for key in order if key in shown]
    single = len({key[2] for key in shown}) < 2
    names = [f"layers {a}–{b - 1}" if b - a > 1 else f"layer {a}" for a, b, *_ in shown]
    if not single:
        names = [f"{text(key[2])}<br>{name}" for name, key in zip(names, shown, strict=True)]
    names = [
        f"{name}, {_methods(places[key])}" if names.count(name) > 1 else name
        for name, key in zip(names, shown, strict=True)
    ]
    data, used = _error_traces([places[key] for key in shown], names, looks)
    layout = {
        "xaxis": axis("relative error, %", rangemode="tozero", tickangle=0),
        "yaxis": rows_axis(names),
    }
    cells = [
        [
            model.method,
            f"[{entry['start']}, {entry['stop']})",
            entry["operator"],
            f"{100 * before:.2f}",
            "–" if after is None else f"{100 * after:.2f}",
            where,
            model.calibration or "–",
        ]
        for model, entry, before, after, where in rows
    ]
    more = f" {hidden} shorter boundaries only in the table." if hidden else ""
    header = ["method", "boundary", "used", "before, %", "after, %", "windows", "calibration"]
    alt = "; ".join(
        f"{name}: before {100 * places[key][0][2]:.0f} %"
        for name, key in zip(names, shown, strict=True)
    )
    return Picture(
        "errors",
        "What each repair mends",
        "Relative error of the hidden state behind each cut: bars without repair, marks with it, "
        "on windows that the fit has not seen where there are any. Left is better. Methods that "
        "count other tokens, or weight them, have a bar of their own: ghost-robust leaves the "
        f"massive ones out. A small error is no promise of a low perplexity.{more}",
        [Panel(spec(data, layout, 84 + (28 if single else 40) * len(shown)), alt)],
        Table(header, cells, "Relative error before and after repair, percent"),
        [Mark("before", GREY, "square", "solid"), *(looks[name] for name in used)],
    )


def _methods(rows: Sequence[Any]) -> str:
    """Name the operators of a row, the first and how many more."""
    first, *others = unique(text(model.operator_label) for model, *_ in rows)
    return f"{first} and {len(others)} more" if others else first


def _error_traces(
    rows: list[list[Any]], names: list[str], looks: Mapping[str, Mark]
) -> tuple[list[Any], list[str]]:
    before = {
        "type": "bar",
        "orientation": "h",
        "x": [100 * own[0][2] for own in rows],
        "y": names,
        "width": 0.55,
        "marker": {"color": "rgba(128,128,128,0.35)", "line": {"width": 0}},
        "hovertemplate": "%{y}<br>before %{x:.1f} %<extra></extra>",
    }
    points: dict[str, dict[tuple[str, float], str]] = {}
    for name, own in zip(names, rows, strict=True):
        for model, _, _, after, where in own:
            if after is not None:
                label = (
                    f"{name}<br>{text(model.operator_label)}<br>after {100 * after:.1f} % ({where})"
                )
                points.setdefault(model.operator_label, {})[name, 100 * after] = label
    data: list[Any] = [before]
    for operator, found in points.items():
        mark = looks[operator]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [after for _, after in found],
                "y": [name for name, _ in found],
                "customdata": list(found.values()),
                "marker": {"color": mark.color, "symbol": mark.symbol, "size": 10},
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    return data, list(points)


def _trials(models: Sequence[Model]) -> Iterator[tuple[Model, Mapping[str, Any], dict[str, Any]]]:
    for model in models:
        for entry in model.boundaries:
            for tried in (entry.get("guard") or {}).get("tried") or ():
                yield model, entry, tried


def _guard_picture(trials: list[Any]) -> Picture:
    seen: dict[tuple[Any, ...], Any] = {}
    for model, entry, tried in trials:
        key = (
            entry["start"],
            entry["stop"],
            *_sides(tried),
            tried.get("gain"),
        )
        seen.setdefault(key, (model, entry, tried))
    unlike = [trial for trial in seen.values() if trial[2].get("gain") is not None]
    hidden = max(0, len(unlike) - MAX_TRIALS)
    unlike.sort(
        key=lambda trial: (bool(trial[2].get("kept")), trial[1]["start"] - trial[1]["stop"])
    )
    shown = sorted(unlike[:MAX_TRIALS], key=lambda trial: (trial[1]["start"], trial[1]["stop"]))
    names: list[str] = []
    for model, entry, tried in shown:
        last = entry["stop"] - 1
        where = f"{entry['start']}–{last}" if last > entry["start"] else str(last)
        cut = f" ({text(model.selector or '')} −{model.num_removed})" if model.num_removed else ""
        name = f"{where}: {' over '.join(map(text, _sides(tried)))}{cut}"
        names.append(name + "\u200b" * sum(other.rstrip("\u200b") == name for other in names))
    data = _trial_traces(names, shown)
    line = {"color": GREY, "width": 1.5, "dash": "dash"}
    zero = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    layout = {
        "xaxis": axis("gain, nats per token", tickangle=0),
        "yaxis": {
            **rows_axis(names),
            "range": [len(names) - 0.6, -0.8],
            "showticklabels": False,
            "showgrid": False,
        },
        "shapes": [zero],
        "annotations": row_labels({name: name for name in names}),
    }
    more = f" {hidden} more, all kept, in the table." if hidden else ""
    if hidden and not unlike[MAX_TRIALS][2].get("kept"):
        more = f" {hidden} more in the table."
    kept = sum(bool(tried.get("kept")) for _, _, tried in unlike)
    return Picture(
        "guard",
        "What the guard decided",
        "Each repair against the next simpler one, on held-out windows and on text that the dense "
        "model writes, each with the same weight. Whiskers: as many standard errors as the guard "
        "asks for: it stays if they do not reach 0 (with a lighter ridge, unless they stay below "
        "0), or if it alone wins back enough of what the cut lost. If all together win back too "
        "little, none stays, whatever is shown here." + more,
        [Panel(spec(data, layout, 60 + 40 * len(shown)), f"{kept} of {len(unlike)} trials kept.")],
        _guard_table(trials),
        [mark for mark in DECIDED if any(_decision(trial[2]) == mark.label for trial in shown)],
    )


def _trial_traces(names: Sequence[str], shown: Sequence[Any]) -> list[dict[str, Any]]:
    data = []
    for mark in DECIDED:
        own = [
            (name, trial)
            for name, trial in zip(names, shown, strict=True)
            if _decision(trial[2]) == mark.label
        ]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [tried["gain"] for _, (_, _, tried) in own],
                "y": [name for name, _ in own],
                "error_x": {
                    "type": "data",
                    "array": [
                        (tried.get("gain_standard_error") or 0.0) * _errors_asked(tried)
                        for _, (_, _, tried) in own
                    ],
                    "thickness": 1.5,
                    "width": 4,
                },
                "marker": {"color": mark.color, "symbol": mark.symbol, "size": 11},
                "customdata": [text(model.method) for _, (model, _, _) in own],
                "hovertemplate": "%{y}<br>%{customdata}<br>gain %{x:.4f} nats<extra></extra>",
            }
        )
    return data


def _sides(tried: Mapping[str, Any]) -> tuple[str, str]:
    """Name what was tried and against what; with ridges where these are all that differs."""
    sides = tried["operator"], tried["against"]
    ridges = tried.get("ridge"), tried.get("against_ridge")
    if sides[0] != sides[1] or None in ridges:
        return sides
    return f"{sides[0]}, ridge {ridges[0]:g}", f"ridge {ridges[1]:g}"


def _errors_asked(tried: Mapping[str, Any]) -> float:
    asked = tried.get("required_standard_errors")
    return 1.0 if asked is None else abs(float(asked))


def _decision(tried: Mapping[str, Any]) -> str:
    return "kept" if tried.get("kept") else "dropped"


def _guard_table(trials: list[Any]) -> Table:
    rows = []
    for model, entry, tried in trials:
        asked = tried.get("required_standard_errors")
        share = (model.guard or {}).get("recovered_share")
        rows.append(
            [
                model.method + (f" ({short_name(model.name)})" if model.name else ""),
                f"[{entry['start']}, {entry['stop']})",
                *_sides(tried),
                number(tried.get("gain"), 3),
                number(tried.get("gain_standard_error"), 2),
                "–" if asked is None else f"{asked:g}",
                _decision(tried),
                entry["operator"],
                "–" if share is None else f"{100 * share:.0f}",
            ]
        )
    header = ["method", "boundary", "repair", "against", "gain", "standard error", "errors asked"]
    header += ["trial", "used in the end", "won back in all, %"]
    return Table(header, rows, "Gain in nats per token")


__all__ = ["repair_pictures"]
