"""What is written: the right tensors, nothing stale, complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import ghostlayers as gl
from ghostlayers.decoder import decoder_layers
from ghostlayers.loading import load_model, load_tokenizer, locate
from ghostlayers.model_card import model_card
from oracles import FAMILIES, logits, random_ids, reload, tiny_model
from tiny_checkpoints import listing, save_tiny, tiny_tokenizer

IDS = random_ids()
KEPT = [0, 1, 2, 5, 7]  # layers 3, 4 and 6 go


def prune_folder(folder: Path, out: Path, recover: str = "none", dtype: str = "auto", **saving):
    """Prune a saved model and save it by copying from its files."""
    source = locate(str(folder))
    model = load_model(source, dtype=dtype)
    result = gl.prune(
        model,
        load_tokenizer(source),
        layers="3-4,6",
        recover=recover,
        ridge=1e-3,
        windows=random_ids(6, 48, seed=2),
    )
    gl.save_pruned(result, out, source=source, dtype=dtype, **saving)
    return result


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def renumbered(tensors: dict[str, torch.Tensor], kept=tuple(KEPT)) -> dict[str, torch.Tensor]:
    """Say by other means than the package what a pruned checkpoint of Llama must hold."""
    expected = {name: t for name, t in tensors.items() if "layers." not in name}
    for new, old in enumerate(kept):
        for name, tensor in tensors.items():
            head, found, tail = name.partition(f"layers.{old}.")
            if found:
                expected[f"{head}layers.{new}.{tail}"] = tensor
    return expected


def assert_equal_tensors(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense") / "my-falcon-test")  # CASES 19


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


# The tensors.


@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_kept_tensors_are_bit_identical(dense, tmp_path, recover):
    result = prune_folder(dense, tmp_path / "out", recover)
    found, expected = stored(tmp_path / "out"), renumbered(stored(dense))
    operators = {name: found.pop(name) for name in list(found) if ".ghost_" in name}
    assert_equal_tensors(found, expected)
    if recover == "ghost":
        matrices = [fit.tensors["m"] for fit in result.fits.values()]
        names = [f"model.layers.{layer}.ghost_input.map.weight" for layer in (3, 4)]
        assert_equal_tensors(operators, dict(zip(names, [m.T for m in matrices], strict=True)))
    else:
        assert not operators
    assert torch.equal(logits(reload(tmp_path / "out"), IDS), logits(result.model, IDS))


@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_sharded_source_and_sharded_output(tmp_path, recover):
    folder = save_tiny(tmp_path / "dense", max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    result = prune_folder(folder, tmp_path / "out", recover, max_shard_bytes=150_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name in files:
        with safe_open(str(tmp_path / "out" / name), "pt") as file:
            assert set(file.keys()) == {k for k, v in index["weight_map"].items() if v == name}
            assert file.metadata() == {"format": "pt"}
    found = stored(tmp_path / "out")
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for name, tensor in renumbered(stored(folder)).items():
        assert torch.equal(found[name], tensor)
    assert torch.equal(logits(reload(tmp_path / "out"), IDS), logits(result.model, IDS))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_checkpoint_of_the_base_model_alone(tmp_path, family, recover):
    """Such files name tensors without the `model.` or `transformer.` in front."""
    folder = save_tiny(tmp_path / "dense", family, tie_word_embeddings=True)
    model = tiny_model(family, tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    base = {name: t.contiguous() for name, t in model.base_model.state_dict().items()}
    save_file(base, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(reload(folder), IDS), logits(model, IDS))
    result = prune_folder(folder, tmp_path / "out", recover)
    found = stored(tmp_path / "out")
    prefix = f"{model.base_model_prefix}."
    assert not any(name.startswith((prefix, "lm_head")) for name in found)
    assert torch.equal(logits(reload(tmp_path / "out"), IDS), logits(result.model, IDS))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_saving_from_memory_equals_copying_files(tmp_path, family, recover):
    folder = save_tiny(tmp_path / "dense", family)
    result = prune_folder(folder, tmp_path / "copied", recover)
    gl.save_pruned(result, tmp_path / "saved")
    copied, saved = (listing(tmp_path / name) for name in ("copied", "saved"))
    assert set(copied) == set(saved)
    for name in set(copied) - {"model.safetensors", "ghostlayers.json", "README.md"}:
        if name.endswith(".json"):
            assert json.loads(copied[name]) == json.loads(saved[name]), name
        else:
            assert copied[name] == saved[name], name
    assert_equal_tensors(stored(tmp_path / "copied"), stored(tmp_path / "saved"))


def test_saving_from_memory_keeps_an_inconsistent_generation_config(dense, tmp_path):
    result = prune_folder(dense, tmp_path / "copied")
    own = GenerationConfig(temperature=0.6, top_p=0.9, eos_token_id=[2, 3])  # and no do_sample
    result.model.generation_config = own
    gl.save_pruned(result, tmp_path / "saved")
    assert result.model.generation_config is own
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3]}.items() <= written.items()


def test_tied_weights(tmp_path):
    folder = save_tiny(tmp_path / "dense", tie_word_embeddings=True)
    assert "lm_head.weight" not in stored(folder)
    for recover in ("none", "ghost"):
        prune_folder(folder, tmp_path / recover, recover)
        assert "lm_head.weight" not in stored(tmp_path / recover)
        model = reload(tmp_path / recover)
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("recover", ["none", "ghost"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_cast(dense, tmp_path, recover, dtype):
    result = prune_folder(dense, tmp_path / "out", recover, dtype=dtype)
    wanted = getattr(torch, dtype)
    found = stored(tmp_path / "out")
    assert {tensor.dtype for tensor in found.values()} == {wanted}
    for name, tensor in renumbered(stored(dense)).items():
        assert torch.equal(found[name], tensor.to(wanted))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == dtype
    assert json.loads((tmp_path / "out" / "ghostlayers.json").read_text())["dtype"] == dtype
    loaded = reload(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(loaded, IDS), logits(result.model, IDS))


def test_stored_dtype_is_kept(tmp_path):
    """CASES 67: a bfloat16 model does not come back as float32."""
    folder = tmp_path / "dense"
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    prune_folder(folder, tmp_path / "out", "ghost")
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}


def test_files_beside_the_weights_are_not_weights(dense, tmp_path):
    folder = copy_of(dense, tmp_path / "dense")
    extra = {"layers.0.attention.wq.weight": torch.ones(2, 2)}
    save_file(extra, folder / "consolidated.safetensors")
    save_file({"lora.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    prune_folder(folder, tmp_path / "out")
    assert_equal_tensors(stored(tmp_path / "out"), renumbered(stored(dense)))


def test_pickled_source(tmp_path, dense):
    folder = copy_of(dense, tmp_path / "dense")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    prune_folder(folder, tmp_path / "out")
    assert_equal_tensors(stored(tmp_path / "out"), renumbered(stored(dense)))
    assert not list((tmp_path / "out").glob("*.bin"))  # CASES 20


# What stands beside them.


@pytest.mark.parametrize("recover", ["none", "ghost"])
def test_config_and_files(dense, tmp_path, recover):
    source = copy_of(dense, tmp_path / "dense")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    generation = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3]}  # and no do_sample
    (source / "generation_config.json").write_text(json.dumps(generation))
    prune_folder(source, tmp_path / "out", recover)
    before, config = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    assert (before["num_hidden_layers"], config["num_hidden_layers"]) == (8, 5)
    name = before["architectures"][0]
    assert config["architectures"] == [name if recover == "none" else f"Ghost{name}"]
    stale = {"_name_or_path", "quantization_config", "_attn_implementation_autoset"}
    assert not stale & set(config)
    if recover == "none":
        changed = {key for key in before if before[key] != config.get(key)}
        assert changed <= {"num_hidden_layers", "transformers_version", "layer_types"}
        assert "auto_map" not in config and config["model_type"] == "llama"
    for key in stored(tmp_path / "out"):  # CASES 29
        assert not any(f".layers.{layer}." in key for layer in (5, 6, 7))
    files = {path.name for path in (tmp_path / "out").iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    expected |= {"tokenizer_config.json", "ghostlayers.json", "README.md", "chat_template.jinja"}
    assert files == expected | ({"modeling_ghostlayers.py"} if recover == "ghost" else set())
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {key: written[key] for key in generation} == generation
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_record_and_model_card(dense, tmp_path):
    prune_folder(dense, tmp_path / "out", "ghost")
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    assert (record["removed"], record["kept"]) == ([3, 4, 6], KEPT)
    assert record["num_layers"] == 8 and record["selector"] == "layers"
    assert [(b["start"], b["stop"], b["operator"]) for b in record["boundaries"]] == [
        (3, 5, "ghost"),
        (6, 7, "ghost"),
    ]
    for boundary in record["boundaries"]:
        assert boundary["num_tokens"] == 288 and boundary["hidden_size"] == 64
        for key in ("error_before", "error_after", "held_out_error_before", "condition"):
            assert boundary[key] > 0
        assert boundary["error_after"] < boundary["error_before"]
        assert 0 <= boundary["antisymmetric_share"] <= 1
    assert record["calibration"]["tokens"] == 288 and record["seed"] == 0
    assert record["versions"]["torch"] and record["source"]["model"] == str(dense)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\n") and "3-4,6" in card and "trust_remote_code" in card
    assert "base_model" not in card  # a local path is no Hub id


def test_model_card_says_how_a_repair_was_refined(dense, tmp_path):
    prune_folder(dense, tmp_path / "out", "ghost")
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    entry = {**record["boundaries"][0], "operator": "fold", "weights": ["mlp.down_proj.weight"]}
    card = model_card({**record, "boundaries": [entry]})
    assert "without training" in card and "closed form, not trained" in card
    refined = {"boundaries": [{**entry, "operator": "fold-refined"}], "refinement": {"steps": 48}}
    card = model_card({**record, **refined})
    assert "its repair refined by 48 gradient steps." in card
    assert "without training" not in card and "not trained" not in card


# Complete or not at all.


@pytest.mark.parametrize("name", ["write_shards", "model_card", "write_json"])
def test_failure_leaves_nothing(dense, tmp_path, monkeypatch, name):
    def fail(*_args, **_keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ghostlayers.checkpoint.{name}", fail)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.txt").write_text("mine")
    for out, force in (("new", False), ("old", True)):
        before = listing(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            prune_folder(dense, tmp_path / out, force=force)
        assert listing(tmp_path) == before


def test_force_replaces_the_whole_folder(dense, tmp_path):
    prune_folder(dense, tmp_path / "out", "ghost")
    with pytest.raises(gl.CheckpointError, match="--force"):
        prune_folder(dense, tmp_path / "out")
    prune_folder(dense, tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "modeling_ghostlayers.py").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_failed_replacement_puts_the_old_folder_back(dense, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    rename = Path.rename

    def fail(self, target):
        if "incomplete" in self.name:
            raise OSError("disk trouble")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(gl.CheckpointError, match="disk trouble"):
        prune_folder(dense, tmp_path / "out", force=True)
    assert set(listing(tmp_path)) == {"out", "out/mine.txt"}


def test_the_source_is_never_replaced(dense, tmp_path):
    folder = copy_of(dense, tmp_path / "dense")
    before = listing(tmp_path)
    with pytest.raises(gl.CheckpointError, match="holds the model"):
        prune_folder(folder, folder, force=True)
    assert listing(tmp_path) == before


def test_too_small_a_disk(dense, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(gl.CheckpointError, match="free"):
        prune_folder(dense, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Loading.


@pytest.fixture(scope="module")
def recovered(dense, tmp_path_factory):
    out = tmp_path_factory.mktemp("recovered") / "out"
    return out, prune_folder(dense, out, "ghost")


def test_load_pruned(recovered, dense, tmp_path):
    folder, result = recovered
    checkpoint = gl.load_pruned(folder)
    assert torch.equal(logits(checkpoint.model, IDS), logits(result.model, IDS))
    assert checkpoint.record["removed"] == [3, 4, 6] and not checkpoint.model.training
    assert checkpoint.tokenizer("abc").input_ids == tiny_tokenizer()("abc").input_ids
    with pytest.raises(gl.CheckpointError, match=r"ghostlayers\.json"):
        gl.load_pruned(dense)


OPERATOR, WEIGHT = "model.layers.3.ghost_input.map.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", [OPERATOR, WEIGHT])
@pytest.mark.parametrize("change", ["missing", "shape", "renamed"])
def test_load_pruned_refuses_wrong_tensors(recovered, tmp_path, name, change):
    folder = copy_of(recovered[0], tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if change != "missing":
        wrong = name if change == "shape" else name.replace("weight", "wait")
        tensors[wrong] = tensor[:, :-1].contiguous() if change == "shape" else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(gl.CheckpointError, match=name.replace(".", r"\.")):
        gl.load_pruned(folder)


def in_a_process_without_the_package(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    block = "import sys; sys.modules['ghostlayers'] = None\n"  # importing it raises
    return subprocess.run(
        [sys.executable, "-c", block + code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )


def test_without_the_package(dense, recovered, tmp_path):
    """CASES 20, 22: a plain output loads; the stock class refuses one with operators."""
    result = prune_folder(dense, tmp_path / "plain")
    torch.save(IDS, tmp_path / "ids.pt")
    code = (
        "import torch\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM\n"
        "model, info = AutoModelForCausalLM.from_pretrained('plain', output_loading_info=True)\n"
        "assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))\n"
        "assert type(model) is LlamaForCausalLM and model.config.num_hidden_layers == 5\n"
        "with torch.no_grad():\n"
        "    torch.save(model(input_ids=torch.load('ids.pt'), use_cache=False).logits, 'out.pt')\n"
        "refused = 0\n"
        "for cls in (LlamaForCausalLM, AutoModelForCausalLM):\n"
        "    try:\n"
        f"        cls.from_pretrained({str(recovered[0])!r})\n"
        "    except Exception as error:\n"
        "        refused += 1\n"
        "assert refused == 2, refused\n"
    )
    done = in_a_process_without_the_package(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "out.pt"), logits(result.model, IDS))


def test_depth_of_a_result(recovered):
    _, result = recovered
    assert len(decoder_layers(result.model)) == 5
    assert isinstance(result.model, type(tiny_model()))  # CASES 37
