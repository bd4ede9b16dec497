"""Text to windows, windows to states: what is counted, and what is not."""

from __future__ import annotations

import hashlib
import json
import struct
import weakref

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ghostlayers as gl
from ghostlayers.calibration import adds_bos, resolve_window
from ghostlayers.decoder import base_model, decoder_layers
from ghostlayers.plan import Boundary
from ghostlayers.similarity import SimilarityAccumulator
from ghostlayers.sweep import TokenRows, capture, sweep
from ghostlayers.text_sources import SHORT_NAMES, read_text
from oracles import random_ids, tiny_model
from tiny_checkpoints import text_of, tiny_tokenizer

BOUNDARY = Boundary(3, 5)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def write(path, text):
    path.write_text(text)
    return str(path)


# Windows of text.


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("evaluation", [False, True])
def test_windows_and_their_hash(tmp_path, bos, evaluation):
    text = text_of(60)
    windows = gl.text_windows(
        tiny_tokenizer(bos),
        write(tmp_path / "t.txt", text),
        num_windows=5,
        window=16,
        evaluation=evaluation,
    )
    ids = tiny_tokenizer()(text, add_special_tokens=False).input_ids
    size = 16 - bos
    expected = [[1] * bos + ids[i * size : (i + 1) * size] for i in range(5)]
    assert windows.ids.tolist() == expected
    assert windows.ids.dtype == torch.int64
    flat = [token for row in expected for token in row]
    digest = hashlib.sha256(struct.pack(f"<{len(flat)}i", *flat)).hexdigest()
    record = windows.record()
    assert record["ids_sha256"] == digest
    assert (record["bos_per_window"], record["tokens"], record["windows"]) == (bos, 80, 5)


def test_all_windows_of_a_text(tmp_path):
    path = write(tmp_path / "t.txt", "x" * 100)
    windows = gl.text_windows(tiny_tokenizer(), path, num_windows=None, window=33)
    assert windows.ids.shape == (3, 33)


def test_bos_is_decided_from_the_ids():
    assert adds_bos(tiny_tokenizer(True))
    plain = tiny_tokenizer()
    assert plain.bos_token_id == 1 and not adds_bos(plain)  # it has one but does not use it
    nameless = tiny_tokenizer(True)
    nameless.bos_token = None
    assert not adds_bos(nameless)


def test_a_text_file_is_read_as_it_is(tmp_path):
    (tmp_path / "t.txt").write_bytes("a\r\nb\n\n\né".encode())
    assert read_text(str(tmp_path / "t.txt"))[:2] == ("a\r\nb\n\n\né", True)


def test_jsonl_documents_are_joined_by_a_blank_line(tmp_path):
    lines = [json.dumps({"text": "one\n", "id": 1}), "", json.dumps("two é"), '{"text": ""}']
    path = write(tmp_path / "t.jsonl", "\n".join(lines))
    assert read_text(path)[0] == "one\n\n\ntwo é\n\n"


def test_parquet_documents(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"text": ["one", None, "two"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert read_text(str(tmp_path / "t.parquet"))[0] == "one\n\ntwo"


def test_short_documents_are_packed_and_missing_windows_are_said(tmp_path):
    """CASES 41: 20 documents of 10 tokens, window 64, 8 windows asked."""
    path = write(tmp_path / "t.jsonl", "\n".join([json.dumps("0123456789")] * 20))
    with pytest.warns(UserWarning, match=r"8 windows of 64 tokens asked for.*using 3"):
        windows = gl.text_windows(tiny_tokenizer(), path, num_windows=8, window=64)
    assert windows.ids.shape == (3, 64)
    assert (windows.record()["windows"], windows.record()["requested_windows"]) == (3, 8)


def test_text_is_read_on_until_there_is_enough(tmp_path):
    """Words of 40 characters: the first guess of characters per token is far too small."""
    words = [f"{number:040d}" for number in range(200)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, words)))
    assert len(read_text(path, max_characters=128)[0]) < 250
    windows = gl.text_windows(tokenizer, path, num_windows=4, window=8)
    assert windows.ids.flatten().tolist() == list(range(32))


def test_dataset_ids():
    """CASES 44: full ids, no loading scripts."""
    for sources in SHORT_NAMES.values():
        assert all(source.dataset.count("/") == 1 for source in sources)
        assert sources[0].split != sources[1].split


def test_window_length(model):
    assert resolve_window(None, model.config) == 512 == resolve_window(512, model.config)
    with pytest.raises(gl.CalibrationError, match="allows 512"):
        resolve_window(513, model.config)


# Windows that the model writes.


def sampled(model, bos=False, **settings):
    settings = {"num_windows": 5, "window": 12, "batch_size": 2, **settings}
    return gl.sampled_windows(model, tiny_tokenizer(bos), **settings)


