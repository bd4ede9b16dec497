"""A disk that is full at any file: one line, nothing of the result; and weights of nan."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tiny_checkpoints import listing

TEXT = ("--num-windows", 6, "--window", 32)


def full(error: Exception):
    def call(*_args, **_keywords):
        raise error

    return call


SAFETENSORS = full(SafetensorError("Error while serializing: No space left on device"))
# What raises where: safetensors, tokenizers and torch have their own classes for it.
PLACES = {
    "weights": ("ghostlayers.tensor_copy.save_file", SAFETENSORS),
    "tokenizer": (
        "transformers.PreTrainedTokenizerFast.save_pretrained",
        full(Exception("No space left on device (os error 28)")),
    ),
    "card": ("pathlib.Path.write_text", full(OSError(28, "No space left on device"))),
}


@pytest.mark.parametrize("place", PLACES)
def test_prune(work, refuse, tmp_path, monkeypatch, place):
    monkeypatch.setattr(*PLACES[place])
    flags = ["--layers", 3, "--recover", "none"]
    assert "No space left" in refuse(tmp_path, "prune", work / "m", "-o", tmp_path / "o", *flags)


@pytest.fixture(scope="module")
def pruned(work):
    from ghostlayers.cli import main

    args = ["prune", work / "m", "-o", work / "pruned", "--layers", 3, "--recover", "ghost"]
    assert main([str(arg) for arg in (*args, "--calibration", work / "t.txt", *TEXT)]) == 0
    return work / "pruned"


def finetune(work, pruned, teacher="m") -> list:
    args = ["finetune", pruned, "--teacher", work / teacher, "--calibration", work / "t.txt", *TEXT]
    return [*args, "--steps", 1, "-o"]


def test_the_logits_of_the_teacher(work, pruned, run, tmp_path, monkeypatch):
    monkeypatch.setattr("ghostlayers.teacher_logits.save_file", SAFETENSORS)
    status, _, err = run(*finetune(work, pruned), tmp_path / "o")
    assert status == 2 and "No space left" in err.splitlines()[-1] and "Traceback" not in err
    assert listing(tmp_path) == {}


def test_the_state_of_the_training(work, pruned, run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full(RuntimeError("[enforce fail at x.cc] . unexpected pos")))
        status, _, err = run(*finetune(work, pruned), tmp_path / "o")
    assert status == 2 and "unexpected pos" in err.splitlines()[-1] and "Traceback" not in err
    left = [name for name in listing(tmp_path) if not name.startswith(".o.finetune/teacher")]
    assert left == [".o.finetune"]  # the logits stay for the next try
    assert run(*finetune(work, pruned), tmp_path / "o")[0] == 0


@pytest.fixture(scope="module")
def broken(work):
    """The tiny model with one weight of layer 3 not a number."""
    shutil.copytree(work / "m", work / "nan")
    file = work / "nan" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return work


def test_a_teacher_of_nan_leaves_nothing(broken, pruned, run, tmp_path):
    status, _, err = run(*finetune(broken, pruned, "nan"), tmp_path / "o")
    assert status == 2 and "logits are not finite" in err.splitlines()[-1]
    assert listing(tmp_path) == {}


@pytest.mark.parametrize(("layer", "warned"), [(3, False), (5, True)])
def test_weights_of_nan_that_no_sweep_reads(broken, run, tmp_path, layer, warned):
    args = ["prune", broken / "nan", "-o", tmp_path / "o", "--layers", layer, "--recover", "none"]
    status, _, err = run(*args)
    assert status == 0
    assert ("the logits of the pruned model are not finite in float32" in err) == warned
    assert err.count("\n") == warned


def test_an_empty_name_is_no_folder(work, refuse):
    flags = ["--layers", 3, "--recover", "none"]
    assert "output is ''" in refuse(work, "prune", work / "m", "-o", "", *flags)


def test_a_comparison_that_finds_no_room_leaves_no_folder(work, refuse, tmp_path, monkeypatch):
    monkeypatch.setattr("ghostlayers.scores_file.save_file", SAFETENSORS)
    args = ["compare", work / "m", "--num-remove", 2, "--recover", "none", "--select", "shortgpt"]
    args += ["--calibration", work / "t.txt", *TEXT, "--perplexity", work / "t.txt"]
    assert "No space left" in refuse(tmp_path, *args, "-o", tmp_path / "g" / "deep")
