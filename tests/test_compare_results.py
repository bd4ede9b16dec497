"""The page of results and the tables: from planted lines to text; tasks and speed of cells."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from conftest import ROOT
from ghostlayers.compare_lines import (
    CalibrationLine,
    CellLine,
    CutLine,
    DenseLine,
    RunLine,
)
from ghostlayers.compare_results import ResultsFile, from_json, read_results, to_json
from ghostlayers.compare_tables import tables, write_tables

CALIBRATION = {"windows": 8, "window": 16, "source": "t.txt"}
TEXT = {"windows": 2, "window": 16, "tokens": 30, "ids_sha256": "ab" * 32, "perplexity": 10.0}
LINES = (
    RunLine(
        {"name": "tiny", "architecture": "A", "num_layers": 8, "hidden_size": 4}
        | {"parameters": 10**6, "dtype": "float32", "fingerprint": {"weights_sha256": "cd" * 32}},
        {"ghostlayers": "0.1.0", "torch": "2", "transformers": "5"},
        "2026-01-01T00:00:00+00:00",
        {"recover": ["none", "ghost"]},
        {"cpu": "a cpu", "gpu": None, "threads": 1},
        commit="0123abc",
        command=["compare", "/somewhere/tiny", "--num-remove", "2"],
    ),
    CalibrationLine(
        "t", 8, "ef" * 32, 16, 128, CALIBRATION, [[1.0]], 0.5, "distributed", 4, [], []
    ),
    CutLine("t", 8, "lorp", 2, [3, 4]),
    CutLine("t", 8, "shortgpt", 2, refused="too few"),
    DenseLine({"text": TEXT}),
    CellLine("t", 8, [3, 4], "none", perplexity={"text": {**TEXT, "perplexity": 20, "ratio": 2.0}}),
    CellLine("t", 8, [3, 4], "ghost", refused="no place"),
)


@pytest.fixture
def folder(tmp_path):
    file = ResultsFile(tmp_path)
    for line in LINES:
        file.add(line)
    return tmp_path


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.kind)
def test_a_line_read_back_is_the_same(line):
    assert from_json(to_json(line)) == line


def test_infinity_becomes_null():
    line = CellLine("t", 8, [1], "none", perplexity={"text": {"ratio": float("inf")}})
    assert from_json(to_json(line)).perplexity == {"text": {"ratio": None}}


def test_tables(folder):
    first = tables(read_results(folder))[0]
    assert first.header[-2:] == ("none", "ghost")
    assert first.rows[0][-4:] == ("lorp", "3-4", "2.0000", "refused")
    assert first.rows[1][-4:] == ("shortgpt", "refused", "-", "-")
    write_tables(read_results(folder), folder)
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["operator"] for row in rows] == ["dense model", "none", "ghost", ""]
    assert rows[1]["ratio"] == "2.0" and rows[2]["refused"] == "no place"


def test_results_page(folder, tmp_path):
    page = tmp_path / "results.md"
    script = ROOT / "benchmarks" / "results_page.py"
    subprocess.run([sys.executable, script, folder, "--out", page], check=True)
    text = page.read_text()
    for part in (
        "0123abc",
        "`ghostlayers compare tiny --num-remove 2`",
        "8 windows of 16",
        "2.0000",
    ):
        assert part in text
    assert "/somewhere" not in text and "no place" in text and "too few" in text


def test_tasks_and_speed_of_cells(work, run, tmp_path, shared, monkeypatch):
    monkeypatch.chdir(shared / "data")  # their paths are relative
    flags = ["--num-remove", 2, "--select", "streamline", "--recover", "none,ghost"]
    flags += ["--calibration", work / "t.txt", "--num-windows", 4, "--window", 24]
    flags += ["--tasks", "local_arc_easy", "--include-path", shared / "data" / "lm_eval_tasks"]
    flags += ["--limit", 4, "--speed", "--speed-batch-sizes", 1, "--speed-lengths", 8]
    flags += ["--speed-new-tokens", 2, "--speed-repeats", 1, "--speed-warmup", 0]
    flags += ["--save-checkpoints"]
    status, out, err = run("compare", work / "m", *flags, "-o", tmp_path / "o")
    assert status == 0, err
    results = read_results(tmp_path / "o")
    assert results.dense.perplexity == {} and "promised" in out
    import ghostlayers as gl
    from ghostlayers.loading import load_model, load_tokenizer, locate

    tokenizer = load_tokenizer(locate(str(work / "m")))
    place = {"include_path": shared / "data" / "lm_eval_tasks", "limit": 4}
    dense = gl.evaluate_tasks(
        load_model(locate(str(work / "m"))), tokenizer, "local_arc_easy", **place
    )
    for cell in results.cells:
        (saved,) = (tmp_path / "o" / "checkpoints").glob(f"*-{cell.operator}-dense")
        model = load_model(locate(str(saved)))
        wanted = gl.evaluate_tasks(model, tokenizer, "local_arc_easy", **place).to_dict(dense)
        assert cell.tasks["scores"] == wanted["scores"]
        assert cell.speed["num_layers"] == 6
        assert cell.speed["promised_speedup"] == pytest.approx(8 / 6)
