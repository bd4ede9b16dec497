"""How the papers' texts become windows, and what a perplexity says about itself."""

from __future__ import annotations

import random

import pytest

import ghostlayers as gl
from ghostlayers.calibration import text_windows
from ghostlayers.document_windows import MAX_DRAWS, document_windows
from oracles import tiny_model
from tiny_checkpoints import text_of, tiny_tokenizer

datasets = pytest.importorskip("datasets")
ROWS = [{"text": text_of(3 + 7 * (i % 9), seed=i)} for i in range(40)]


def reference_c4(tokenizer, rows, count, seqlen):
    """LinearPatch's `get_c4`, with its draws in its order, on the tokenizer's own encoding."""
    state = random.getstate()
    random.seed(0)
    found = []
    try:
        for _ in range(count):
            while True:
                i = random.randint(0, len(rows) - 1)
                ids = tokenizer(rows[i]["text"]).input_ids
                if len(ids) > seqlen:
                    break
            i = random.randint(0, len(ids) - seqlen - 1)
            found.append(ids[i : i + seqlen])
    finally:
        random.setstate(state)
    return found


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the Hub: rows by dataset; notes how each was asked for."""
    asked = {}

    def load_dataset(name, config=None, **keywords):
        asked[name] = {"config": config, **keywords}
        column = "sentence" if "ptb" in name else "text"
        return [{column: row["text"]} for row in ROWS]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("bos", [False, True])
def test_c4_windows_are_those_of_the_papers(hub, bos):
    """The same documents and places; BOS only takes the place of a token that is not scored."""
    tokenizer = tiny_tokenizer(bos)
    windows = text_windows(tokenizer, "c4", num_windows=12, window=64, evaluation=True)
    expected = reference_c4(tokenizer, ROWS, 12, 64)
    assert windows.ids[:, 1:].tolist() == [row[1:] for row in expected]
    first = [1] * 12 if bos else [row[0] for row in expected]
    assert windows.ids[:, 0].tolist() == first and windows.bos_per_window is bos
    assert len({tuple(row) for row in windows.ids.tolist()}) > 6
    record = windows.record()
    assert record["split"] == "validation" and record["data_file"].startswith("en/c4-validation")
    assert record["window_seed"] == 0 and record["documents_drawn"] >= 12
    assert hub["allenai/c4"]["data_files"] == {"validation": record["data_file"]}
    assert hub["allenai/c4"]["streaming"] is False


def test_c4_has_256_windows_unless_told_otherwise(hub):
    found = text_windows(tiny_tokenizer(), "c4", num_windows=None, window=64, evaluation=True)
    assert found.ids.shape == (256, 64) and found.requested is None


def test_c4_for_calibration_stays_one_text(hub):
    found = text_windows(tiny_tokenizer(), "c4", num_windows=3, window=64)
    ids = tiny_tokenizer()("\n\n".join(row["text"] for row in ROWS)).input_ids
    assert found.ids.flatten().tolist() == ids[: 3 * 64]
    assert hub["allenai/c4"]["split"] == "train" and hub["allenai/c4"]["streaming"] is True


@pytest.mark.parametrize(
    ("name", "dataset", "split"),
    [
        ("wikitext2", "Salesforce/wikitext", "test"),
        ("ptb", "ptb-text-only/ptb_text_only", "validation"),
    ],
)
def test_wikitext2_and_ptb_are_joined_by_a_blank_line(hub, name, dataset, split):
    found = text_windows(tiny_tokenizer(), name, num_windows=None, window=50, evaluation=True)
    ids = tiny_tokenizer()("\n\n".join(row["text"] for row in ROWS)).input_ids
    count = len(ids) // 50
    assert found.ids.flatten().tolist() == ids[: count * 50]
    assert hub[dataset]["split"] == split == found.record()["split"]


def test_documents_that_are_too_short_end_the_search():
    """CASES 41: no endless loop."""
    rows = [{"text": "ab"}] * 3
    with pytest.raises(gl.CalibrationError, match=f"none of {2 * MAX_DRAWS} documents"):
        document_windows(tiny_tokenizer(), rows, "text", num_windows=2, window=16, bos=False)
    with pytest.raises(gl.CalibrationError, match="none of 0 documents"):
        document_windows(tiny_tokenizer(), [], "text", num_windows=2, window=16, bos=False)


def test_few_long_documents_are_a_warning(hub, monkeypatch):
    monkeypatch.setattr("ghostlayers.document_windows.MAX_DRAWS", 1)
    with pytest.warns(UserWarning, match=r"30 windows of 64 tokens asked for.*using \d+"):
        found = text_windows(tiny_tokenizer(), "c4", num_windows=30, window=64, evaluation=True)
    assert 0 < len(found.ids) < 30


def test_global_random_state_stays(hub):
    random.seed(5)
    before = random.getstate()
    text_windows(tiny_tokenizer(), "c4", num_windows=2, window=64, evaluation=True)
    assert random.getstate() == before


def test_a_perplexity_says_what_it_was_measured_on(tmp_path):
    """CASES 61: two windows, two numbers, and each record tells them apart."""
    (tmp_path / "t.txt").write_text(text_of(800))
    model, results = tiny_model(), []
    for window in (32, 128):
        windows = gl.text_windows(
            tiny_tokenizer(), str(tmp_path / "t.txt"), num_windows=None, window=window
        )
        results.append(gl.perplexity(model, windows).to_dict())
    short, long = results
    assert short["perplexity"] != long["perplexity"]
    for found, window in ((short, 32), (long, 128)):
        assert found["window"] == window == found["stride"]
        assert found["tokens"] == found["windows"] * (window - 1)
        assert (found["dtype"], found["bos_per_window"]) == ("float32", False)
    assert short["ids_sha256"] != long["ids_sha256"]
