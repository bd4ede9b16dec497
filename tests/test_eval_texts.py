"""`eval`: several texts in one call, and the dense model beside what was made of it."""

from __future__ import annotations

import json
import shutil

import pytest

import ghostlayers as gl
from oracles import reload
from tiny_checkpoints import text_of, tiny_tokenizer

SHORT = ("--window", 32, "--num-windows", 4)


@pytest.fixture(scope="module")
def pruned(work, tmp_path_factory):
    from ghostlayers.cli import main

    out = tmp_path_factory.mktemp("pruned") / "p"
    flags = ["prune", work / "m", "-o", out, "--layers", "3", "--recover", "none"]
    assert main([str(flag) for flag in flags]) == 0
    return out


def perplexity_of(folder, text):
    windows = gl.text_windows(tiny_tokenizer(), str(text), num_windows=4, window=32)
    return gl.perplexity(reload(folder), windows, progress=False).perplexity


def test_several_texts_in_one_call(work, pruned, run, tmp_path):
    """CASES 45, 61: every text has its own record, hash, and ratio to the dense model."""
    other = tmp_path / "u.txt"
    other.write_text(text_of(900, seed=7)[::-1])
    texts = [work / "t.txt", other]
    flags = ("--perplexity", f"{texts[0]}, {texts[1]}", *SHORT, "--json", tmp_path / "e.json")
    status, out, err = run("eval", work / "m", pruned, *flags)
    assert (status, err) == (0, "")
    dense, cut = json.loads((tmp_path / "e.json").read_text())["results"]
    for folder, result in ((work / "m", dense), (pruned, cut)):
        assert [found["source"] for found in result["texts"]] == list(map(str, texts))
        for found, base, text in zip(result["texts"], dense["texts"], texts, strict=True):
            assert found["perplexity"] == pytest.approx(perplexity_of(folder, text), rel=1e-6)
            assert found["ratio"] == found["perplexity"] / base["perplexity"]
            assert f"{found['perplexity']:.4f}" in out
        first = {key: result[key] for key in result["texts"][0]}
        assert first == result["texts"][0]  # a reader of one text finds the first one
    assert len({found["ids_sha256"] for found in dense["texts"]}) == 2
    assert "t.txt" in out and "u.txt" in out and out.count("4 windows of 32 tokens, no BOS") == 2


def test_a_text_whose_name_holds_a_comma(work, run, tmp_path):
    path = tmp_path / "a,b.txt"
    shutil.copyfile(work / "t.txt", path)
    flags = ("--perplexity", path, *SHORT, "--json", tmp_path / "e.json")
    assert run("eval", work / "m", *flags)[0] == 0
    (result,) = json.loads((tmp_path / "e.json").read_text())["results"]
    assert [found["source"] for found in result["texts"]] == [str(path)]


@pytest.mark.parametrize("texts", [",", "t.txt,nowhere.txt", "t.txt,wikitxt2"])
def test_every_text_is_checked_before_a_model_is_loaded(work, refuse, monkeypatch, texts):
    monkeypatch.chdir(work)
    missing = texts.rpartition(",")[2]
    assert (missing or "','") in refuse(work, "eval", "m", "--perplexity", texts)


@pytest.mark.parametrize("order", ["alone", "first", "dense second"])
def test_the_dense_model_is_the_baseline_of_what_was_made_of_it(work, pruned, run, tmp_path, order):
    """CASES 61: the dense baseline is measured in the same call."""
    paths = {"alone": [pruned], "first": [pruned, work / "bos"]}.get(order, [pruned, work / "m"])
    flags = ("--perplexity", work / "t.txt", *SHORT, "--json", tmp_path / "e.json")
    assert run("eval", *paths, *flags)[0] == 0
    results = json.loads((tmp_path / "e.json").read_text())["results"]
    expected = [work / "m", pruned] + ([work / "bos"] if order == "first" else [])
    assert [found["path"] for found in results] == list(map(str, expected))
    assert results[0]["ratio"] == 1.0 != results[1]["ratio"]
    assert run("eval", *paths, "--no-dense", *flags)[0] == 0
    results = json.loads((tmp_path / "e.json").read_text())["results"]
    assert [found["path"] for found in results] == list(map(str, paths))


def test_a_dense_model_that_is_gone_is_said(work, pruned, run, tmp_path):
    moved = shutil.copytree(pruned, tmp_path / "p")
    record = json.loads((moved / "ghostlayers.json").read_text())
    for origin, reason in (({"model": "./gone"}, "'./gone' does not exist"), (None, "no source")):
        (moved / "ghostlayers.json").write_text(json.dumps({**record, "source": origin}))
        status, _, err = run("eval", moved, "--perplexity", work / "t.txt", *SHORT)
        assert status == 0 and len(err.splitlines()) == 1
        assert "warning: no dense baseline" in err and reason in err and "first PATH" in err
