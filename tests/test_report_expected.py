"""A report puts published numbers beside measured ones, and says where they are no comparison."""

import json
import math
from collections import Counter

import pytest

from conftest import ROOT
from ghostlayers.cli import main
from ghostlayers.compare_file import read_config, runs_of
from ghostlayers.compare_results import read_results
from ghostlayers.errors import CheckpointError, GhostlayersError
from ghostlayers.expected_numbers import expected_numbers
from ghostlayers.report_inputs import read_inputs
from ghostlayers.report_studies import build_studies
from report_samples import DENSE, GAINS, cell_perplexity, write_comparison
from tiny_checkpoints import save_tiny

NUMBERS = [
    {"quantity": "perplexity", "text": "c4", "value": 20.0},
    {
        "quantity": "perplexity",
        "select": "lorp",
        "num_remove": 3,
        "values": {"none": 30.0, "ghost": 25.0, "replaceme-lstsq": 1.5},
    },
    {"quantity": "accuracy", "select": "lorp", "num_remove": 2, "values": {"ghost": 50.0}},
    {"quantity": "perplexity", "select": "lorp", "num_remove": 4, "values": {"fold": 9.0}},
    {
        "quantity": "perplexity",
        "text": "c4",
        "select": "shortgpt",
        "num_remove": 4,
        "values": {"none": {"at_least": 30.0}},
    },
    {"quantity": "rls", "value": 0.5, "note": "a remark"},
    {"quantity": "speedup", "select": "lorp", "num_remove": 4, "values": {"none": 1.4}},
    {"quantity": "less_peak_memory", "num_remove": 4, "values": {"none": 24}, "differs": "sizes"},
]
COLUMNS = ("method", "removed", "expected", "measured", "difference", "percent")


def planted(folder, *, planned=True, numbers=NUMBERS, settings=None):
    """Write a comparison of org/model that expects numbers, and return its study."""
    write_comparison(folder, calibrations=(("c4", 8),))
    path = folder / "results.jsonl"
    first, *others = path.read_text().splitlines()
    run = json.loads(first)
    expected = [{"model": "org/model", **number} for number in numbers]
    run["expected"] = {"source": "arXiv 0000.00000", "numbers": expected, "saturates": 32}
    run["title"] = "A table"
    if planned:
        asked = {**run["settings"], "window": 256, "dtype": "float16", **(settings or {})}
        run["planned"] = {"model": "org/model", "settings": asked, "smoke": False}
        run["planned"] |= {"calibrations": ["c4"], "texts": list(DENSE)}
        run["settings"] |= {"window": 256, "dtype": "float16"}
    path.write_text("\n".join([json.dumps(run), *others]) + "\n")
    return build_studies(read_inputs([str(folder)]))[0]


def rows_of(study, *columns):
    [found] = study.expected
    places = [found.header.index(name) for name in columns or COLUMNS]
    return [[row[place] for place in places] for row in found.rows]


def mean(selector, operator, budget):
    return math.fsum(cell_perplexity(t, selector, operator, budget, 8) for t in DENSE) / 2


def test_each_number_stands_beside_its_cell(tmp_path):
    study = planted(tmp_path / "g")
    rows = rows_of(study)
    dense, none, ghost, missing, accuracy, refused, bound, rls, speed, *memory = rows
    assert dense == ["dense", "0", "20.00", "21.30 ± 0.85", "+1.30", "+6.5"]
    for row, operator, wanted in ((none, "none", 30.0), (ghost, "ghost", 25.0)):
        value = mean("lorp", operator, 3)
        assert row[:3] == [f"lorp + {operator}", "3", f"{wanted:.2f}"]
        assert row[3].startswith(f"{value:.2f} ± ")
        assert row[4:] == [f"{value - wanted:+.2f}", f"{100 * (value / wanted - 1):+.1f}"]
    assert missing == ["lorp + replaceme-lstsq", "3", "1.50", "not run", "–", "–"]
    value = 100 * (0.6 - 0.02 * 2 * (1 - GAINS["ghost"]))
    assert accuracy[3:] == [f"{value:.2f} ± 2.10", "not compared", "–"]  # copa was not run
    assert refused[3:] == ["refused", "–", "–"]
    assert bound[2:] == ["≥ 30.00", f"{bound[3]}", "as expected", "–"]
    assert rls == ["dense", "0", "0.500", "0.580", "+0.080", "–"]
    assert speed[3:] == ["1.50", "+0.10", "–"]
    assert [row[0] for row in memory] == [f"{s} + none" for s in ("lorp", "shortgpt", "streamline")]
    assert all(row[3:] == ["0.00", "not compared", "–"] for row in memory)
    [found] = study.expected
    assert found.notes == [
        "Not compared: the mean lacks tasks that were not run (copa).",
        "Not compared: sizes.",
        "Of 1 of the numbers: a remark.",
    ]
    assert found.rest == {"saturates": 32} and found.title == "A table"
    assert rows_of(study, "source", "calibration")[7] == [
        "arXiv 0000.00000",
        "c4, 8 windows",
    ]