@pytest.mark.parametrize("bos", [False, True])
def test_sampled_windows(model, bos):
    state = torch.random.get_rng_state()
    windows = sampled(model, bos)
    assert torch.equal(torch.random.get_rng_state(), state)  # CASES 46
    assert windows.ids.shape == (5, 12) and windows.bos_per_window is bos
    assert ((windows.ids >= 0) & (windows.ids < 256)).all()
    assert ((windows.ids[:, 0] == 1) if bos else (windows.ids[:, 0] > 2)).all()
    assert len({tuple(row) for row in windows.ids.tolist()}) == 5
    torch.manual_seed(99)  # whatever the global state is
    assert torch.equal(sampled(model, bos).ids, windows.ids)
    assert not torch.equal(sampled(model, bos, seed=1).ids, windows.ids)


def test_sampling_ignores_the_models_own_generation_settings(model):
    plain = sampled(model).ids
    other = tiny_model()
    settings = {"repetition_penalty": 9.0, "num_beams": 2, "max_length": 3}
    settings |= {"top_k": 1, "temperature": 0.1, "min_p": 0.9, "no_repeat_ngram_size": 1}
    for name, value in settings.items():
        setattr(other.generation_config, name, value)
    found = sampled(other).ids
    assert found.shape == plain.shape
    assert torch.equal(found, plain)
    assert other.generation_config.repetition_penalty == 9.0


def test_a_model_in_training_mode_is_measured_in_evaluation_mode():
    dropping = tiny_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    settings = {"num_remove": 2, "num_windows": 4, "window": 16, "ridge": 1e-3}
    expected = gl.prune(dropping, tiny_tokenizer(), **settings)
    dropping.train()
    found = gl.prune(dropping, tiny_tokenizer(), **settings)
    assert dropping.training and found.record["rls"] == expected.record["rls"]


# What is counted.


def padded(side: str, lengths, pad: int):
    ids = torch.full((len(lengths), max(lengths)), pad)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        part = slice(-length, None) if side == "left" else slice(0, length)
        ids[row, part] = random_ids(1, length, seed=row)[0]
        ids[row, part][length // 2] = 2  # a genuine EOS, which is also the padding token
        mask[row, part] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_padding_is_not_counted(family):
    """CASES 38: left, right and no padding give the same scores and moments."""
    model, lengths = tiny_model(family), [4, 31, 17, 8, 32, 5, 20, 9]
    alone = [padded("right", [length], 2) for length in lengths]
    for row, batch in enumerate(alone):  # the same tokens as in the padded batches
        batch["input_ids"] = padded("right", lengths, 2)["input_ids"][row : row + 1, : lengths[row]]
    one_by_one = gl.measure_similarity(model, alone)
    assert one_by_one.num_tokens == sum(lengths)
    moments = gl.collect_moments(model, alone, [BOUNDARY])[BOUNDARY]
    for side in ("left", "right"):
        whole = padded(side, lengths, 2)
        halves = [
            {key: value[part] for key, value in whole.items()}
            for part in (slice(0, 4), slice(4, 8))
        ]
        found = gl.measure_similarity(model, halves)
        assert found.num_tokens == sum(lengths)
        assert abs(found.matrix - one_by_one.matrix).max() < 1e-5
        for part in ("fit", "held_out"):
            a = getattr(gl.collect_moments(model, halves, [BOUNDARY])[BOUNDARY], part)
            b = getattr(moments, part)
            assert a.num_tokens == b.num_tokens
            for name in ("gram", "cross"):
                x, y = getattr(a, name), getattr(b, name)
                assert (x - y).abs().max() < 1e-5 * y.abs().max()


def test_same_data_twice_gives_the_same_scores(model):
    ids = random_ids(8, 40)
    once = gl.measure_similarity(model, [ids])
    twice = gl.measure_similarity(model, [ids, ids])
    assert abs(once.matrix - twice.matrix).max() < 1e-6  # CASES 16
    assert twice.num_tokens == 640 and once.matrix[0, 5] < 0.9
    assert (once.block_influence >= 0).all() and (once.block_influence <= 2).all()


def test_batch_size_does_not_matter(model):
    ids = random_ids(6, 40)
    one = gl.measure_similarity(model, list(ids.split(1)))
    all_at_once = gl.measure_similarity(model, [ids])
    assert abs(one.matrix - all_at_once.matrix).max() < 1e-6


def test_no_tokens_is_an_error(model):
    """CASES 42."""
    masked = {"input_ids": random_ids(), "attention_mask": torch.zeros(2, 40, dtype=torch.long)}
    for batches in ([], [masked], [random_ids()[:0]]):
        with pytest.raises(gl.CalibrationError, match="no calibration tokens"):
            gl.measure_similarity(model, batches)
        with pytest.raises(gl.CalibrationError, match="no calibration tokens"):
            gl.collect_moments(model, batches, [BOUNDARY])
    for settings in ({"num_remove": 1}, {"layers": "3"}):
        with pytest.raises(gl.CalibrationError, match="no calibration tokens"):
            gl.prune(model, windows=random_ids()[:0], **settings)
        for recover in ("none", "ghost", "ghost-robust", "fold+ghost"):
            with pytest.raises(gl.CalibrationError, match=r"no calibration .* shape \(2, 1\)"):
                gl.prune(model, windows=random_ids()[:, :1], recover=recover, **settings)
    scores = gl.analyze(model, windows=random_ids()[:, :1]).scores
    with pytest.raises(gl.CalibrationError, match=r"no calibration .* shape \(2, 1\)"):
        gl.prune(model, scores=scores, num_remove=1, select="shortened-ppl")


def test_tokens_outside_the_vocabulary_are_an_error(model):
    for ids in (random_ids() + 256, -random_ids()):
        with pytest.raises(gl.CalibrationError, match="vocabulary"):
            gl.measure_similarity(model, [ids])
        with pytest.raises(gl.CalibrationError, match="vocabulary"):
            gl.perplexity(model, ids)


def cosine(*states) -> torch.Tensor:
    accumulator = SimilarityAccumulator(len(states) - 1)
    count = len(states[0])
    rows = TokenRows(torch.zeros(count, dtype=torch.long), torch.arange(count))
    accumulator.update(dict(enumerate(states)), rows)
    return torch.from_numpy(accumulator.result().matrix)


def test_identical_states_have_similarity_one():
    """CASES 53: half-precision states against themselves, through the real accumulator."""
    states = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)).half().float()
    found = cosine(states, states, 3 * states, -states)
    assert found.max() <= 1.0 and found.min() >= -1.0
    assert torch.allclose(found[0], torch.tensor([1.0, 1.0, 1.0, -1.0]).double(), atol=1e-6)
    assert torch.isfinite(torch.arccos(found)).all()


