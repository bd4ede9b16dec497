"""What may go on in the folder of a comparison: nothing that mixes texts, models or searches."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ghostlayers.compare_growth import check_continues
from ghostlayers.compare_lines import CutLine, RunLine
from ghostlayers.compare_results import CompareResults, read_results, to_json
from ghostlayers.errors import CalibrationError
from tiny_checkpoints import save_tiny, text_of

MODEL = {"name": "m", "dtype": "float32"}
MODEL |= {"fingerprint": {"config_sha256": "a" * 64, "weights_sha256": "b" * 64}}
SETTINGS = {"recover": ["none"], "calibration": ["c4"], "window": None, "device": "auto"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A model, two texts, and a small comparison of them in `o`."""
    from ghostlayers.cli import main

    place = tmp_path_factory.mktemp("growth")
    save_tiny(place / "m")
    (place / "t.txt").write_text(text_of(200))
    (place / "u.txt").write_text(text_of(60, seed=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(arguments(place)) == 0
    return place


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    """A copy that a test may change, and works in: texts are known by their paths."""
    place = shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(place)
    return place


def arguments(folder: Path, **changes: object) -> list[str]:
    values = {
        "layers": "2-3",
        "recover": "none",
        "calibration": "t.txt",
        "num-windows": 4,
        "window": 24,
        "perplexity": "u.txt",
        "eval-window": 24,
        "eval-windows": 2,
        **changes,
    }
    flags = [str(part) for name, value in values.items() for part in (f"--{name}", value)]
    return ["compare", str(folder / "m"), *flags, "-o", str(folder / "o")]


def results_of(settings: dict, *selectors: str) -> CompareResults:
    run = RunLine(MODEL, {}, "", settings, {})
    return CompareResults([run], cuts=[CutLine("c4", 4, name, 1) for name in selectors])


def continues(results: CompareResults, settings: dict, model: dict = MODEL) -> bool:
    return check_continues(results, settings, model, ("device",), Path("o"))


class TestSettings:
    def test_the_same_goes_on_and_more_grows(self):
        assert not continues(results_of(SETTINGS), {**SETTINGS, "device": "cpu"})
        assert continues(results_of(SETTINGS), {**SETTINGS, "recover": ["ghost", "none"]})

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"window": 64}, "`window` None, asked for is 64"),
            ({"recover": ["ghost"]}, "name none as well"),
        ],
    )
    def test_others_are_refused(self, change, said):
        with pytest.raises(CalibrationError, match=said):
            continues(results_of(SETTINGS), {**SETTINGS, **change})

    def test_the_weights_in_another_dtype_are_refused(self):
        with pytest.raises(CalibrationError, match=r"in float32, this model is in bfloat16"):
            continues(results_of(SETTINGS), SETTINGS, {**MODEL, "dtype": "bfloat16"})

    def test_auto_does_not_search_in_two_ways(self):
        more = {**SETTINGS, "recover": ["none", "ghost"]}
        with pytest.raises(CalibrationError, match="cuts of `auto`"):
            continues(results_of(SETTINGS, "lorp", "auto"), more)
        assert continues(results_of(SETTINGS, "lorp"), more)
        assert continues(results_of(more, "auto"), {**more, "recover": ["none", "ghost", "fold"]})

    def test_two_texts_of_one_name_do_not_share_it(self, tmp_path):
        texts = [tmp_path / "a" / "t.txt", tmp_path / "b" / "t.txt"]
        for text in texts:
            text.parent.mkdir()
            text.write_text("text")
        then, now = (
            {**SETTINGS, "calibration": list(map(str, each))} for each in (texts[:1], texts)
        )
        with pytest.raises(CalibrationError, match=r"calibration 't\.txt', and another text"):
            continues(results_of(then), now)


class TestTexts:
    @pytest.mark.parametrize("change", [{}, {"num-windows": "4,8"}, {"recover": "none,ghost"}])
    @pytest.mark.parametrize("text", ["t.txt", "u.txt"])
    def test_changed_content_is_refused(self, folder, run, text, change):
        (folder / text).write_text(text_of(200, seed=9))
        before = {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()}
        status, _, err = run(*arguments(folder, **change))
        assert status == 2 and f"on other tokens of '{text}'" in err
        after = {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()}
        assert after == before

    def test_changed_content_is_refused_where_its_scores_are_lost(self, folder, run):
        shutil.rmtree(folder / "o" / "scores")
        (folder / "t.txt").write_text(text_of(200, seed=9))
        status, _, err = run(*arguments(folder, recover="none,ghost"))
        assert status == 2 and "on other tokens of 't.txt'" in err

    def test_what_lies_behind_the_windows_may_change(self, folder, run):
        for name in ("t.txt", "u.txt"):
            with (folder / name).open("a") as file:
                file.write(text_of(40, seed=9))
        assert run(*arguments(folder))[0] == 0

    def test_more_windows_are_those_of_a_whole_run(self, folder, run):
        assert run(*arguments(folder, **{"num-windows": "4,8", "recover": "none,ghost"}))[0] == 0
        grown = read_results(folder / "o")
        shutil.rmtree(folder / "o")
        assert run(*arguments(folder, **{"num-windows": "4,8", "recover": "none,ghost"}))[0] == 0
        whole = read_results(folder / "o")
        assert len(grown.cells) == 4
        assert {c.key: c.perplexity for c in grown.cells} == {
            c.key: c.perplexity for c in whole.cells
        }


class TestWhatARunSays:
    def test_a_grid_of_a_file_keeps_what_the_file_says(self, folder, run):
        shutil.rmtree(folder / "o")
        config = folder / "grid.yaml"
        config.write_text(f"title: a table\nmodel: {folder / 'm'}\nexpected: {{source: a paper}}\n")
        args = arguments(folder)
        assert run(*args[:1], "--config", config, *args[2:])[0] == 0
        assert run(*arguments(folder, recover="none,ghost"))[0] == 0
        first, last = read_results(folder / "o").runs
        assert last.settings["recover"] == ["none", "ghost"] and last.command != first.command
        said = (last.title, last.expected, last.planned)
        assert said == ("a table", {"source": "a paper"}, first.planned)

    def test_another_release_is_told(self, folder, run):
        path = folder / "o" / "results.jsonl"
        results = read_results(folder / "o")
        older = replace(results.run, versions={**results.run.versions, "torch": "0.1"})
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(to_json(older) + "\n" + "".join(lines[1:-1]))  # the last cell is lost
        assert run(*arguments(folder))[0] == 0
        runs = read_results(folder / "o").runs
        assert [each.versions["torch"] for each in runs] == ["0.1", results.run.versions["torch"]]
