"""A comparison on two processes: the cells of one process, each measured once."""

from __future__ import annotations

import json

from launched import launch, outcome


def measured(folder) -> tuple[dict, list]:
    [file] = folder.glob("*.jsonl")
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    found = [line for line in lines if "operator" in line and "layers" in line]
    timeless = [{k: v for k, v in line.items() if k != "seconds"} for line in found]
    names = ("num_windows", "operator", "layers")
    keyed = {tuple(str(line[name]) for name in names): line for line in timeless}
    assert len(keyed) == len(found)
    return keyed, [line["similarity"] for line in lines if "similarity" in line]


def test_two_processes_measure_the_same_cells(work, run, tmp_path):
    texts = ["--calibration", work / "t.txt", "--perplexity", work / "t.txt", "--eval-window", 32]
    sizes = ["--num-windows", "4,6", "--window", 32, "--eval-windows", 4]
    grid = ["--num-remove", 2, "--select", "shortgpt,streamline", "--recover", "none,ghost"]
    command = ["compare", work / "m", *grid, *texts, *sizes]
    processes = launch(2, ["-m", "ghostlayers", *command, "-o", tmp_path / "two", "--timeout", 200])
    status, _, err = run(*command, "-o", tmp_path / "one")
    assert status == 0, err
    found = outcome(processes)
    assert [status for status, _, _ in found] == [0, 0], found
    assert found[1][1:] == ("", "")  # the first process prints
    (one, similarities), two = measured(tmp_path / "one"), measured(tmp_path / "two")
    assert len(one) >= 4 and len(similarities) == 2 and similarities[0] != similarities[1]
    assert two == (one, similarities)
