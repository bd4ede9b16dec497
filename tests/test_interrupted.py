"""Processes that die: the others end, nothing half-written stays, and a run goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from ghostlayers import shared_sweep, spill
from ghostlayers.channel_moments import ChannelMoments
from ghostlayers.decoder import decoder_layers
from ghostlayers.exact_sums import Running
from ghostlayers.layerwise import runs_layerwise
from ghostlayers.loading import load_model, locate
from ghostlayers.moments import BoundaryMoments
from ghostlayers.output_folder import remove_left_over
from ghostlayers.placement import Placement
from ghostlayers.resume import resumable
from ghostlayers.similarity import SimilarityAccumulator
from ghostlayers.sweep import sweep
from launched import launch, outcome
from oracles import random_ids, tiny_model
from tiny_checkpoints import listing


class Stopped(BaseException):
    """A user's interrupt."""


KILLED = Path(__file__).with_name("killed.py")
SIGKILLED = -9


def prune(work: Path, out: Path, *more) -> list:
    calibration = ["--calibration", work / "t.txt", "--num-windows", 6, "--window", 32]
    plan = ["--layers", "2,5", "--recover", "ghost", "--save-every", 0]
    return ["prune", work / "m", "-o", out, *calibration, *plan, *more]


def run_killed(*command, count: int = 1, **environment) -> list[tuple[int, str, str]]:
    return outcome(launch(count, [KILLED, *command], **environment))


def test_a_killed_sweep_goes_on_with_the_same_bits(work, run, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    [(status, _, err)] = run_killed("batch", 0, 4, *prune(work, out))
    assert status == SIGKILLED, err
    [folder] = tmp_path.iterdir()  # hidden: there is no OUT
    assert folder.name == ".out.prune"
    assert [path.name for path in folder.iterdir()] == ["sweep-0001.0-of-1.safetensors"]

    seen, part_of_sweep = [], shared_sweep.part_of_sweep

    def watched(*args):
        seen.append(part_of_sweep(*args))
        return seen[-1]

    monkeypatch.setattr(shared_sweep, "part_of_sweep", watched)
    status, _, err = run(*prune(work, out))
    assert status == 0, err
    assert [len(part.batches) for part in seen] == [3]  # 3 of 6 were saved, the 4th was lost
    assert not folder.exists()
    status, _, err = run(*prune(work, whole))
    assert status == 0, err
    assert listing(out) == listing(whole)


def test_sums_of_another_calibration_are_not_used(work, run, tmp_path, monkeypatch):
    out, folder = tmp_path / "out", tmp_path / "work"
    with monkeypatch.context() as planted:
        planted.setattr(shared_sweep.Parts, "combine", lambda parts: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(*prune(work, out, "--resume-dir", folder))
    assert len(listing(folder)) == 1
    status, _, err = run(*prune(work, out, "--resume-dir", folder, "--window", 24))
    assert status == 0
    assert "is of another model, calibration or setting; not used" in err
    status, _, err = run(*prune(work, tmp_path / "fresh", "--window", 24))
    assert status == 0 and "not used" not in err
    assert listing(out) == listing(tmp_path / "fresh")


def test_a_full_disk_under_the_work_folder_is_named(work, refuse, tmp_path, monkeypatch):
    def full(_tensors, path, **_keywords):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    folder = tmp_path / "work"
    folder.mkdir()
    err = refuse(tmp_path, *prune(work, tmp_path / "out", "--resume-dir", folder))
    assert "No space left" in err and str(folder) in err and "--resume-dir" in err


def test_a_folder_of_others_is_refused(work, refuse, tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    err = refuse(tmp_path, *prune(work, tmp_path / "out", "--resume-dir", tmp_path))
    assert "'notes.md'" in err and "Give a new folder" in err


@pytest.mark.parametrize(("where", "victim"), [("batch", 0), ("error", 1)])
def test_a_process_that_dies_ends_the_others(where, victim, work, tmp_path):
    start = time.monotonic()
    command = prune(work, tmp_path / "out", "--timeout", 100)
    found = run_killed(where, victim, 2, *command, count=2)
    assert found[victim][0] == (SIGKILLED if where == "batch" else 1)
    status, out, err = found[1 - victim]
    assert status == 2 and out == "", err
    line = err.strip().splitlines()[-1]
    assert line.startswith("ghostlayers: error: process ") and "Nothing was written" in line
    if where == "error":
        assert "process 1 of 2 failed (MemoryError: planted)" in line
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - start < 240  # not the half hour of the default


def test_nothing_loads_of_a_checkpoint_that_was_being_written(work, run, tmp_path):
    out = tmp_path / "out"
    [(status, _, err)] = run_killed("card", 0, 1, *prune(work, out))
    assert status == SIGKILLED, err
    assert not out.exists()
    [left] = [path for path in tmp_path.iterdir() if "incomplete" in path.name]
    assert any(left.glob("*.safetensors"))
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(left, trust_remote_code=True)
    status, _, err = run(*prune(work, out))
    assert status == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what was left is gone


def test_a_folder_that_was_being_replaced_comes_back(tmp_path):
    import platform

    gone = 2**22 + 1  # above the largest process number
    left = tmp_path / f".out.replaced-{platform.node()}-{gone}"
    left.mkdir()
    (left / "config.json").write_text("{}")
    other = tmp_path / ".out.incomplete-another.machine-1"
    other.mkdir()
    remove_left_over(tmp_path / "out")
    assert listing(tmp_path / "out") == {"config.json": b"{}"}
    assert other.is_dir()  # that may still be written


def test_an_error_that_all_share_is_printed_once(work, tmp_path):
    command = prune(work, tmp_path / "out", "--layers", "2,99", "--timeout", 60)
    found = run_killed("never", 0, 1, *command, count=2)
    assert [status for status, _, _ in found] == [2, 2]
    lines = [err for _, _, err in found if "ghostlayers: error" in err]
    assert len(lines) == 1 and lines[0] == found[0][2] and "99" in lines[0]


@dataclass
class Shared:
    """Moments of which two parts share one."""

    second: BoundaryMoments
    channels: dict[str, ChannelMoments]

    @classmethod
    def zeros(cls) -> Shared:
        second = BoundaryMoments.zeros(6)
        return cls(second, {"diag": replace(ChannelMoments.zeros(6), second=second)})

    def add(self, x, y) -> None:
        self.channels["diag"].add(x, y)


def test_a_shared_part_is_summed_once_and_comes_back_as_it_was():
    x = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(0)).double()
    running, other = Running(Shared.zeros), Running(Shared.zeros)
    for part in x:
        running.add(part, 2.0 * part)
    assert torch.allclose(running.total.second.gram, x[0].T @ x[0] + x[1].T @ x[1], rtol=1e-14)
    assert running.total.second.num_tokens == 40
    sums = running.total.channels["diag"].input_sums
    assert torch.allclose(sums, x.abs().sum(dim=(0, 1)), rtol=1e-14)
    two = [Running(Shared.zeros) for _ in x]
    for part, own in zip(x, two, strict=True):
        own.add(part, 2.0 * part)
    two[0].merge(two[1])
    saved = running.tensors()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in two[0].tensors().items())
    other.load({name: tensor.clone() for name, tensor in saved.items()})
    assert set(saved) == set(other.tensors())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.tensors().items())


