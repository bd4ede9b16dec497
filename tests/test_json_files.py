"""Files of results: whole or as they were, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import os

import pytest

from ghostlayers.records import write_json
from tiny_checkpoints import listing

WINDOWS = ("--num-windows", 4, "--window", 24)


def full_disk(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def small(work):
    from ghostlayers.cli import main

    args = ["prune", work / "m", "-o", work / "small", "--layers", "2", "--recover", "none"]
    assert main([str(arg) for arg in args]) == 0
    return work


VERBS = {
    "info": ["info", "small"],
    "analyze": ["analyze", "m", "--calibration", "t.txt", *WINDOWS],
    "eval": ["eval", "small", "--no-dense", "--perplexity", "t.txt", *WINDOWS],
    "prune": ["prune", "m", "-o", "o", "--layers", "2", "--recover", "none", "--dry-run"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_result_that_finds_no_room_leaves_the_old_one(small, run, monkeypatch, verb):
    monkeypatch.chdir(small)
    (small / "r.json").write_text("the old one")
    before = listing(small)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        status, _, err = run(*VERBS[verb], "--json", "r.json")
    assert status == 2 and "--json 'r.json' cannot be written (No space left" in err
    assert listing(small) == before
    assert run(*VERBS[verb], "--json", "r.json")[0] == 0
    assert isinstance(json.loads((small / "r.json").read_text()), dict)
    assert set(listing(small)) == set(before)


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_takes_no_file_is_found_first(small, refuse, monkeypatch, tmp_path, verb):
    monkeypatch.chdir(small)
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) != str(tmp_path))
    err = refuse(tmp_path, *VERBS[verb], "--json", tmp_path / "r.json")
    assert "its folder cannot be written" in err


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "r.json").symlink_to(tmp_path / "there" / "r.json")
    write_json(tmp_path / "r.json", {"a": 1})
    assert (tmp_path / "r.json").is_symlink()
    assert json.loads((tmp_path / "there" / "r.json").read_text()) == {"a": 1}


def test_a_name_as_long_as_is_allowed(tmp_path):
    path = tmp_path / ("r" * 250 + ".json")
    write_json(path, {"a": 1})
    assert os.listdir(tmp_path) == [path.name]


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json(tmp_path / "pipe", {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]
