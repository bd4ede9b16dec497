"""Checkpoints carry the keys that transformers 4 reads; what 5 reads from them stays the same."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

import ghostlayers as gl
from ghostlayers.modeling_ghostlayers import older_keys
from ghostlayers.older_transformers import write_older_keys
from oracles import random_ids, tiny_config, tiny_model
from tiny_checkpoints import tiny_tokenizer

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_llama_is_written_with_rope_theta_and_a_known_tokenizer(tmp_path, recover):
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    result = gl.prune(model, windows=random_ids(3), layers="3-4", recover=recover)
    result = type(result)(**{**vars(result), "tokenizer": tiny_tokenizer()})
    folder = gl.save_pruned(result, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 123.0
    assert "rope_scaling" not in config
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "a layer of a map"
    assert dict(loaded(text)) == dict(tiny_tokenizer()(text))
    assert tokenizer["model_input_names"] == list(tiny_tokenizer()(text))  # 4 adds a third
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 123.0


def test_inputs_that_a_tokenizer_names_itself_are_kept(tmp_path):
    names = ["input_ids", "token_type_ids"]
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    write_older_keys(tmp_path, config)
    assert json.loads(path.read_text())["model_input_names"] == names
    assert set(AutoTokenizer.from_pretrained(tmp_path)("a")) == set(names)


@pytest.mark.parametrize(
    ("family", "rope", "expected"),
    [
        (
            "llama",
            {"rope_theta": 5.0, **LINEAR},
            {"rope_theta": 5.0, "rope_scaling": {"rope_theta": 5.0, **LINEAR}},
        ),
        (
            "gemma3",
            {
                "full_attention": {"rope_theta": 7.0, **LINEAR},
                "sliding_attention": {"rope_theta": 3.0, "rope_type": "default"},
            },
            {
                "rope_theta": 7.0,
                "rope_local_base_freq": 3.0,
                "rope_scaling": {"rope_theta": 7.0, **LINEAR},
            },
        ),
        ("gpt2", None, {}),
    ],
)
def test_keys_by_family_and_what_release_5_reads(tmp_path, family, rope, expected):
    config = tiny_config(family)
    if rope is not None:
        config.rope_parameters = rope
    config.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    write_older_keys(tmp_path, config)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == {**before, **expected}
    if rope is not None:
        assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


def test_no_key_that_would_change_what_release_5_reads():
    class Config:  # prefers the old key, as some families do
        def __init__(self, **values):
            self.rope_parameters = values.get("rope_scaling", values["rope_parameters"])

    rope = {"rope_theta": 5.0, "rope_type": "proportional"}
    values = {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    assert older_keys(values, lambda found: Config(**found)) == {}
    assert older_keys({"rope_parameters": rope}, lambda found: Config(**found)) == {
        "rope_theta": 5.0,
        "rope_scaling": rope,
    }