@pytest.mark.parametrize("places", [None, {"": "disk"}])
def test_a_sweep_goes_on_behind_its_last_batch_or_pass(places, tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "m")
    model = load_model(locate(str(tmp_path / "m")), placement=Placement(places))
    assert runs_layerwise(model) == (places is not None)
    depth, ids = len(decoder_layers(model)), random_ids(6, 24, seed=7)
    empty = {"input_ids": ids[:2], "attention_mask": torch.zeros_like(ids[:2])}
    batches = [ids[:2], empty, ids[2:4], ids[4:]]
    one = ids[:2].numel() * model.config.hidden_size * 4 * (depth + 4)
    monkeypatch.setattr(spill.StateStore, "limit", property(lambda _: 2 * one))  # 2 + 1 that count
    found = []
    for stop in (None, 2, None):  # alone, interrupted at the third batch that counts, continued
        similarity, seen = SimilarityAccumulator(depth), []
        plain = similarity.update

        def update(states, rows, stop=stop, seen=seen, plain=plain):
            if len(seen) == stop:
                raise Stopped
            seen.append(rows.window.tolist())
            plain(states, rows)

        similarity.update = update
        with resumable(tmp_path / "work" if found else None, 0.0):
            try:
                sweep(model, batches, [similarity], progress=False)
            except Stopped:
                found.append(None)
                continue
        found.append((similarity.running, seen))
    (whole, every), _, (continued, last) = found
    assert every == [[w] * 24 + [w + 1] * 24 for w in (0, 4, 6)] and last == every[2:]
    assert torch.equal(continued.total.total, whole.total.total)
    assert continued.total.num_tokens == ids.numel()


def test_sums_do_not_depend_on_the_order():
    draw = torch.Generator().manual_seed(0)
    terms = [
        torch.randn(40, 6, generator=draw, dtype=torch.float64) * 10.0**k for k in range(-6, 7)
    ]
    products = [(x.T @ x).tolist() for x in terms]
    exact = [[float(sum(Fraction(p[i][j]) for p in products)) for j in range(6)] for i in range(6)]
    found = []
    for order in (range(13), range(12, -1, -1), [5, 0, 12, 3, 7, 1, 2, 4, 6, 8, 9, 10, 11]):
        running = Running(lambda: BoundaryMoments.zeros(6))
        for index in order:
            running.add(terms[index], -terms[index])
        found.append(running.total)
    for other in found:
        assert other.gram.tolist() == exact
        assert torch.equal(other.cross, found[0].cross)
        assert other.delta_squares == found[0].delta_squares
        assert other.num_tokens == 13 * 40
    plain = sum(x.T @ x for x in reversed(terms))
    assert not torch.equal(plain, sum(x.T @ x for x in terms))  # a plain sum depends on it
