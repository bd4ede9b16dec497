"""The heat map of `analyze`'s recoverability holds its errors; damaged ones are one line."""

import json
import re

import pytest

from ghostlayers.cli import main
from ghostlayers.errors import CheckpointError
from ghostlayers.report_data import Study
from ghostlayers.report_inputs import read_inputs
from ghostlayers.report_maps import dense_pictures
from ghostlayers.report_parts import CutErrors, best_cuts
from ghostlayers.report_recoverability import recoverability_picture
from ghostlayers.report_studies import build_studies
from report_samples import write_analysis, write_comparison

pytest.importorskip("plotly", reason="pip install 'ghostlayers[report]'")
DEPTH = 6
CUTS = [(start, stop) for start in range(1, DEPTH - 1) for stop in range(start + 1, DEPTH)]


def before_of(start, stop):
    return 0.1 * (stop - start) + 0.01 * start


def after_of(start, stop):
    return before_of(start, stop) * (0.9 - 0.1 * start)


def matrix(of):
    rows = [[None] * (DEPTH + 1) for _ in range(DEPTH + 1)]
    for start, stop in CUTS:
        rows[start][stop] = of(start, stop)
    return rows


def analysis(path, change=None):
    value = json.loads(write_analysis(path, depth=DEPTH).read_text())
    value["recoverability"] = {
        "error_before": matrix(before_of),
        "error_after": matrix(after_of),
        "ratio": matrix(lambda *cut: 1.0),  # the page works it out again
        "tokens": 1536,
        "held_out_tokens": 512,
        "ridge": {"1": 0.01},
    }
    if change is not None:
        change(value["recoverability"])
    path.write_text(json.dumps(value))
    return path


def picture_of(tmp_path, *paths):
    [study] = build_studies(read_inputs([str(path) for path in paths]))
    return next(p for p in dense_pictures(study) if p.key == "recoverability")


def test_the_table_and_the_map_hold_every_cut(tmp_path):
    picture = picture_of(tmp_path, analysis(tmp_path / "a.json"))
    rows = {(int(row[0]), int(row[1]) + 1): row[2:6] for row in picture.table.rows}
    assert set(rows) == set(CUTS) and len(picture.table.rows) == len(CUTS)
    for (start, stop), row in rows.items():
        before, after = before_of(start, stop), after_of(start, stop)
        wanted = [str(stop - start), f"{100 * before:.2f}", f"{100 * after:.2f}"]
        assert row == [*wanted, f"{90 - 10 * start:.1f}"]
    after, share = (panel.spec["data"] for panel in picture.panels)
    for start, stop in CUTS:
        assert after[0]["z"][stop - start - 1][start] == pytest.approx(100 * after_of(start, stop))
        assert share[0]["z"][stop - start - 1][start] == pytest.approx(90 - 10 * start)
    known = [value for row in after[0]["z"] for value in row if value is not None]
    assert len(known) == len(CUTS)
    assert "512 tokens" in picture.caption


def test_the_least_error_of_each_size_is_marked(tmp_path):
    picture = picture_of(tmp_path, analysis(tmp_path / "a.json"))
    marks = picture.panels[0].spec["data"][1]
    least = {
        size: min((s for s, e in CUTS if e - s == size), key=lambda s, n=size: after_of(s, s + n))
        for size in range(1, DEPTH - 1)
    }
    assert dict(zip(marks["y"], marks["x"], strict=True)) == least


def test_a_removed_block_is_framed(tmp_path):
    grid = write_comparison(tmp_path / "g", depth=DEPTH, budgets=(2,), calibrations=(("c4", 8),))
    picture = picture_of(tmp_path, grid, analysis(tmp_path / "a.json"))
    for panel in picture.panels:  # streamline removes layers 3 and 4
        frame = panel.spec["layout"]["shapes"][-1]
        assert [frame[key] for key in ("x0", "x1", "y0", "y1")] == [2.5, 3.5, 1.5, 2.5]
    assert "White frames" in picture.caption


def test_a_page_has_the_picture_and_one_without_has_none(tmp_path):
    for name, path in (
        ("with", analysis(tmp_path / "a.json")),
        ("without", write_analysis(tmp_path / "b.json")),
    ):
        assert main(["report", str(path), "-o", str(tmp_path / f"{name}.html")]) == 0
        text = (tmp_path / f"{name}.html").read_text()
        assert ("How well a linear map repairs each cut" in text) == (name == "with")


def test_nothing_lost_leaves_nothing():
    none = [[None, 0.0, 0.2], [None, None, 0.1], [None] * 3]
    errors = CutErrors("t", none, none)
    assert [cut[2:] for cut in errors.cuts()] == [(0.0, 0.0, 0.0), (0.2, 0.2, 1.0), (0.1, 0.1, 1.0)]
    assert best_cuts(errors) == {1: 0, 2: 0}
    picture = recoverability_picture(Study("m", recoverability=[errors]))
    assert "tokens" not in picture.caption


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda v: v["error_before"].pop(), "`recoverability.error_before` is no 7 x 7 matrix"),
        (lambda v: v["error_after"][1].pop(), "`recoverability.error_after` is no 7 x 7 matrix"),
        (
            lambda v: v["error_after"][1].__setitem__(3, -0.5),
            "`recoverability.error_after[1][3]` is -0.5",
        ),
        (
            lambda v: v["error_after"][3].__setitem__(1, 0.5),
            "`recoverability.error_after[3][1]` is 0.5",
        ),
        (
            lambda v: v["error_after"][1].__setitem__(3, 1e300),
            "`recoverability.error_after[1][3]` is 1e+300",
        ),
        (
            lambda v: v["error_before"][1].__setitem__(3, "x"),
            "`recoverability.error_before[1][3]` is 'x', not a number",
        ),
    ],
)
def test_damaged_errors_are_one_line(tmp_path, change, fault):
    path = analysis(tmp_path / "a.json", change)
    with pytest.raises(CheckpointError, match=re.escape(fault)):
        read_inputs([str(path)])
