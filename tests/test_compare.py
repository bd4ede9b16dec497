"""`ghostlayers compare`: cells equal prune and eval, runs continue, faults are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ghostlayers as gl
from ghostlayers.compare import Comparison
from ghostlayers.compare_calibration import chains
from ghostlayers.compare_results import ResultsFile, read_results
from ghostlayers.compare_tables import columns
from ghostlayers.loading import load_model, load_tokenizer, locate
from tiny_checkpoints import save_tiny

OPERATORS = (
    *("none", "ghost", "ghost-robust", "linearpatch-diag", "linearpatch-rotate"),
    *("replaceme-lstsq", "fold+ghost"),
)


def grid(folder: Path, out: Path, **changes) -> list:
    """Return the arguments of a small comparison."""
    values = {
        "num-remove": "3",
        "select": "lorp,streamline",
        "recover": ",".join(OPERATORS),
        "fit": "dense,sequential",
        "calibration": folder / "t.txt",
        "num-windows": "4,8",
        "window": 24,
        "perplexity": folder / "u.txt",
        "eval-window": 24,
        "eval-windows": 3,
        **changes,
    }
    flags = [part for name, value in values.items() for part in (f"--{name}", value)]
    return ["compare", folder / "m", *flags, "-o", out]


SMALL = {"num-remove": "2", "select": "streamline,lorp", "recover": "none,ghost", "fit": "dense"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tiny_checkpoints import text_of

    place = tmp_path_factory.mktemp("compare")
    save_tiny(place / "m")
    (place / "t.txt").write_text(text_of(400))
    (place / "u.txt").write_text(text_of(100, seed=5))
    return place


@pytest.fixture(scope="module")
def measured(folder):
    """The whole grid, measured once; `test_compare_equal` has refined cells."""
    from ghostlayers.cli import main

    assert main([str(arg) for arg in grid(folder, folder / "all", refine=0)]) == 0
    return read_results(folder / "all")


class TestCellsArePruneAndEval:
    @pytest.mark.parametrize("fit", ["dense", "sequential"])
    @pytest.mark.parametrize("operator", OPERATORS)
    def test_same_numbers(self, folder, measured, operator, fit, tmp_path):
        cells = [c for c in measured.cells if (c.operator, c.fit) == (operator, fit)]
        if operator == "none" and fit == "sequential":
            assert not cells
            return
        scattered = [c for c in cells if len(c.boundaries) > 1 and c.num_windows == 8]
        cell = scattered[0]
        source = locate(str(folder / "m"))
        model, tokenizer = load_model(source), load_tokenizer(source)
        result = gl.prune(
            model,
            tokenizer,
            layers=",".join(map(str, cell.layers)),
            recover=operator,
            fit=fit,
            refine=0,
            calibration=str(folder / "t.txt"),
            num_windows=8,
            window=24,
            progress=False,
        )
        gl.save_pruned(result, tmp_path / "out", source=source)
        again = load_model(locate(str(tmp_path / "out")))
        text = str(folder / "u.txt")
        windows = gl.text_windows(tokenizer, text, num_windows=3, window=24, evaluation=True)
        wanted = gl.perplexity(again, windows, progress=False)
        found = cell.perplexity["u.txt"]
        assert found["perplexity"] == pytest.approx(wanted.perplexity, rel=1e-6)
        assert found["window_losses"] == pytest.approx(wanted.window_losses, rel=1e-6)
        assert cell.used == [entry["operator"] for entry in result.record["boundaries"]]
        assert cell.parameters == sum(p.numel() for p in again.parameters())
        for own, other in zip(cell.boundaries, result.record["boundaries"], strict=True):
            for name in ("error_before", "error_after", "held_out_error_after"):
                assert (own.get(name) is None) == (other.get(name) is None)
                if own.get(name) is not None:
                    assert own[name] == pytest.approx(other[name], rel=1e-6, abs=1e-9)

    def test_cuts_are_those_of_prune(self, folder, measured):
        model = load_model(locate(str(folder / "m")))
        tokenizer = load_tokenizer(locate(str(folder / "m")))
        for cut in measured.cuts:
            result = gl.prune(
                model,
                tokenizer,
                num_remove=cut.num_remove,
                select=cut.selector,
                recover="none",
                calibration=str(folder / "t.txt"),
                num_windows=cut.num_windows,
                window=24,
                progress=False,
            )
            assert cut.layers == list(result.plan.removed)

    def test_similarity_of_fewer_windows_is_that_of_a_sweep_of_its_own(self, folder, measured):
        assert [line.num_windows for line in measured.calibrations] == [4, 8]
        model = load_model(locate(str(folder / "m")))
        tokenizer = load_tokenizer(locate(str(folder / "m")))
        windows = gl.text_windows(tokenizer, str(folder / "t.txt"), num_windows=4, window=24)
        own = gl.measure_similarity(model, windows.ids.split(1), progress=False)
        line = measured.calibrations[0]
        assert torch.allclose(
            torch.tensor(line.similarity, dtype=torch.float64), torch.from_numpy(own.matrix)
        )
        assert line.hash == windows.ids_sha256 and line.tokens == 96
        assert line.rls == pytest.approx(own.rls)

    def test_dense_line_and_ratio(self, measured):
        dense = measured.dense.perplexity["u.txt"]
        cell = measured.cells[0].perplexity["u.txt"]
        assert cell["ratio"] == pytest.approx(cell["perplexity"] / dense["perplexity"])
        pairs = [a - b for a, b in zip(cell["window_losses"], dense["window_losses"], strict=True)]
        spread = torch.tensor(pairs, dtype=torch.float64)
        assert cell["log_ratio"] == pytest.approx(float(spread.mean()))
        error = float(spread.std() / len(pairs) ** 0.5)
        assert cell["log_ratio_standard_error"] == pytest.approx(error)

    def test_every_cell_is_there_once(self, measured):
        keys = [cell.key for cell in measured.cells]
        assert len(keys) == len(set(keys))
        pairs = 1 + 2 * (len(OPERATORS) - 1)
        for cut in measured.cuts:
            assert len(measured.cells_of(cut)) == pairs

    def test_tables(self, folder, measured):
        rows = (folder / "all" / "results.csv").read_text().splitlines()
        pairs = 1 + 2 * (len(OPERATORS) - 1)
        assert len(rows) == 1 + 1 + len(measured.cuts) * pairs
        text = (folder / "all" / "results.md").read_text()
        assert "Sensitivity to the calibration" in text
        first = measured.cells[0].perplexity["u.txt"]["ratio"]
        assert f"{first:.4f}" in text


def test_little_memory_gives_the_same_cells(folder, measured, run, tmp_path):
    changes = {"moments-memory": "1B", "states-memory": "1B", "num-windows": "8"}
    changes |= {"recover": "ghost,ghost-robust,linearpatch-rotate,replaceme-lstsq", "fit": "dense"}
    status, _, err = run(*grid(folder, tmp_path / "o", **changes))
    assert status == 0, err
    wanted = {cell.key: cell for cell in measured.cells}
    found = read_results(tmp_path / "o").cells
    assert len(found) == 8
    for cell in found:
        other = wanted[cell.key]
        own = cell.perplexity["u.txt"]["perplexity"]
        assert own == pytest.approx(other.perplexity["u.txt"]["perplexity"], rel=1e-6)


class TestGoesOn:
    def test_after_a_kill(self, folder, run, tmp_path, monkeypatch):
        args = grid(folder, tmp_path / "o", **SMALL)
        assert run(*args)[0] == 0
        path = tmp_path / "o" / "results.jsonl"
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        kept = next(i for i, line in enumerate(lines) if b'"kind": "cell"' in line) + 2
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
        measured, own = [], Comparison._cell

        def spy(self, repairer, job, *rest):
            measured.append(job.key)
            return own(self, repairer, job, *rest)

        monkeypatch.setattr(Comparison, "_cell", spy)
        monkeypatch.setattr("ghostlayers.compare_calibration.sweep", None)
        monkeypatch.setattr("ghostlayers.compare_cuts.choose_layers", None)
        assert run(*args)[0] == 0
        again = [json.loads(line) for line in path.read_bytes().splitlines()]
        before = [json.loads(line) for line in lines]
        for line in (*again, *before):
            line.pop("seconds", None)
        assert again == before
        assert len(measured) <= len(before) - kept
        assert run(*args)[0] == 0 and len(path.read_bytes().splitlines()) == len(before)

    @pytest.mark.parametrize("selector", ["greedy-ppl", "shortened-magnitude"])
    def test_a_stored_ranking_is_not_made_again(self, folder, run, tmp_path, monkeypatch, selector):
        changes = {"select": selector, "num-remove": "1,2", "recover": "none", "num-windows": "4"}
        args = grid(folder, tmp_path / "o", **{**SMALL, **changes})
        assert run(*args)[0] == 0
        path = tmp_path / "o" / "results.jsonl"
        before = read_results(tmp_path / "o").cuts
        lines = path.read_bytes().splitlines(keepends=True)
        first = next(i for i, line in enumerate(lines) if b'"kind": "cut"' in line)
        path.write_bytes(b"".join(lines[: first + 1]))
        monkeypatch.setattr("ghostlayers.compare_cuts.choose_layers", None)
        assert run(*args)[0] == 0
        assert [x.layers for x in read_results(tmp_path / "o").cuts] == [x.layers for x in before]

    def test_a_damaged_line_is_named(self, folder, run, tmp_path):
        args = grid(folder, tmp_path / "o", **SMALL)
        (tmp_path / "o").mkdir()
        (tmp_path / "o" / "results.jsonl").write_text('{"kind": "cut"\n{}\n')
        status, _, err = run(*args)
        assert status == 2 and "line 1" in err

    @pytest.mark.parametrize(
        ("flag", "value"), [("eval-windows", 2), ("recover", "none"), ("seed", 1)]
    )
    def test_other_settings_are_refused(self, folder, run, tmp_path, flag, value):
        small = {**SMALL, "num-windows": "4", "recover": "none,linearpatch-diag"}
        assert run(*grid(folder, tmp_path / "o", **small))[0] == 0
        before = (tmp_path / "o" / "results.jsonl").read_bytes()
        status, _, err = run(*grid(folder, tmp_path / "o", **{**small, flag: value}))
        assert status == 2
        assert f"`{flag.replace('-', '_')}`" in err and str(value) in err
        assert (tmp_path / "o" / "results.jsonl").read_bytes() == before

    @pytest.mark.parametrize("select", ["streamline", "greedy-ppl"])
    def test_a_grid_grows(self, folder, run, tmp_path, select):
        small = {**SMALL, "select": select, "num-remove": "1", "recover": "none", "num-windows": 4}
        more = {**small, "num-remove": "1,2", "recover": "ghost,none", "select": f"lorp,{select}"}
        assert run(*grid(folder, tmp_path / "grown", **small))[0] == 0
        before = (tmp_path / "grown" / "results.jsonl").read_bytes()
        assert run(*grid(folder, tmp_path / "grown", **more))[0] == 0
        assert run(*grid(folder, tmp_path / "whole", **more))[0] == 0
        assert (tmp_path / "grown" / "results.jsonl").read_bytes().startswith(before)
        grown, whole = (read_results(tmp_path / name) for name in ("grown", "whole"))
        assert len(grown.runs) == 2 and grown.run.settings["recover"] == ["ghost", "none"]
        cells = [{cell.key: cell.perplexity for cell in each.cells} for each in (grown, whole)]
        assert cells[0] == cells[1] and len(cells[0]) > 2
        for results in (grown, whole):
            assert [column for column, _ in columns(results)] == ["ghost", "none"]

    def test_another_model_is_refused(self, folder, run, tmp_path):
        small = {**SMALL, "num-windows": "4", "recover": "none"}
        assert run(*grid(folder, tmp_path / "o", **small))[0] == 0
        save_tiny(tmp_path / "m", "llama", vocab_size=300)
        args = grid(folder, tmp_path / "o", **small)
        args[1] = tmp_path / "m"
        status, _, err = run(*args)
        assert status == 2 and "another model" in err

    def test_a_file_knows_its_torn_line(self, tmp_path):
        (tmp_path / "results.jsonl").write_bytes(b'{"kind": "dense", "schema": 1}\n{"kin')
        file = ResultsFile(tmp_path)
        assert file.results.dense is not None
        assert (tmp_path / "results.jsonl").read_bytes() == b'{"kind": "dense", "schema": 1}\n'


class TestRefusals:
    def test_a_refused_cell_is_stored_and_the_run_goes_on(self, folder, run, tmp_path):
        save_tiny(tmp_path / "g", "gemma3")  # a norm stands behind the MLP
        changes = {**SMALL, "num-windows": "4", "recover": "replaceme-lstsq,none,ghost"}
        args = grid(folder, tmp_path / "o", **changes)
        args[1] = tmp_path / "g"
        status, out, err = run(*args)
        assert status == 0, err
        cells = read_results(tmp_path / "o").cells
        refused = [cell for cell in cells if cell.refused]
        assert {cell.operator for cell in refused} == {"replaceme-lstsq"}
        assert all("norm" in cell.refused for cell in refused)
        assert {cell.operator for cell in cells if not cell.refused} == {"none", "ghost"}
        line = f"{len(refused)} of {len(cells)} cuts or cells were refused; results.jsonl says why"
        assert out.splitlines()[-1] == line

    def test_a_refused_cut(self, folder, run, tmp_path):
        changes = {**SMALL, "select": "shortened-magnitude,shortgpt", "num-remove": "4"}
        changes |= {"num-windows": "4", "recover": "none"}
        assert run(*grid(folder, tmp_path / "o", **changes))[0] == 0
        results = read_results(tmp_path / "o")
        reasons = {cut.selector: cut.refused for cut in results.cuts}
        assert "shortened-magnitude keeps the first 4" in reasons["shortened-magnitude"]
        assert reasons["shortgpt"] is None and len(results.cells) == 1

    @pytest.mark.parametrize("what", ["cuts", "cells"])
    def test_all_refused_is_a_failure_that_leaves_its_results(self, folder, run, tmp_path, what):
        changes = {**SMALL, "num-windows": "4", "num-remove": "4", "select": "shortgpt"}
        if what == "cuts":
            changes |= {"select": "shortened-magnitude", "recover": "none,ghost"}
            said, model = "shortened-magnitude keeps the first 4", folder / "m"
        else:
            changes |= {"recover": "replaceme-lstsq,replaceme-cosine"}
            said, model = "norm", save_tiny(tmp_path / "g", "gemma3")
        args = grid(folder, tmp_path / "o", **changes)
        args[1] = model
        count = {"cuts": 1, "cells": 2}[what]
        for _ in range(2):  # the second finds all of it stored
            status, out, err = run(*args, "--json", tmp_path / "all.json")
            last = err.splitlines()[-1]
            assert status == 2 and f"error: all {count} cuts or cells were refused, " in last
            assert said in last and f"{count} of {count} cuts or cells were refused" in out
            [summary] = json.loads((tmp_path / "all.json").read_text())["results"]
            assert summary["refused"] == count
            assert len(read_results(tmp_path / "o").refusals) == count
            assert (tmp_path / "o" / "results.md").is_file()

    def test_merged_layers_have_a_cell_without_operator(self, folder, run, tmp_path):
        changes = {**SMALL, "select": "laco,streamline", "num-windows": "4", "window": 16}
        status, _, err = run(*grid(folder, tmp_path / "o", **changes))
        assert status == 0, err
        results = read_results(tmp_path / "o")
        cut = next(cut for cut in results.cuts if cut.selector == "laco")
        (cell,) = results.cells_of(cut)
        assert cut.merged and cell.selector == "laco" and cell.operator == "none"
        source = locate(str(folder / "m"))
        model, tokenizer = load_model(source), load_tokenizer(source)
        result = gl.prune(
            model,
            tokenizer,
            num_remove=2,
            select="laco",
            recover="none",
            calibration=str(folder / "t.txt"),
            num_windows=4,
            window=16,
            progress=False,
        )
        text = str(folder / "u.txt")
        windows = gl.text_windows(tokenizer, text, num_windows=3, window=24, evaluation=True)
        wanted = gl.perplexity(result.model, windows, progress=False).perplexity
        assert cell.perplexity["u.txt"]["perplexity"] == pytest.approx(wanted, rel=1e-6)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"recover": "ghosts"}, "Did you mean 'ghost'"),
            ({"select": "lorb"}, "Did you mean 'lorp'"),
            ({"num-remove": "2,7"}, "`num_remove` is 7"),
            ({"num-remove": "2,2"}, "names 2 twice"),
            ({"calibration": "missing.txt"}, "missing.txt"),
            ({"perplexity": "self"}, "self"),
            ({"eval-window": 1}, "`eval_window` is 1"),
            ({"moments-memory": "many"}, "`moments_memory`"),
            ({"num-windows": "0"}, "`num_windows` has 0"),
            ({"fit": "late"}, "late"),
            ({"window": 10**6}, "`window`"),
            ({"config": "missing.yaml"}, "missing.yaml"),
        ],
    )
    def test_bad_arguments_come_first(self, folder, refuse, changes, said):
        args = grid(folder, folder / "never", **{**SMALL, **changes})
        assert said in refuse(folder, *args)


class TestConfigFiles:
    def test_flags_go_over_the_file(self, folder, run, tmp_path):
        lines = ["title: A table", "model: somewhere/else", "num_remove: [2]", "select: [shortgpt]"]
        lines += ["recover: [none]", f"calibration: [{folder / 't.txt'}]", "num_windows: [4]"]
        lines += ["window: 24", f"perplexity: [{folder / 'u.txt'}]", "expected: {a: 1.5}"]
        (tmp_path / "c.yaml").write_text("\n".join(lines))
        flags = ["--model", folder / "m", "--eval-window", 24, "--eval-windows", 2]
        args = ["compare", "--config", tmp_path / "c.yaml", *flags, "-o", tmp_path / "o"]
        status, _, err = run(*args)
        assert status == 0, err
        results = read_results(tmp_path / "o")
        assert results.run.title == "A table" and results.run.expected == {"a": 1.5}
        assert results.run.settings["eval_windows"] == 2
        assert [cut.selector for cut in results.cuts] == ["shortgpt"]

    def test_every_unknown_key_is_named(self, folder, refuse, tmp_path):
        text = "num_remove: [1]\nselekt: [lorp]\nruns:\n- {modell: x}\n"
        (folder / "bad.yaml").write_text(text)
        args = ["compare", folder / "m", "--config", folder / "bad.yaml", "-o", folder / "no"]
        err = refuse(folder, *args)
        assert "'selekt'" in err and "'select'" in err
        assert "run 1" in err and "'modell'" in err

    def test_wrong_type(self, folder, refuse):
        (folder / "type.yaml").write_text("num_remove: [two]\nwindow: long\n")
        args = ["compare", folder / "m", "--config", folder / "type.yaml", "-o", folder / "no"]
        err = refuse(folder, *args)
        assert "`num_remove`" in err and "`window` is 'long'" in err


def test_windows_that_are_no_prefix_are_swept_apart():
    def windows(ids):
        return gl.Windows(ids, "x", bos_per_window=False)

    ids = torch.arange(12).reshape(6, 2)
    made = {2: windows(ids[:2]), 4: windows(ids[:4].flip(0)), 6: windows(ids)}
    assert chains(made) == [[2, 6], [4]]


def test_a_checkpoint_of_a_cell(folder, run, tmp_path):
    changes = {**SMALL, "select": "streamline", "num-windows": "4"}
    args = [*grid(folder, tmp_path / "o", **changes), "--save-checkpoints"]
    assert run(*args)[0] == 0
    folders = sorted((tmp_path / "o" / "checkpoints").iterdir())
    cells = read_results(tmp_path / "o").cells
    assert len(folders) == len(cells) == 2
    tokenizer = load_tokenizer(locate(str(folder / "m")))
    text = str(folder / "u.txt")
    windows = gl.text_windows(tokenizer, text, num_windows=3, window=24, evaluation=True)
    for cell in cells:
        (place,) = [each for each in folders if each.name.endswith(f"-{cell.operator}-dense")]
        found = gl.perplexity(load_model(locate(str(place))), windows, progress=False).perplexity
        assert found == pytest.approx(cell.perplexity["u.txt"]["perplexity"], rel=1e-6)
