"""`ghostlayers compare` under hostile input: folders, kills, two at once, files, placement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ghostlayers.compare_results import read_results
from tiny_checkpoints import listing, save_tiny, text_of

SRC = Path(__file__).parents[1] / "src"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("hostile")
    save_tiny(place / "m")
    (place / "t.txt").write_text(text_of(400))
    (place / "u.txt").write_text(text_of(100, seed=5))
    (place / "short.txt").write_text("the")
    return place


def small(folder: Path, out: Path, **changes) -> list[str]:
    """Return the arguments of a comparison of two cells."""
    values = {
        "num-remove": "2",
        "select": "streamline",
        "recover": "none,linearpatch-diag",
        "calibration": folder / "t.txt",
        "num-windows": "4",
        "window": 24,
        "perplexity": folder / "u.txt",
        "eval-window": 24,
        "eval-windows": 3,
        **changes,
    }
    flags = [str(part) for name, value in values.items() for part in (f"--{name}", value)]
    return ["compare", str(folder / "m"), *flags, "-o", str(out)]


def without_seconds(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "created"):
            line.pop(name, None)
    return lines


class TestNothingIsLeft:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"calibration": "{}/t.txt,{}/short.txt"}, "3 tokens, fewer than one window"),
            ({"perplexity": "{}/short.txt"}, "3 tokens, fewer than one window"),
            ({"eval-window": 9999}, "`eval_window` is 9999 tokens"),
            ({"rank": 0, "recover": "none,ghost"}, "`rank` is 0"),
            ({"rank": 999, "recover": "none,ghost"}, "`rank` is 999 and the model's hidden size"),
            ({"rank": 4}, "rank works with ghost"),
            ({"refine": -1, "recover": "fold"}, "`refine` is -1"),
            ({"refine": 4}, "refine works with ghost-robust"),
            ({"moments-device": "nowhere"}, "`moments_device` 'nowhere'"),
            ({"max-memory": "cpu=1GB"}, "`max_memory` is 'cpu=1GB' without `device_map`"),
            ({"device-map": "auto", "device": "cpu"}, "`device` is 'cpu' and `device_map`"),
        ],
    )
    def test_refused_before_the_first_sweep(self, folder, refuse, changes, said):
        changes = {
            name: value.replace("{}", str(folder)) if isinstance(value, str) else value
            for name, value in changes.items()
        }
        assert said in refuse(folder, *small(folder, folder / "deep" / "no", **changes))

    @pytest.mark.parametrize("flags", [("--layers", "99"), ("--eval-window", "9999")])
    def test_smoke_text_goes_with_a_refused_run(self, folder, refuse, flags):
        refuse(folder, *small(folder, folder / "no"), "--smoke", *flags)

    def test_weights_that_are_not_finite(self, folder, refuse, run, tmp_path):
        import torch
        from safetensors.torch import load_file, save_file

        save_tiny(tmp_path / "m")
        weights = load_file(tmp_path / "m" / "model.safetensors")
        weights["model.layers.5.mlp.down_proj.weight"].fill_(torch.nan)
        save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
        args = small(folder, tmp_path / "no")
        args[1] = str(tmp_path / "m")
        assert "what leaves layer 5" in refuse(tmp_path, *args)


class TestFolder:
    @pytest.mark.parametrize("below", ["", "sub", "sub/sub"])
    def test_a_file_is_there(self, folder, refuse, below):
        (folder / "file").write_text("x")
        refuse(folder, *small(folder, folder / "file" / below))

    def test_results_are_a_folder(self, folder, refuse, tmp_path):
        (tmp_path / "o" / "results.jsonl").mkdir(parents=True)
        assert "results.jsonl" in refuse(tmp_path, *small(folder, tmp_path / "o"))

    def test_full_disk(self, folder, run, tmp_path, monkeypatch):
        def full(_number):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("ghostlayers.compare_results.os.fsync", full)
        status, _, err = run(*small(folder, tmp_path / "o"))
        assert status == 2 and "No space left" in err and len(err.splitlines()) == 1

    def test_spaces_and_other_letters(self, folder, run, tmp_path):
        place = tmp_path / "my módel ☃"
        save_tiny(place)
        args = small(folder, tmp_path / "ünï out")
        args[1] = str(place)
        assert run(*args, "--save-checkpoints")[0] == 0
        assert read_results(tmp_path / "ünï out").run.model["name"] == place.name

    def test_checkpoints_of_a_text_with_a_long_path(self, folder, run, tmp_path):
        place = tmp_path / ("a" * 120) / ("b" * 120)
        place.mkdir(parents=True)
        (place / "t.txt").write_text(text_of(400, seed=2))
        texts = f"{place / 't.txt'},{folder / 't.txt'}"  # both are t.txt: full paths are names
        args = small(folder, tmp_path / "o", calibration=texts, recover="none,linearpatch-diag")
        status, _, err = run(*args, "--save-checkpoints")
        assert status == 0
        cells = read_results(tmp_path / "o").cells
        assert not [cell.refused for cell in cells if cell.refused], err
        assert len(list((tmp_path / "o" / "checkpoints").iterdir())) == 3

    def test_runs_of_one_name_have_folders_of_their_own(self, folder, run, tmp_path):
        text = "runs:\n- {num_windows: [4]}\n- {num_windows: [5]}\n"
        (tmp_path / "c.yaml").write_text(text)
        args = small(folder, tmp_path / "o", config=tmp_path / "c.yaml")
        at = args.index("--num-windows")
        del args[at : at + 2]
        status, _, err = run(*args)
        assert status == 0, err
        found = {p.name: read_results(p).cells[0].num_windows for p in (tmp_path / "o").iterdir()}
        assert found == {"m-2": 4, "m-2-run2": 5}


def start(args: list[str], **environment: str) -> subprocess.Popen:
    values = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environment}
    code = "import sys; from ghostlayers.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env=values,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen, kind: bytes) -> None:
    until = time.monotonic() + 120
    while not (path.is_file() and kind in path.read_bytes()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)


def test_sigkill_and_two_at_once(folder, run, tmp_path):
    recover = "none,linearpatch-diag,linearpatch-rotate,ghost,ghost-robust,ghost-norm"
    args = small(folder, tmp_path / "o", recover=recover)
    path = tmp_path / "o" / "results.jsonl"
    process = start(args)
    try:
        wait_for(path, process, b'"kind": "cell"')
        process.send_signal(signal.SIGSTOP)  # it holds the folder as long as we like
        before = listing(tmp_path / "o")
        status, _, err = run(*args)
        assert status == 2 and "in use by another comparison" in err
        assert len(err.splitlines()) == 1 and listing(tmp_path / "o") == before
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    stopped = len(path.read_bytes().splitlines())
    assert run(*args)[0] == 0
    assert len(path.read_bytes().splitlines()) > stopped
    assert run(*small(folder, tmp_path / "p", recover=recover))[0] == 0
    again, whole = without_seconds(path), without_seconds(tmp_path / "p" / "results.jsonl")
    again[0].pop("command"), whole[0].pop("command")
    assert again == whole


class TestConfigFile:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("num_remove: null", "`num_remove` is None; allowed: a list of whole numbers"),
            ("recover: {a: 1}", "`recover` is {'a': 1}; allowed: a list of texts"),
            ("title: {a: 1}", "`title` is {'a': 1}; allowed: a text"),
            ("model: 3", "`model` is 3; allowed: a text"),
            ("expected: !!binary aGk=", "`expected` cannot be stored"),
            ("expected: &a [*a]", "`expected` cannot be stored"),
            ("shared: {}", "unknown key 'shared' (did you mean 'seed'?)."),
        ],
    )
    def test_wrong_values(self, folder, refuse, text, said):
        (folder / "wrong.yaml").write_text(text)
        args = ["compare", folder / "m", "--config", folder / "wrong.yaml", "-o", folder / "no"]
        assert said in refuse(folder, *args)

    def test_a_date_is_text(self, folder, run, tmp_path):
        (tmp_path / "c.yaml").write_text("expected: {seen: 2020-01-31}\n")
        args = small(folder, tmp_path / "o", config=tmp_path / "c.yaml", recover="none")
        assert run(*args)[0] == 0
        assert read_results(tmp_path / "o").run.expected == {"seen": "2020-01-31"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_on_disk_give_the_same_cells(folder, run, tmp_path, family):
    recover = "none,ghost-robust,ghost-norm,linearpatch-rotate,replaceme-lstsq,fold"
    save_tiny(tmp_path / "m", family)
    results = {}
    for name, flags in (
        ("memory", ()),
        ("disk", ("--device-map", '{"": "disk"}', "--spill-folder", tmp_path / "s")),
    ):
        args = small(folder, tmp_path / name, recover=recover, refine=2)
        args[1] = str(tmp_path / "m")
        status, _, err = run(*args, *flags, "--save-checkpoints")
        assert status == 0, err
        results[name] = read_results(tmp_path / name)
    assert len(results["memory"].cells) == 6
    for own, other in zip(results["disk"].cells, results["memory"].cells, strict=True):
        assert own.key == other.key and own.used == other.used and own.refused is other.refused
        for key, value in other.perplexity.items():
            assert own.perplexity[key]["perplexity"] == pytest.approx(value["perplexity"], rel=1e-6)
