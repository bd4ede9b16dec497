"""Equality figures: lines that benchmarks write, and the part of the page that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
ORIGIN = {
    "command": "python benchmarks/x.py --out FILE",
    "commit": "0123abc",
    "created": "2026-11-30T00:00:00+00:00",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "machine": {"cpu": "a CPU", "gpu": None, "threads": 3},
}
PEAKS = {"wall": 100.0, "cpu": 50.0, "VmHWM": 5e9}
MEMORY = {
    "kind": "memory",
    "checkpoint_bytes": 3e9,
    "layers": 26,
    "recover": "ghost",
    "in_memory": PEAKS,
    "offloaded": {"wall": 150.0, "cpu": 55.0, "VmHWM": 0.9e9},
    "layers_equal": True,
    "tensors": 202,
    "largest_difference": 0.0,
    "origin": ORIGIN,
}
PROCESSES = {
    "kind": "processes",
    "model": "m, layers 3-4, ghost",
    "launcher": "torchrun",
    "processes": 2,
    "windows": "13 + 5 of 256",
    "layers_equal": False,
    "differences": {"similarities": 0.0, "moments": 2.5e-11, "operators": 0.0, "perplexity": 0.0},
    "origin": ORIGIN,
}
ENGINE = {
    "kind": "engine",
    "engine": "vllm",
    "release": "vllm 1.2",
    "checkpoint": "m, fold",
    "prompts": 8,
    "equal": 7,
    "new_tokens": 24,
    "origin": ORIGIN,
}


@pytest.fixture
def equality_lines(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import equality_lines

    return equality_lines


def write(path: Path, *lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_page_of_equality_figures(tmp_path):
    again = {**PROCESSES, "layers_equal": True}
    one = write(tmp_path / "1.jsonl", ENGINE, PROCESSES, {**PROCESSES, "processes": 3})
    two = write(tmp_path / "2.jsonl", again, MEMORY)
    script = [sys.executable, BENCHMARKS / "results_page.py", "--equality", one, two]
    subprocess.run([*script, "--out", tmp_path / "page.md"], check=True)
    page = (tmp_path / "page.md").read_text()
    part = page[page.index("## Equality") :].splitlines()
    assert [line for line in part if line.startswith("###")] == [
        "### Larger than memory",
        "### Many processes",
        "### Engines",
    ]
    rows = [line.strip("| ").split(" | ") for line in part if line.startswith("| ")]
    assert [row for row in rows if row[0].startswith("random")] == [
        ["random Llama, 26 layers, 3.00 GB, ghost", "5.00 GB", "0.90 GB", "30.0 %"]
        + ["1.50", "1.10", "yes", "202", "0"]
    ]
    model, windows = "m, layers 3-4, ghost", "13 + 5 of 256"
    assert [row for row in rows if "torchrun" in row] == [
        [model, "torchrun", "2", windows, "yes", "0", "2.5e-11", "0", "0"],
        [model, "torchrun", "3", windows, "NO", "0", "2.5e-11", "0", "0"],
    ]
    assert ["vllm", "vllm 1.2", "m, fold", "7 of 8", "24"] in rows
    assert page.count("commit 0123abc; 2026-11-30T00:00:00+00:00; torch 2.13.0, transf") == 3


@pytest.mark.parametrize("line", [{"kind": "speed"}, {**ENGINE, "kind": "memory"}, [1], "text"])
def test_other_lines_are_refused(equality_lines, tmp_path, line):
    path = write(tmp_path / "x.jsonl", MEMORY, line)
    with pytest.raises(SystemExit, match=r"x\.jsonl, line 2"):
        equality_lines.read(path)


def test_commands_are_written_without_folders(equality_lines, monkeypatch, tmp_path):
    given = [
        "/a/b/equality.py",
        "engines",
        "/data/m",
        "--engines",
        "llama.cpp",
        "vllm=/x/bin/python",
    ]
    monkeypatch.setattr(sys, "argv", [*given, "/c/1.txt,/c/2.txt", "relative/3.txt"])
    equality_lines.append(tmp_path / "f", {"kind": "x", "origin": equality_lines.origin(7)})
    found = json.loads((tmp_path / "f").read_text())["origin"]
    assert found["command"] == (
        "python benchmarks/equality.py engines m --engines llama.cpp vllm=python 1.txt,2.txt "
        "relative/3.txt"
    )
    assert found["machine"]["threads"] == 7


def test_relative_difference(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from equality import relative_difference

    one = torch.tensor([1.0, 0.0, -4.0], dtype=torch.float64)
    assert relative_difference([one, one], [one, one]) == 0
    assert relative_difference([one + torch.tensor([0, 0, 1.0])], [one]) == 0.25
    assert relative_difference([one + torch.tensor([0, 1e-9, 0])], [one]) == float("inf")
    with pytest.raises(ValueError, match="longer"):
        relative_difference([one], [one, one])