def test_cosine_is_taken_over_channels():
    """CASES 54."""
    x, y = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[2.0, 2.0], [1.0, -1.0]])
    assert cosine(x, y)[0, 1] == pytest.approx(1.0, abs=1e-6)
    # A token of zeros is like nothing, but does not spoil the rest.
    assert cosine(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.ones(2, 2))[0, 1] == pytest.approx(
        0.5 * 2**-0.5, abs=1e-6
    )


def test_similarity_equals_its_definition(model):
    ids = random_ids(3, 30)
    states = {}
    with torch.no_grad(), capture(decoder_layers(model), range(9), states.__setitem__):
        model(input_ids=ids)
    unit = [torch.nn.functional.normalize(states[i].double(), dim=-1) for i in range(9)]
    expected = torch.tensor([[float((a * b).sum(-1).mean()) for a in unit] for b in unit])
    found = torch.from_numpy(gl.measure_similarity(model, [ids]).matrix)
    assert (found - expected).abs().max() < 1e-6


def test_last_state_is_not_normalised(model):
    """CASES 55: state L is what leaves the last layer; the norm comes after it."""
    ids, states = random_ids(), {}
    with torch.no_grad(), capture(decoder_layers(model), [7, 8], states.__setitem__):
        normed = base_model(model)(input_ids=ids)[0]
    assert states[8].shape == (2, 40, 64)  # CASES 32
    assert not torch.allclose(states[8], normed, atol=1e-2)
    assert torch.equal(model.model.norm(states[8]), normed)
    total = gl.collect_moments(model, [ids], [Boundary(6, 8)])[Boundary(6, 8)].total
    raw = float(states[8].double().square().sum())
    assert total.target_squares == pytest.approx(raw, rel=1e-6)


# What goes wrong in the middle.


def test_an_error_in_the_third_batch_surfaces(model):
    """CASES 36: no statistic comes back, no hook stays, the mode is restored."""
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise IndexError("third batch")

    before = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    batches = list(random_ids(5, 16).split(1))
    handle = model.get_input_embeddings().register_forward_pre_hook(fail)
    model.train()
    try:
        for measure in (
            lambda: gl.measure_similarity(model, batches),
            lambda: gl.collect_moments(model, batches, [BOUNDARY]),
        ):
            calls.clear()
            with pytest.raises(IndexError, match="third batch"):
                measure()
            assert len(calls) == 3 and model.training
    finally:
        handle.remove()
        model.eval()
    assert before == [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


class Remember:
    """An accumulator that counts which states of earlier batches are still alive."""

    def __init__(self, states):
        self.states, self.references, self.alive, self.batches = states, [], [], 0

    def count(self, *_):
        self.alive.append(sum(reference() is not None for reference in self.references))

    def update(self, states, rows):
        self.references += [weakref.ref(state) for state in states.values()]
        self.batches += 1
        assert set(states) == set(self.states)


def test_no_state_outlives_its_batch(model):
    """CASES 66."""
    remember = Remember([0, 3, 8])
    handle = model.get_input_embeddings().register_forward_pre_hook(remember.count)
    sweep(model, list(random_ids(6, 16).split(1)), [remember])
    handle.remove()
    assert remember.batches == 6 and len(remember.references) == 18
    assert remember.alive == [0] * 6
    assert not any(reference() is not None for reference in remember.references)