def test_standard_error_of_a_mean_perplexity(tmp_path):
    [_, [shown], *_] = rows_of(planted(tmp_path / "g"), "measured")
    errors = [round(0.04 * cell_perplexity(t, "lorp", "none", 3, 8), 4) for t in DENSE]
    assert shown.endswith(f"± {math.hypot(*errors) / 2:.2f}")


def test_smoke_size_is_said_and_gives_no_difference(tmp_path):
    planted(tmp_path / "g")
    path = tmp_path / "g" / "results.jsonl"
    path.write_text(path.read_text().replace('"smoke": false', '"smoke": true'))
    study = build_studies(read_inputs([str(tmp_path / "g")]))[0]
    differences = Counter(row[0] for row in rows_of(study, "difference"))
    assert set(differences) == {"not compared", "–"}
    assert "smoke size" in study.expected[0].notes[0]
    assert rows_of(study, "measured")[0] == ["21.30 ± 0.85"]


def test_another_model_is_said_and_nothing_is_compared(tmp_path):
    numbers = [{**number, "model": "big/model-8B"} for number in NUMBERS]
    study = planted(tmp_path / "g", numbers=numbers)
    assert {tuple(row) for row in rows_of(study, "measured", "difference")} == {("not run", "–")}
    assert (
        study.expected[0]
        .notes[0]
        .startswith(
            "This grid was run on org/model, not on big/model-8B: nothing below was measured"
        )
    )


def test_a_local_copy_is_known_by_its_name_and_other_models_are_left_out(tmp_path):
    numbers = [
        {"quantity": "perplexity", "text": "c4", "value": 20.0, "model": "other/Model"},
        {"quantity": "perplexity", "text": "c4", "value": 19.0, "model": "big/model-8B"},
    ]
    study = planted(tmp_path / "g", numbers=numbers)
    assert rows_of(study, "expected", "difference") == [["20.00", "+1.30"]]
    assert study.expected[0].notes[0].startswith("1 more numbers are about other models")


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"window": 2048}, "Not compared: window is 256, the configuration says 2048."),
        ({"num_windows": [32]}, "num_windows is 8, the configuration says 32"),
        ({"dtype": "float32"}, "dtype is float16, the configuration says float32"),
    ],
)
def test_other_settings_are_said(tmp_path, settings, note):
    study = planted(tmp_path / "g", settings=settings)
    compared = [row for row in rows_of(study, "difference") if row[0].startswith(("+", "-", "as"))]
    # the type of the numbers is told and does not stand against a difference; the dense model has
    # no calibration
    assert len(compared) == {"window": 0, "num_windows": 1, "dtype": 6}[next(iter(settings))]
    assert any(note in line for line in study.expected[0].notes)


def test_a_comparison_without_a_plan_is_not_compared(tmp_path):
    study = planted(tmp_path / "g", planned=False)
    assert {row[0] for row in rows_of(study, "difference")} == {"not compared", "–"}
    assert "does not record" in study.expected[0].notes[0]


def test_free_expectations_are_shown_as_they_are(tmp_path):
    pytest.importorskip("plotly", reason="pip install 'ghostlayers[report]'")
    planted(tmp_path / "g")
    path = tmp_path / "g" / "results.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), "expected": {"a": 1.5}}), *others]))
    path.write_text(path.read_text() + "\n")
    assert main(["report", str(tmp_path / "g"), "-o", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "&#34;a&#34;: 1.5" in text and "Expected and measured" not in text


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        (5, "`expected.numbers` is 5; allowed: a list of mappings"),
        ([5], "`expected.numbers[0]` is 5, not an object"),
        ([{"quantity": "ppl"}], "Unknown quantity 'ppl'"),
        ([{"quantity": "rls", "valu": 1}], "Unknown key 'valu'. Did you mean 'value'?"),
        ([{"quantity": "rls"}], "`expected.numbers[0]` needs `values` by operator"),
        ([{"quantity": "rls", "value": "x"}], "`expected.numbers[0]` is 'x', not a number"),
        ([{"quantity": "rls", "num_remove": 3, "value": 1}], "needs `values` by operator"),
        ([{"quantity": "rls", "num_remove": 3, "values": {}}], "has no `values`"),
    ],
)
def test_faulty_numbers_are_one_line(tmp_path, numbers, fault):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"model": "m", "expected": {"numbers": numbers}}))
    with pytest.raises(GhostlayersError) as caught:
        read_config(file)
    assert fault in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_needs_a_model_and_damage_is_found_by_the_report(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"expected": {"numbers": [{"quantity": "rls", "value": 1}]}}))
    with pytest.raises(GhostlayersError, match="names no `model`"):
        read_config(file)
    planted(tmp_path / "g")
    path = tmp_path / "g" / "results.jsonl"
    path.write_text(path.read_text().replace('"quantity": "rls"', '"quantity": "rl"'))
    with pytest.raises(CheckpointError, match="Unknown quantity 'rl'"):
        read_inputs([str(tmp_path / "g")])


