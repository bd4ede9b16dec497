"""What a report says equals what was measured; bad input is one line; nothing is markup."""

import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest

from ghostlayers.cli import main
from ghostlayers.errors import CheckpointError
from ghostlayers.json_shape import Maybe, Values, shape_error
from ghostlayers.report_data import Model, Study, short_name
from ghostlayers.report_inputs import read_inputs
from ghostlayers.report_repairs import repair_pictures
from ghostlayers.report_speed import Point, pareto_front
from ghostlayers.report_studies import build_studies
from ghostlayers.report_style import Mark, Table, log_ticks, marks, number
from report_samples import (
    DENSE,
    GAINS,
    cell_perplexity,
    influence,
    layers_of,
    similarity,
    windows,
    write_analysis,
    write_checkpoint,
    write_comparison,
    write_evaluation,
)

pytest.importorskip("plotly", reason="pip install 'ghostlayers[report]'")
pytest.importorskip("jinja2", reason="pip install 'ghostlayers[report]'")


class Page(HTMLParser):
    """Tables by label, headings, scripts and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self.scripts: list[tuple[dict, str]] = []
        self.elements: list[tuple[str, dict]] = []
        self._label, self._cell, self._open = "", None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.elements.append((tag, found))
        self._open.append((tag, found))
        if found.get("role") == "region":
            self._label = found["aria-label"]
            self.tables.setdefault(self._label, [])
        elif tag == "tr":
            self.tables[self._label].append([])
        elif tag in ("td", "th"):
            self.tables[self._label][-1].append("")
            self._cell = True
        elif tag in ("h1", "h2", "h3", "h4", "h5"):
            self.headings.append("")
        elif tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        inside = self._open[-1][0] if self._open else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._cell:
            self.tables[self._label][-1][-1] += data
        elif inside in ("h1", "h2", "h3", "h4", "h5"):
            self.headings[-1] += data

    def plot(self, key: str) -> dict:
        for attributes, text in self.scripts:
            if attributes.get("data-plot") == key:
                return json.loads(text)
        raise AssertionError(f"no plot {key}")


def report(tmp_path, *paths, name="report.html"):
    out = tmp_path / name
    status = main(["report", *map(str, paths), "-o", str(out), "--force"])
    assert status == 0
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("report") / "grid")


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    return Page(report(tmp_path_factory.mktemp("page"), comparison))


def test_every_perplexity_of_a_comparison_is_in_its_table(page):
    for text in DENSE:
        rows = page.tables[f"Perplexity on {text}, 4 × 256 tokens"]
        assert rows[1][5].split(" ± ") == [f"{DENSE[text]:.2f}", f"{0.04 * DENSE[text]:.2f}"]
        found = {tuple(row[:3]) + (row[4],): row[5].split(" ± ")[0] for row in rows[2:]}
        for selector in ("lorp", "shortgpt", "streamline"):
            for operator in GAINS:
                for budget in (2, 3, 4):
                    if (selector, budget, operator) == ("shortgpt", 2, "ghost"):
                        continue
                    place = (selector, operator, str(budget), "wiki, 32 × 256 tokens")
                    value = cell_perplexity(text, selector, operator, budget, 32)
                    assert found[place] == f"{value:.2f}"
        assert len(rows) == 2 + 4 * (3 * 4 * 3 - 1)


def test_the_headline_is_the_best_of_the_largest_budget(page):
    best = cell_perplexity("c4", "streamline", "ghost-robust", 4, 8)
    assert page.headings[0] == f"4 of 12 layers removed: perplexity 21.3 → {best:.1f}"
    rows = page.tables["The best method of each number of layers"]
    assert [row[:3] for row in rows[1:]] == [
        [str(budget), "streamline + ghost-robust", f"6-{5 + budget}"] for budget in (2, 3, 4)
    ]


def test_curves_hold_the_values_of_the_first_calibration_and_dense(page):
    plot = page.plot("model-1-perplexity-1-1")  # lorp
    for trace, operator in zip(plot["data"], GAINS, strict=True):
        values = [cell_perplexity("c4", "lorp", operator, budget, 8) for budget in (2, 3, 4)]
        assert trace["y"] == values
        assert trace["error_y"]["array"] == [round(0.04 * value, 4) for value in values]
    assert plot["layout"]["shapes"][0]["y0"] == DENSE["c4"]
    assert [trace["y"] for trace in page.plot("model-1-sensitivity-2")["data"]] == [
        [cell_perplexity("c4", "streamline", operator, 4, count) for count in (8, 32)]
        for operator in GAINS
    ]


def test_accuracies_and_speeds_are_in_their_tables(page):
    rows = page.tables["Accuracy (acc), mean of 2 tasks"]
    value = 0.6 - 0.02 * 4 * (1 - GAINS["ghost"])
    row = next(row for row in rows if row[:3] == ["lorp", "ghost", "4"])
    assert row[5:] == [f"{100 * value:.1f} ± 2.1", f"{100 * (value - 0.6):+.1f} ± 1.2"]
    tasks = page.tables["Every task"]
    own = next(row for row in tasks if row[:3] == ["piqa", "lorp + ghost", "4"])
    assert own[3:] == [f"{100 * (value - 0.05):.1f} ± 2.1", "–", *own[5:]]
    times = page.tables["Speed against quality"]
    row = next(row for row in times if row[:2] == ["lorp + none", "4"])
    assert row[4:9] == ["26.67 ± 0.50", "1.50", "26.67 ± 0.50", "1.50", "1.50"]


def test_layers_matrix_and_influence_are_in_their_tables(page):
    rows = page.tables["How alike the layers' inputs are"]
    assert [row[2:] for row in rows[1:]] == [
        [f"{value:.3f}" for value in row[:-1]] for row in similarity(12)[:-1]
    ]
    assert [row[1] for row in rows[1:]] == list("AAAABBBBCCCC")
    heat = page.plot("model-1-similarity-1")
    assert heat["data"][0]["z"] == [row[:-1] for row in similarity(12)[:-1]]
    removed = layers_of("streamline", 4, 12)
    frame = heat["layout"]["shapes"][-1]
    assert (frame["x0"], frame["x1"]) == (removed[0] - 0.5, removed[-1] + 0.5)
    bars = page.tables["How much each layer turns the state"]
    assert [row[2] for row in bars[1:]] == [f"{value:.4f}" for value in influence(12)]
    assert [row[1] for row in bars[1:]].count("removed") == 4
    rls = page.tables["How far the similarity reaches"]
    assert [row[1] for row in rls[1:]] == ["0.5800", "0.8200", "0.5800", "0.8200"]
    assert page.plot("model-1-rls-1")["data"][0]["x"] == pytest.approx([0.58, 0.82] * 2)
    cuts = page.tables["Which layers go"]
    row = next(row for row in cuts if row[0] == "lorp removes 4")
    assert row[1] == ", ".join(map(str, layers_of("lorp", 4, 12)))


def test_errors_and_the_guards_decisions_are_in_their_tables(page):
    rows = page.tables["What each repair mends"]
    before = 1.1 * (0.1 + 0.05 * 4 + 0.002 * 6)
    row = next(row for row in rows if row[:2] == ["streamline + ghost", "[6, 10)"])
    assert row[3:6] == [f"{100 * before:.2f}", f"{45 * before:.2f}", "held-out"]
    guard = page.tables["What the guard decided"]
    row = next(row for row in guard if row[1] == "[6, 10)")
    assert row[4:8] == ["0.180", "0.050", "2", "kept"] and row[-1] == "50"


def test_what_has_no_number_is_listed_with_its_reason(page):
    listed = {row[0]: row[1] for row in page.tables["Refused or not run"][1:]}
    assert listed["not run: its data could not be had"] == "task copa"
    assert "auto, 9 layers, calibrated on wiki" in listed["no cut: only 10 layers may go"]
    assert listed["refused: GPT-2 has no such map."].count(" + fold, layers ") == 36
    missing = listed["not run: the comparison is not finished"]
    assert missing.count("shortgpt + ghost, layers 3,5") == 4


def test_a_report_is_the_same_bytes_for_the_same_input(comparison, tmp_path):
    first = report(tmp_path, comparison, name="a.html")
    assert report(tmp_path, comparison, name="b.html") == first


def test_checkpoints_evaluations_and_analyses_combine(tmp_path):
    one = write_checkpoint(tmp_path / "one")
    two = write_checkpoint(tmp_path / "two", operator="none", finetune={"steps": 3})
    scores = write_analysis(tmp_path / "scores.json")
    results = {"org/model": 20.0, str(one): 31.5, str(two): 44.25, "elsewhere": 50.0}
    text = report(tmp_path, two, scores, write_evaluation(tmp_path / "eval.json", results), one)
    page = Page(text)
    assert page.headings[0] == "3 of 12 layers removed: perplexity 20.0 → 31.5"
    rows = page.tables["Perplexity on c4, 2 × 256 tokens"]
    assert rows[1][5] == "20.00 ± 2.00"  # losses ± 0.1: standard error 0.1 of the mean
    assert {tuple(row[:3]): row[6] for row in rows[2:]} == {
        ("streamline", "ghost-robust", "3"): "1.575",
        ("streamline", "none, trained", "3"): "2.212",
        ("elsewhere", "–", "–"): "2.500",
    }
    assert page.tables["How far the similarity reaches"][1][1] == "0.8123"
    assert "Speed was not measured" in text


def test_every_text_of_one_eval_is_shown(tmp_path):
    one = write_checkpoint(tmp_path / "one")
    file = write_evaluation(tmp_path / "eval.json", {"org/model": 20.0, str(one): 31.5})
    value = json.loads(file.read_text())
    for result, other in zip(value["results"], (40.0, 50.0), strict=True):
        first = {key: result[key] for key in (*windows("c4", 2), "perplexity", "window_losses")}
        losses = [math.log(other)] * 2
        second = {**windows("wiki", 2), "perplexity": other, "window_losses": losses}
        result["texts"] = [first, second]
    file.write_text(json.dumps(value))
    page = Page(report(tmp_path, one, file))
    found = {text: page.tables[f"Perplexity on {text}, 2 × 256 tokens"] for text in ("c4", "wiki")}
    assert [row[6] for row in found["c4"][2:]] == ["1.575"]
    assert [row[6] for row in found["wiki"][2:]] == ["1.250"]
    value["results"][1]["texts"][1]["perplexity"] = -2.0
    file.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="a perplexity is -2"):
        read_inputs([str(file)])


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ("ghost-robust", "without training"),
        ("ghost-robust-refined", "the repair alone refined by gradient steps"),
    ],
)
def test_a_refined_repair_is_not_said_to_be_without_training(tmp_path, used, said):
    one = write_checkpoint(tmp_path / "one")
    record = json.loads((one / "ghostlayers.json").read_text())
    for boundary in record["boundaries"]:
        boundary["operator"] = used
    (one / "ghostlayers.json").write_text(json.dumps(record))
    results = write_evaluation(tmp_path / "eval.json", {"org/model": 20.0, str(one): 31.5})
    text = report(tmp_path, one, results)
    assert said in text
    assert ("without training" in text) is (said == "without training")


def test_the_same_sweep_given_twice_is_drawn_once(tmp_path):
    first = write_analysis(tmp_path / "a.json")
    other = write_analysis(tmp_path / "b.json")
    inputs = read_inputs([str(first), str(other)])
    assert len(inputs.analyses) == 2 and len(build_studies(inputs)[0].scores) == 1


def test_models_of_other_dense_models_get_a_chapter_of_their_own(tmp_path):
    one = write_checkpoint(tmp_path / "one", source="org/a")
    two = write_checkpoint(tmp_path / "two", source="org/b")
    page = Page(report(tmp_path, one, two))
    assert page.headings.count("3 of 12 layers removed") == 2
    articles = [found["id"] for tag, found in page.elements if tag == "article"]
    assert articles == ["model-1", "model-2"]


def test_names_are_text_and_never_markup(tmp_path):
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    grid = write_comparison(
        tmp_path / "grid", model=name, refusal=f"{name}\u2028", calibrations=((name, 8),)
    )
    text = report(tmp_path, grid)
    page = Page(text)
    kinds = [attributes.get("type") for attributes, _ in page.scripts]
    assert kinds.count(None) == 2  # the library and the page's own
    assert not any(tag == "img" for tag, _ in page.elements)
    assert "<script>alert" not in text
    assert not any("\u2028" in script for kind, script in page.scripts if "data-plot" in kind)
    assert any(name in row[0] for row in page.tables["Refused or not run"])
    # plotly reads some tags in its texts, so they are escaped once more
    rls = page.plot("model-1-rls-1")["data"][0]["y"][0]
    assert "&lt;img src=x" in rls and "<" not in rls
    links = [v for _, found in page.elements for k, v in found.items() if k in ("href", "src")]
    assert links and all(link.startswith("#") for link in links)


def test_pages_allow_no_network_and_no_other_script(page):
    policy = next(
        attributes["content"]
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy
    assert re.findall(r"script-src ([^;]*)", policy)[0].count("'sha256-") == 2


def test_every_plot_and_table_has_a_name_for_those_who_cannot_see(page):
    plots = [found for tag, found in page.elements if found.get("role") == "img"]
    assert len(plots) == 22 and all(found["aria-label"] for found in plots)
    captions = [tag for tag, _ in page.elements if tag == "figcaption"]
    assert len(captions) == [tag for tag, _ in page.elements].count("figure") == 11
    identifiers = [found["id"] for _, found in page.elements if "id" in found]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_is_one_line_with_the_command(
    package, comparison, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, package, None)
    status = main(["report", str(comparison), "-o", str(tmp_path / "r.html")])
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1
    assert package in error and "pip install 'ghostlayers[report]'" in error
    assert not (tmp_path / "r.html").exists()


def test_an_existing_file_is_not_replaced_without_force(comparison, tmp_path, capsys):
    out = tmp_path / "r.html"
    out.write_text("mine")
    assert main(["report", str(comparison), "-o", str(out)]) == 2
    assert "exists" in capsys.readouterr().err and out.read_text() == "mine"
    assert main(["report", str(comparison), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def damaged(tmp_path, change):
    path = write_analysis(tmp_path / "scores.json")
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda v: v["similarity"].pop(), "`similarity` is no 13 x 13 matrix"),
        (
            lambda v: v["similarity"][3].__setitem__(2, "x"),
            "`similarity[3][2]` is 'x', not a number",
        ),
        (lambda v: v["similarity"][3].__setitem__(2, 7.0), "a cosine above 1"),
        (lambda v: v.update(num_clusters=0), "`num_clusters` is 0"),
        (lambda v: v.update(rls={}), "`rls` is {}, not a number"),
        (lambda v: v.update(calibration=[]), "`calibration` is [], not an object"),
        (lambda v: v.update(block_influence=[10**400]), "not a number"),
    ],
)
def test_damaged_scores_are_one_line(change, expected, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        read_inputs([str(damaged(tmp_path, change))])


@pytest.mark.parametrize(
    "content, expected",
    [
        ("{", "is no JSON file"),
        ("[" * 100000, "is no JSON file"),
        ("{}", "is none of what a report reads"),
        ('{"results": []}', "`results` is empty"),
        ('{"results": [{"path": "a", "perplexity": -1}]}', "a perplexity is -1"),
        ('{"removed": [9], "boundaries": []}', "`num_layers` is None, not a whole number"),
    ],
)
def test_files_of_another_kind_are_one_line(content, expected, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(expected)) as caught:
        read_inputs([str(path)])
    assert "\n" not in str(caught.value)


def test_folders_and_paths_that_hold_nothing_are_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="neither results.jsonl nor ghostlayers.json"):
        read_inputs([str(tmp_path)])
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_inputs([str(tmp_path / "none")])
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="no line of kind 'run'"):
        read_inputs([str(tmp_path)])
    wrong = write_checkpoint(tmp_path / "c", removed=[3, 99])
    with pytest.raises(CheckpointError, match=r"removes layers \[3, 99\] of 12"):
        read_inputs([str(wrong)])


def test_nan_in_a_comparison_counts_as_no_number(tmp_path):
    grid = write_comparison(tmp_path / "grid", calibrations=(("c4", 8),), budgets=(2,))
    path = grid / "results.jsonl"
    value = cell_perplexity("c4", "lorp", "none", 2, 8)
    lines = path.read_text().replace(f'"perplexity": {value},', '"perplexity": NaN,')
    path.write_text(lines)
    study = build_studies(read_inputs([str(grid)]))[0]
    gaps = [gap.what for gap in study.gaps if gap.reason == "it is not finite"]
    assert "perplexity of lorp + none, layers 3,6" in gaps[0]


def test_what_is_far_off_stands_at_the_edge_with_its_value_in_the_table(tmp_path):
    grid = write_comparison(tmp_path / "grid", calibrations=(("c4", 8),), budgets=(2, 3))
    path = grid / "results.jsonl"
    value = cell_perplexity("c4", "lorp", "none", 3, 8)
    path.write_text(path.read_text().replace(f'"perplexity": {value},', '"perplexity": 4e9,'))
    page = Page(report(tmp_path, grid))
    top = 20 * DENSE["c4"]
    plot = page.plot("model-1-perplexity-1-1")
    none = plot["data"][0]
    assert none["y"] == [cell_perplexity("c4", "lorp", "none", 2, 8), top]
    assert none["marker"]["symbol"][1] == "triangle-up-open" != none["marker"]["symbol"][0]
    assert plot["layout"]["yaxis"]["range"][1] < 1 + math.log10(top)
    assert any(
        "4e+09" in cell or "4000000000" in cell
        for row in page.tables["Perplexity on c4, 4 × 256 tokens"]
        for cell in row
    )


def test_merged_layers_do_not_miss_repairs(tmp_path):
    grid = write_comparison(tmp_path / "grid", calibrations=(("c4", 8),), budgets=(2,))
    path = grid / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    merged = {"kind": "cut", "schema": 1, "calibration": "c4", "num_windows": 8, "merged": True}
    merged |= {"selector": "laco", "num_remove": 2, "layers": [6, 7]}
    cell = {"kind": "cell", "schema": 1, "calibration": "c4", "num_windows": 8, "layers": [6, 7]}
    cell |= {"operator": "none", "selector": "laco", "perplexity": {}}
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, merged, cell)))
    study = build_studies(read_inputs([str(grid)]))[0]
    assert not [gap.what for gap in study.gaps if gap.what.startswith("laco")]


def test_the_front_holds_what_no_other_beats():
    def point(speed, perplexity):
        return Point(Model(), speed, perplexity)

    points = [point(1.0, 10), point(1.2, 15), point(1.1, 15), point(1.2, 14), point(1.4, 30)]
    front = [(each.speed, each.perplexity) for each in pareto_front(points)]
    assert front == [(1.0, 10), (1.2, 14), (1.4, 30)]


def test_shapes_say_where_a_value_is_wrong():
    shape = {"a": [{"b": Maybe(float)}], "c": Values(str)}
    assert shape_error({"a": [{"b": None}, {}, {"b": 2}], "c": {}}, shape) is None
    assert shape_error({"a": [{"b": True}], "c": {}}, shape) == "`a[0].b` is True, not a number"
    assert shape_error({"a": [], "c": {"x": 1}}, shape) == "`c.x` is 1, not text"
    assert shape_error([], shape) == "`the file` is [], not an object"


def test_small_parts_of_a_page():
    assert Table(["a", "b", "c"], [["1.5 ± 0.2", "3,5", "–"], ["–", "7", "–"]]).right == [
        True,
        False,
        False,
    ]
    assert log_ticks(19, 55) == [20, 30, 40, 50]
    assert (number(1234.5), number(0.00012345, 2), number(None)) == ("1234", "0.00012", "–")
    assert [short_name(n) for n in ("org/m", "/a/b/", "./x", "C:\\m\\n")] == [
        "org/m",
        "b",
        "x",
        "n",
    ]
    many = marks(["none", *map(str, range(12))])
    assert len({(m.color, m.symbol, m.dash) for m in many.values()}) == 13


def test_axes_of_the_largest_numbers():
    from ghostlayers.report_style import log_axis

    for low, high in ((1e-308, 1e308), (1e308, 1.7e308), (1.0, 1.7e308), (3.0, 3.0)):
        axis = log_axis("ratio", [low, high])
        assert axis["range"][0] < axis["range"][1] <= 308.3
        assert 2 <= len(axis["tickvals"]) <= 60


def test_alignment_of_a_table_is_found_once(monkeypatch):
    table = Table(("a", "b"), [("x", "1.0")] * 50)
    assert table.right == [False, True]
    monkeypatch.setattr("ghostlayers.report_style.NUMBER", None)
    assert table.right == [False, True]  # a page asks for every cell


def test_marks_lie_on_the_bar_of_their_own_error_without_repair():
    """Methods that count other tokens have other errors before: each mark stands on its own bar."""
    entry = {"start": 1, "stop": 3, "operator": "x"}
    found = {"ghost": (0.3, 0.2), "replaceme-lstsq": (0.3, 0.25), "ghost-robust": (0.6, 0.4)}
    models = [
        Model(
            selector="lorp",
            operator=name,
            calibration="t",
            boundaries=[{**entry, "error_before": before, "error_after": after}],
        )
        for name, (before, after) in found.items()
    ]
    looks = {name: Mark(name, "#000000", "circle", "solid") for name in found}
    picture = next(iter(repair_pictures(Study("m", models=models), looks)))
    bar, *marks = picture.panels[0].spec["data"]
    bars = dict(zip(bar["y"], bar["x"], strict=True))
    assert sorted(bars.values()) == pytest.approx([30, 60])
    for (before, after), mark in zip(found.values(), marks, strict=True):
        assert mark["x"] == pytest.approx([100 * after])
        assert bars[mark["y"][0]] == pytest.approx(100 * before)
