"""CASES 2, 19, 24, 25, 29 and 44: where a model or a text comes from, and what it becomes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import ghostlayers as gl
from families import tiny_model as family_model
from ghostlayers.decoder import decoder_layers
from ghostlayers.loading import load_config, load_model, locate
from ghostlayers.text_sources import SHORT_NAMES
from oracles import identity_reference, logits, random_ids, reload, step_error, tiny_model
from test_cases import check_oracles
from tiny_checkpoints import tiny_tokenizer

IDS = random_ids()
WINDOWS = random_ids(4, 40, seed=2)


def test_the_first_two_layers_may_go(tmp_path):
    """CASES 2: slot 0 of the cache is that of the first layer that is left."""
    check_oracles(tiny_model(), "0-1", tmp_path)


@pytest.mark.parametrize(
    ("family", "folder"),
    [
        ("llama", "my-falcon-test"),
        ("gpt_neox", "x"),
        ("opt", "x"),
        ("gpt2", "llama-7b"),
        ("phi", "x"),
        ("gemma3_text", "gpt2"),
    ],
)
def test_the_folder_name_decides_nothing(tmp_path, family, folder):
    """CASES 19."""
    family_model(family).save_pretrained(tmp_path / folder)
    dense = load_model(locate(str(tmp_path / folder)))
    result = gl.prune(dense, layers="3-4", recover="none", progress=False)
    assert torch.equal(logits(result.model, IDS), identity_reference(dense, [3, 4], IDS))


def test_an_unsupported_model_is_named_by_its_type(tmp_path):
    """CASES 19: `model_type`, wherever it lies."""
    folder = tmp_path / "llama-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "detr"}))
    with pytest.raises(gl.UnsupportedModelError, match="detr"):
        load_config(locate(str(folder)))


@pytest.mark.parametrize("recover", ["ghost", "linearpatch-rotate"])
def test_an_operator_behind_the_last_layer_leaves_a_tied_head(tmp_path, recover):
    """CASES 24: nothing is folded into the head; it stays the embedding, and is not written."""
    dense = tiny_model("llama", tie_word_embeddings=True)
    before = dense.get_input_embeddings().weight.clone()
    result = gl.prune(dense, layers="6-7", recover=recover, windows=WINDOWS, ridge=1e-2)
    bare = identity_reference(dense, [6, 7], IDS)
    assert (logits(result.model, IDS) - bare).abs().max() > 1e-2  # the operator does something
    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out")
    assert loaded.config.tie_word_embeddings
    head, embedding = loaded.lm_head.weight, loaded.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr() and torch.equal(embedding, before)
    assert torch.equal(logits(loaded, IDS), logits(result.model, IDS))
    assert step_error(loaded, IDS) < 1e-4


def write_gguf(path, model) -> None:
    """Write a Llama as a GGUF file; llama.cpp stores q and k with the halves of a head woven."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", 2)):
            if kind in name:
                parts = tensor.reshape(heads, 2, -1, tensor.shape[1])
                tensor = parts.swapaxes(1, 2).reshape(tensor.shape)
        to = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(to, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("recover", ["none", "ghost", "replaceme-lstsq"])
def test_a_gguf_model_is_saved_as_an_ordinary_one(tmp_path, recover):
    """CASES 25: no stale quantization record; the weights are those of the file."""
    model = tiny_model()
    write_gguf(tmp_path / "m.gguf", model)
    source = locate(str(tmp_path / "m.gguf"))
    dense = load_model(source)
    assert (logits(dense, IDS) - logits(model, IDS)).abs().max() < 1e-5
    result = gl.prune(dense, layers="3-4", recover=recover, windows=WINDOWS, ridge=1e-2)
    gl.save_pruned(result, tmp_path / "out", source=source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["num_hidden_layers"] == 6
    assert torch.equal(logits(reload(tmp_path / "out"), IDS), logits(result.model, IDS))
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    assert record["source"]["gguf"] == "m.gguf"


@pytest.mark.parametrize("name", SHORT_NAMES)
@pytest.mark.parametrize("evaluation", [False, True])
def test_datasets_are_read_without_scripts_and_their_commit_is_kept(monkeypatch, name, evaluation):
    """CASES 44: full ids, no code of a dataset is trusted, the revision is in the record."""
    datasets = pytest.importorskip("datasets")
    asked, commit = [], "0123456789abcdef" * 2 + "01234567"

    class Rows(list):
        class info:
            download_checksums = {f"hf://datasets/a/b@{commit}/part.parquet": None}

    def load_dataset(path, config=None, **keywords):
        asked.append((path, keywords))
        column = "sentence" if "ptb" in path else "text"
        return Rows({column: "one two three four " * 40} for _ in range(9))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = gl.text_windows(tiny_tokenizer(), name, num_windows=2, window=32, evaluation=evaluation)
    assert asked and all(path.count("/") == 1 for path, _ in asked)
    assert not any("trust_remote_code" in keywords for _, keywords in asked)
    assert found.record()["revision"] == commit


@pytest.mark.parametrize("recover", ["ghost", "none"])
def test_the_config_alone_builds_the_model(tmp_path, recover):
    """CASES 29: depth and operators come from the config, inside the base model; no keywords."""
    result = gl.prune(tiny_model(), layers="3-4,7", recover=recover, windows=WINDOWS, ridge=1e-2)
    gl.save_pruned(result, tmp_path / "out")
    loaded = reload(tmp_path / "out")
    built = AutoModelForCausalLM.from_config(loaded.config).eval()
    assert type(built) is type(loaded) and len(decoder_layers(built)) == 5
    operators = [name for name, _ in built.base_model.named_parameters() if ".ghost_" in name]
    assert len(operators) == (2 if recover == "ghost" else 0)
    built.load_state_dict(loaded.state_dict(), strict=True)
    assert torch.equal(logits(built, IDS), logits(result.model, IDS))


@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_no_tensor_is_of_a_layer_that_is_gone(tmp_path, recover):
    """CASES 29: neither in a shard nor in the index."""
    result = gl.prune(tiny_model(), layers="3-4,7", recover=recover, windows=WINDOWS, ridge=1e-2)
    gl.save_pruned(result, tmp_path / "out", max_shard_bytes=150_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        with safe_open(str(shard), "pt") as file:
            listed = [key for key, name in index["weight_map"].items() if name == shard.name]
            assert sorted(file.keys()) == sorted(listed)
    layers = {int(key.split(".")[2]) for key in index["weight_map"] if ".layers." in key}
    assert layers == set(range(5))