def test_a_grid_of_a_file_keeps_what_it_expects(run, tmp_path):
    """From the file over the results to the page; the same grid at other sizes, and smoke."""
    model = save_tiny(tmp_path / "m")
    (tmp_path / "t.txt").write_text("One text of some words, again and again. " * 60)
    text = str(tmp_path / "t.txt")
    settings = {"num_remove": 2, "select": "streamline", "recover": ["none"], "window": 16}
    settings |= {"calibration": text, "num_windows": 2, "perplexity": text, "eval_window": 16}
    settings |= {"eval_windows": 2, "model": str(model), "title": "T"}
    number = {"quantity": "perplexity", "text": "t.txt", "select": "streamline", "num_remove": 2}
    expected = {"source": "S", "numbers": [{**number, "values": {"none": 100, "ghost": 1}}]}
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({**settings, "expected": expected}))
    for name, flags in (("full", []), ("other", ["--eval-windows", "1"]), ("smoke", ["--smoke"])):
        status, _, err = run("compare", "--config", config, "-o", tmp_path / name, *flags)
        assert status == 0, err
        results = read_results(tmp_path / name)
        planned = results.run.planned
        assert planned["model"] == str(model) and planned["smoke"] == (name == "smoke")
        assert planned["settings"]["eval_windows"] == 2 and planned["settings"]["ridge"] == 0.0
        assert planned["settings"]["select"] == ["streamline"]
        study = build_studies(read_inputs([str(tmp_path / name)]))[0]
        none, ghost = rows_of(study, "expected", "measured", "difference")
        assert none[0] == "100.00" and ghost[1:] == ["not run", "–"]
        if name == "full":
            assert planned["settings"].items() <= {**results.run.settings}.items()
            value = results.cells[0].perplexity["t.txt"]["perplexity"]
            assert none[2] == f"{value - 100:+.2f}"
        else:
            assert none[2] in ("not compared", "–")


def test_published_numbers_of_the_configurations():
    """Counts and some numbers of the papers; every one names a model that its file runs."""
    counts = {
        "ghosted_zero_shot": 24,
        "ghosted_perplexity": 7,
        "ghosted_calibration": 0,
        "linearpatch_perplexity": 15,
        "lorp_selection": 36,
        "lorp_speed": 4,
    }
    for name, count in counts.items():
        file = read_config(ROOT / "configs" / f"{name}.yaml")
        runs = runs_of(file, {}, None)
        numbers = expected_numbers(file["expected"])
        assert len(numbers) == count, name
        cells = {
            (run.model, selector, budget, operator)
            for run in runs
            for selector in run.config.select
            for budget in run.config.num_remove
            for operator in run.config.recover
        }
        for number in numbers:
            assert number.model in {run.model for run in runs}
            if number.num_remove is not None and number.select is not None:
                place = (number.model, number.select, number.num_remove, number.recover)
                assert place in cells
            if number.text is not None:
                assert number.text in runs[0].config.texts
        assert all(
            run.planned["settings"] == json.loads(json.dumps(run.config.to_dict())) for run in runs
        )


def test_a_folder_of_several_runs_is_read_whole(tmp_path):
    numbers = [{**NUMBERS[0], "model": name} for name in ("org/model", "org/other")]
    for name in ("model-7", "other-7"):
        planted(tmp_path / "grid" / name, numbers=numbers)
    path = tmp_path / "grid" / "other-7" / "results.jsonl"
    path.write_text(path.read_text().replace('"name": "org/model"', '"name": "org/other"'))
    studies = build_studies(read_inputs([str(tmp_path / "grid")]))
    assert [study.model for study in studies] == ["org/model", "org/other"]
    for study in studies:
        assert rows_of(study, "model", "difference") == [[study.model, "+1.30"]]


def test_the_page_has_the_table_and_says_once_what_all_rows_share(tmp_path):
    pytest.importorskip("plotly", reason="pip install 'ghostlayers[report]'")
    planted(tmp_path / "g")
    assert main(["report", str(tmp_path / "g"), "-o", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    table = text[text.index('aria-label="Expected and measured: A table"') :]
    table = table[: table.index("</table>")]
    assert "<caption>Model org/model; calibration c4, 8 windows. Means" in table
    assert (
        '<th scope="col" class="number">percent</th>' in table and "calibration</th>" not in table
    )
    assert table.count("<tr>") == 1 + 12 and "not run" in table
    assert '<a href="#model-1-expected-section">' in text and "&#34;saturates&#34;: 32" in text
