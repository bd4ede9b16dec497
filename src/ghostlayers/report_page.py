"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import __version__
from .errors import RequirementError
from .report_curves import quality_pictures
from .report_data import Gap, Model, Study, short_name, unique
from .report_headline import Card, best_table, cards_of, sentence_of, title_of
from .report_maps import dense_pictures
from .report_parts import Expectation
from .report_repairs import repair_pictures
from .report_speed import speed_pictures
from .report_style import Picture, Table, marks
from .task_scores import METRICS

INSTALL = "python -m pip install 'ghostlayers[report]'"
# Read by JSON parsers as what they stand for, by HTML parsers as no markup.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True)
class Section:
    """Pictures under one heading."""

    key: str
    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Chapter:
    """One study as the template needs it."""

    key: str
    model: str
    title: str
    sentence: str
    cards: Sequence[Card]
    best: Table | None
    sections: Sequence[Section]
    tasks: Table | None
    gaps: Mapping[str, Sequence[str]]
    num_gaps: int
    warnings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    versions: Table | None
    expected: Sequence[tuple[Expectation, Table | None, str]]
    note: str


def check_report_packages() -> None:
    """Import what a report needs.

    Raises:
        RequirementError: If plotly or jinja2 is not installed; an ImportError.
    """
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "plotly"):
            raise
        raise RequirementError(
            f"a report needs plotly and jinja2; {error.name} is not installed. Run: {INSTALL}"
        ) from error


def render(studies: Sequence[Study]) -> str:
    """Return the HTML page of studies; the same studies give the same bytes.

    Args:
        studies: At least one.

    Raises:
        RequirementError: If plotly or jinja2 is not installed.
    """
    check_report_packages()
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ghostlayers", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    loader = environment.loader
    assert loader is not None
    style, own = (loader.get_source(environment, f"report.{kind}")[0] for kind in ("css", "js"))
    library = get_plotlyjs()
    chapters = [_chapter(study, index) for index, study in enumerate(studies, start=1)]
    return environment.get_template("report.html.j2").render(
        chapters=chapters,
        title=f"{chapters[0].model}: {chapters[0].title}",
        style=style,
        library=library,
        own=own,
        hashes=" ".join(map(_hash, (library, own))),
        as_json=_as_json,
        plotly=_plotly_version(),
        version=__version__,
    )


def _plotly_version() -> str:
    from importlib.metadata import version

    return version("plotly")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _as_json(value: Any) -> str:
    found = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark, code in ESCAPES.items():
        found = found.replace(mark, code)
    return found


def _chapter(study: Study, index: int) -> Chapter:
    labels = [model.operator_label for model in study.models]
    looks = marks(labels)
    sections = [
        Section("quality", "What it costs", list(quality_pictures(study, looks))),
        Section("speed", "What it gives", list(speed_pictures(study, looks))),
        Section("dense", "What the layers do", list(dense_pictures(study))),
        Section("repairs", "How the cuts were repaired", list(repair_pictures(study, looks))),
    ]
    warnings = unique(
        f"{model.method}{f' ({short_name(model.name)})' if model.name else ''}: {line}"
        for model in study.models
        for line in model.warnings
    )
    return Chapter(
        key=f"model-{index}",
        model=short_name(study.model),
        title=title_of(study),
        sentence=sentence_of(study),
        cards=cards_of(study),
        best=best_table(study),
        sections=[section for section in sections if section.pictures],
        tasks=_task_table(study),
        gaps=_by_reason(study.gaps),
        num_gaps=len(study.gaps),
        warnings=warnings,
        facts=[("Dense model", study.model), *study.facts],
        versions=_version_table(study),
        expected=[_expected(found) for found in study.expected],
        note=study.title or "",
    )


def _expected(found: Expectation) -> tuple[Expectation, Table | None, str]:
    """Return an expectation, its table, and what else it says as text."""
    caption = "Means are over all texts or all tasks. Difference: measured − expected"
    table = _without_constant(Table(found.header, found.rows, caption)) if found.rows else None
    rest = "" if found.rest is None else json.dumps(found.rest, indent=2, ensure_ascii=False)
    return found, table, rest


def _without_constant(table: Table) -> Table:
    """Leave out columns that tell no rows apart; what they say is in the caption."""
    values = {name: {*column} for name, *column in zip(table.header, *table.rows, strict=True)}
    same = [n for n in ("model", "calibration") if len(values[n] - {"–"}) < 2]
    said = "; ".join(f"{name} {known}" for name in same for known in values[name] - {"–"})
    same += ["percent"] if values["percent"] == {"–"} else []
    places = [index for index, name in enumerate(table.header) if name not in same]
    rows = [[row[place] for place in places] for row in table.rows]
    caption = f"{said[:1].upper()}{said[1:]}. {table.caption}" if said else table.caption
    return Table([table.header[place] for place in places], rows, caption)


def _by_reason(gaps: Sequence[Gap]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for gap in gaps:
        found.setdefault(gap.reason, []).append(gap.what)
    return found


def _task_table(study: Study) -> Table | None:
    every = [model for model in [study.dense, *study.models] if model is not None and model.tasks]
    rows = []
    for model in every:
        for score in (model.tasks or {})["scores"]:
            row = [score["task"], _who(model)]
            row += ["–" if model.num_removed is None else str(model.num_removed)]
            for metric in METRICS:
                entry = score.get(metric) or {}
                row += [_percent(entry, "value", "stderr", ".1f")]
            entry = score.get("acc_norm") or score.get("acc") or {}
            row += [_percent(entry, "difference", "difference_stderr", "+.1f")]
            retained = entry.get("retained")
            row += ["–" if retained is None else f"{retained:.3f}", str(score.get("items", "–"))]
            rows.append(row)
    rows.sort(key=lambda row: row[0])
    header = ["task", "model", "removed", "acc, %", "acc_norm, %", "difference", "retained"]
    caption = "Accuracy in percent ± standard error; difference from dense on the same items"
    return Table([*header, "items"], rows, caption) if rows else None


def _who(model: Model) -> str:
    if model.selector is None:
        return short_name(model.name) if model.name else "dense"
    return model.method + (f" ({short_name(model.name)})" if model.name else "")


def _percent(entry: Any, key: str, error: str, form: str) -> str:
    if entry.get(key) is None:
        return "–"
    spread = "" if entry.get(error) is None else f" ± {100 * entry[error]:.1f}"
    return f"{100 * entry[key]:{form}}{spread}"


def _version_table(study: Study) -> Table | None:
    columns: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for where, found in study.versions:
        columns.setdefault(tuple(sorted(found.items())), []).append(where)
    if not columns:
        return None
    packages = unique(package for _, found in study.versions for package in found)
    values = [dict(column) for column in columns]
    rows = [[name, *(column.get(name, "–") for column in values)] for name in packages]
    return Table(["", *(", ".join(unique(names)) for names in columns.values())], rows)


__all__ = ["check_report_packages", "render"]
