"""Several processes on one machine, by gloo: the same bits as one process, and clean ends."""

from __future__ import annotations

import pytest
import torch

import shared_work
from launched import launch, outcome
from shared_work import CASES

SCRIPT = shared_work.__file__


def differences(found, expected, where: str = "") -> list[str]:
    """Name every value that differs; floats and tensors must have the same bits."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        return [d for k in expected for d in differences(found[k], expected[k], f"{where}.{k}")]
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        pairs = zip(found, expected, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{where}[{i}]")]
    if isinstance(expected, torch.Tensor):
        same = torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        return [] if same else [where]
    return [] if found == expected else [f"{where}: {found} is not {expected}"]


def test_windows_of_padding_alone(tmp_path):
    """A process that is left with such windows has nothing to add; the others' sums are all."""
    ended = outcome(launch(3, [SCRIPT, "padded", tmp_path / "found"]))
    assert [status for status, _, _ in ended] == [0] * 3, [err for _, _, err in ended]
    expected = CASES["padded"]()
    for rank in range(3):
        found = torch.load(tmp_path / f"found.{rank}", weights_only=False)
        assert differences(found, expected) == []
    left = {"first": 63, "middle": 39, "last": 48, "two": 48}  # of 3 x 24 + 15 tokens
    assert {name: expected[name]["tokens"] for name in left} == left
    assert "no calibration tokens" in expected["all"]["refused"]


@pytest.mark.parametrize(
    ("case", "count"), [("some", 2), pytest.param("everything", 3, marks=pytest.mark.slow)]
)
def test_any_number_of_processes_gives_the_same_bits(case, count, tmp_path):
    processes = launch(count, [SCRIPT, case, tmp_path / "found"])
    expected = CASES[case]()
    ended = outcome(processes)
    assert [status for status, _, _ in ended] == [0] * count, [err for _, _, err in ended]
    for rank in range(count):
        found = torch.load(tmp_path / f"found.{rank}", weights_only=False)
        assert differences(found, expected) == []
    assert bool(expected["analysis"]["massive"].any())  # the case holds what it is about
    assert expected["spread"] == [item**2 for item in range(len(expected["spread"]))]
