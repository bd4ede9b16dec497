"""What a user can do wrong: status 2, one clear line, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tiny_checkpoints import listing, tiny_tokenizer

SHORT = ["--num-windows", "4", "--window", "32"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> Path:
    """Texts that cannot be used."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\n ")
    (folder / "short.txt").write_text("short")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 9)
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 9)
    (folder / "binary.parquet").write_bytes(b"nothing" * 99)
    (folder / "empty.jsonl").write_text("\n")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{oops\n')
    (folder / "number.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (folder / "table.csv").write_text("text\na\n")
    (folder / "folder.txt").mkdir()
    return folder


TEXTS = {
    "missing.txt": "does not exist", "empty.txt": "is empty", "blank.txt": "is empty",
    "short.txt": "5 tokens, fewer than one window of 32", "binary.txt": "not UTF-8",
    "binary.jsonl": "line 1", "binary.parquet": "no parquet file", "empty.jsonl": "is empty",
    "broken.jsonl": "line 2", "number.jsonl": "line 2", "table.csv": ".csv",
    "folder.txt": "does not exist",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("verb", ["prune", "eval"])
def test_text_files(work, bad, refuse, name, verb):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if verb == "prune":
        flags = ["-o", work / "x", "--num-remove", 1, "--calibration", bad / name]
    else:
        flags = ["--perplexity", bad / name]
    err = refuse(work, verb, work / "m", *flags, *SHORT)
    assert TEXTS[name] in err and name in err


@pytest.mark.parametrize("column", ["body", "text"])
def test_parquet_without_text_column(work, refuse, tmp_path, column):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({column: [1, 2]}), tmp_path / "t.parquet")
    err = refuse(tmp_path, "analyze", work / "m", "--calibration", tmp_path / "t.parquet", *SHORT)
    assert f"'{column}'" in err


@pytest.mark.parametrize("source", ["c4", "o/d:c:s:text"])
def test_datasets_without_network(work, refuse, source):
    err = refuse(work, "analyze", work / "m", "--calibration", source, *SHORT)
    assert "cannot be read" in err or "needs the datasets library" in err


@pytest.mark.parametrize("source", ["wikitext", "a/b/c", "a/b:c:d:e:f", "c4:en", "/", ""])
def test_unknown_sources(work, refuse, source):
    err = refuse(work, "analyze", work / "m", "--calibration", source, *SHORT)
    assert "wikitext2" in err and repr(source) in err


PLANS = {
    "none removed": (["--num-remove", "0"], "`num_remove` is 0"),
    "negative": (["--num-remove", "-1"], "`num_remove` is -1"),
    "protected": (["--num-remove", "7"], "only 6 of the 8 layers"),
    "all": (["--num-remove", "8"], "`num_remove` is 8"),
    "more": (["--num-remove", "99"], "`num_remove` is 99"),
    "all, unprotected": (
        ["--num-remove", "8", "--protect-first", "0", "--protect-last", "0"],
        "Allowed: 1 to 7",
    ),
    "no number": (["--num-remove", "two"], "invalid int value: 'two'"),
    "fraction": (["--num-remove", "1.5"], "invalid int value"),
    "outside": (["--layers", "8"], "layer 8, outside"),
    "range outside": (["--layers", "6-9"], "layer 9, outside"),
    "reversed": (["--layers", "5-3"], "Write 3-5"),
    "every layer": (["--layers", "0-7"], "least one layer must stay"),
    "words": (["--layers", "last"], "'last'"),
    "empty": (["--layers", ""], "''"),
    "empty part": (["--layers", "1,,2"], "''"),
    "negative index": (["--layers=-3"], "'-3'"),
    "three parts": (["--layers", "1-2-3"], "'1-2-3'"),
    "both": (["--layers", "1", "--num-remove", "1"], "`num_remove` and `layers` are given"),
    "neither": ([], "none is given"),
    "selector": (["--num-remove", "1", "--select", "shortgtp"], "Did you mean 'shortgpt'"),
    "operator": (["--num-remove", "1", "--recover", "gost"], "Did you mean 'ghost'"),
    "ridge": (["--num-remove", "1", "--ridge", "-0.1"], "`ridge` is -0.1"),
    "ridge nan": (["--num-remove", "1", "--ridge", "nan"], "`ridge` is nan"),
    "ridge inf": (["--num-remove", "1", "--ridge", "inf"], "`ridge` is inf"),
    "window": (["--num-remove", "1", "--window", "513"], "the model allows 512"),
    "window 1": (["--num-remove", "1", "--window", "1"], "`window` is 1"),
    "windows": (["--num-remove", "1", "--num-windows", "0"], "`num_windows` is 0"),
    "batch": (["--num-remove", "1", "--batch-size", "0"], "`batch_size` is 0"),
    "clusters": (["--num-remove", "1", "--num-clusters", "0"], "`num_clusters` is 0"),
    "seed": (["--num-remove", "1", "--seed", "-1"], "`seed` is -1"),
    "large seed": (["--num-remove", "1", "--seed", str(2**32)], "`seed` is 4294967296"),
    "dtype": (["--num-remove", "1", "--dtype", "float8"], "float16"),
    "device": (["--num-remove", "1", "--device", "gpu"], "'gpu'"),
    "no such device": (["--num-remove", "1", "--device", "cuda:99"], "'cuda:99'"),
    "meta device": (["--num-remove", "1", "--device", "meta"], "'meta'"),
    "no such device here": (["--num-remove", "1", "--device", "cuda:99"], "Devices here: cpu"),
    "flag": (["--num-remove", "1", "--nonsense"], "--nonsense"),
    "flag, nearly": (["--num-remve", "1"], "--num-remve 1 (did you mean --num-remove?)"),
    "flag, nearly, with =": (["--num-remve=1"], "(did you mean --num-remove?)"),
    "json": (["--num-remove", "1", "--json", "no/such/folder.json"], "folder does not exist"),
    "json folder": (["--num-remove", "1", "--json", "/"], "is a folder"),
}


@pytest.mark.parametrize("name", PLANS)
def test_settings(work, refuse, name):
    flags, message = PLANS[name]
    assert message in refuse(work, "prune", work / "m", "-o", work / "x", *flags)


def test_several_faults_are_in_one_line(work, refuse):
    flags = ["--select", "lrp", "--ridge", "-1", "--num-windows", "0"]
    err = refuse(work, "prune", work / "m", "-o", work / "x", *flags)
    for part in ("none is given", "'lorp'", "`ridge`", "`num_windows`"):
        assert part in err


def edit_config(**changes):
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def edit_weights(change):
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def write(name: str, content: bytes | str | None):
    """Replace a file; a number keeps that many bytes of it, None deletes it."""

    def edit(folder: Path) -> None:
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


def cut(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def drop_layer(tensors) -> None:
    for name in [name for name in tensors if ".layers.7." in name]:
        del tensors[name]


def infinite(tensors) -> None:
    tensors["model.layers.3.mlp.down_proj.weight"][0, 0] = float("inf")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


MODELS = {
    "no config": (write("config.json", None), "config.json"),
    "config is no JSON": (write("config.json", "{nope"), "config"),
    "config is a list": (write("config.json", "[1]"), "config"),
    "config is empty": (write("config.json", "{}"), "config"),
    "unknown model type": (edit_config(model_type="nonesuch"), "nonesuch"),
    "depth is text": (edit_config(num_hidden_layers="8"), "num_hidden_layers"),
    "heads do not divide": (edit_config(num_attention_heads=7), "(7)"),
    "layer_types too short": (
        edit_config(layer_types=["full_attention"] * 3),
        "(8) must be equal to the number of",
    ),
    "config too deep": (edit_config(num_hidden_layers=10), "18 missing keys (model.layers.8."),
    "config too shallow": (edit_config(num_hidden_layers=6), "18 unexpected keys"),
    "config too narrow": (edit_config(intermediate_size=96), "mismatched keys"),
    "weights miss a layer": (edit_weights(drop_layer), "9 missing keys (model.layers.7."),
    "no weights": (write("model.safetensors", None), "model.safetensors"),
    "empty weights": (write("model.safetensors", b""), "cannot load"),
    "cut weights": (cut("model.safetensors", 5000), "cannot load"),
    "weights cut at the end": (cut("model.safetensors", 600_000), "cannot load"),
    "infinite weight": (
        edit_weights(infinite),
        "hidden state 4 (what leaves layer 3) is not finite in float32",
    ),
    "no tokenizer": (no_tokenizer, "has no tokenizer files (tokenizer.json, "),
    "cut tokenizer": (cut("tokenizer.json", 300), "tokenizer"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("calibration", ["self", "text"])
def test_damaged_models(work, refuse, tmp_path, name, calibration):
    change, message = MODELS[name]
    change(Path(shutil.copytree(work / "m", tmp_path / "m")))
    flags = ["--calibration", work / "t.txt" if calibration == "text" else "self", *SHORT]
    flags = ["prune", tmp_path / "m", "-o", tmp_path / "x", "--num-remove", 1, *flags]
    assert message in refuse(tmp_path, *flags)


@pytest.mark.parametrize("calibration", ["self", "text"])
def test_float16_overflow_names_layer_and_dtype(work, run, refuse, tmp_path, calibration):
    folder = Path(shutil.copytree(work / "m", tmp_path / "m"))
    edit_weights(lambda t: t["model.layers.5.mlp.down_proj.weight"].mul_(1e5))(folder)
    source = work / "t.txt" if calibration == "text" else "self"
    flags = ["prune", folder, "-o", tmp_path / "x", "--num-remove", 1, "--calibration", source]
    err = refuse(tmp_path, *flags, *SHORT, "--dtype", "float16")
    assert "what leaves layer 5" in err and "float16" in err and "bfloat16" in err
    assert run(*flags, *SHORT, "--dtype", "bfloat16")[0] == 0


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "owner/model", "model", "a b/c", "x.gguf", "a/b/c", ""]
)
def test_missing_models(work, refuse, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for verb, *flags in (["analyze"], ["prune", "-o", "x", "--num-remove", 1]):
        assert repr(name) in refuse(tmp_path, verb, name, *flags)
    flags = ["--perplexity", work / "t.txt"]
    assert repr(name) in refuse(tmp_path, "eval", work / "m", name, *flags)
    refuse(tmp_path, "info", name)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_encoders(work, refuse, tmp_path, kind):
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    small = {"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 256}
    if kind == "bert":
        config = BertConfig(hidden_size=32, num_hidden_layers=3, **small)
        model = BertForMaskedLM(config)
    else:
        t5 = T5Config(d_model=32, num_layers=3, num_heads=2, d_ff=64, vocab_size=256, d_kv=16)
        model = T5ForConditionalGeneration(t5)
    model.save_pretrained(tmp_path / kind)
    tiny_tokenizer().save_pretrained(tmp_path / kind)
    for verb, *flags in (
        ["analyze"],
        ["prune", "-o", tmp_path / "x", "--num-remove", 1],
        ["eval", "--perplexity", work / "t.txt"],
    ):
        err = refuse(tmp_path, verb, tmp_path / kind, *flags, *SHORT)
        assert f"'{kind}'" in err and "decoder-only" in err


def test_existing_output(work, run, refuse, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").write_text("keep me")
    flags = ["prune", work / "m", "-o", tmp_path / "x", "--layers", "3", "--recover", "none"]
    assert "--force" in refuse(tmp_path, *flags)
    assert "--force" in refuse(tmp_path, *flags, "--dry-run")
    assert run(*flags, "--force")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["x"] and not (tmp_path / "x" / "mine.txt").exists()
    (tmp_path / "file").write_text("mine")
    flags[3] = tmp_path / "file"
    assert "is a file" in refuse(tmp_path, *flags, "--force")
    flags[3] = tmp_path / "file" / "below"
    assert "cannot be written" in refuse(tmp_path, *flags)


def test_force_deletes_neither_the_model_nor_the_working_folder(
    work, refuse, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(work / "m", tmp_path / "deep" / "m"))
    flags = ["--layers", "3", "--recover", "none", "--force"]
    for out in (folder, folder.parent):
        assert "holds the model" in refuse(tmp_path, "prune", folder, "-o", out, *flags)
    monkeypatch.chdir(tmp_path)
    for out in (".", "..", tmp_path):
        assert "working directory" in refuse(tmp_path, "prune", work / "m", "-o", out, *flags)


def test_recovered_checkpoint_is_not_pruned_again(work, run, refuse, tmp_path):
    flags = ["--layers", "3", "--calibration", work / "t.txt", *SHORT]
    ghost = [*flags, "--recover", "ghost"]
    assert run("prune", work / "m", "-o", tmp_path / "a", *ghost)[0] == 0
    err = refuse(tmp_path, "prune", tmp_path / "a", "-o", tmp_path / "b", *flags)
    assert "has operators already" in err
    assert run("prune", work / "m", "-o", tmp_path / "c", *flags, "--recover", "none")[0] == 0
    assert run("prune", tmp_path / "c", "-o", tmp_path / "d", *flags)[0] == 0  # a stock model


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format_version": 99, "removed": []}'])
def test_damaged_record(work, refuse, tmp_path, content):
    folder = Path(shutil.copytree(work / "m", tmp_path / "m"))
    assert "ghostlayers.json" in refuse(tmp_path, "info", folder)
    (folder / "ghostlayers.json").write_text(content)
    assert "ghostlayers.json" in refuse(tmp_path, "info", folder)


def test_tokenizer_of_another_model(work, refuse, tmp_path):
    folder = Path(shutil.copytree(work / "m", tmp_path / "m"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([" model"])  # id 256, one more than the vocabulary holds
    tokenizer.save_pretrained(folder)
    err = refuse(tmp_path, "eval", folder, "--perplexity", work / "t.txt", *SHORT)
    assert "256" in err and "tokenizer" in err
    flags = ["--calibration", work / "t.txt", *SHORT]
    assert "tokenizer" in refuse(tmp_path, "analyze", folder, *flags)


def test_write_failure_leaves_nothing(work, refuse, tmp_path, monkeypatch):
    def full(*_args, **_keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ghostlayers.tensor_copy.save_file", full)
    before = listing(tmp_path)
    flags = ["prune", work / "m", "-o", tmp_path / "x", "--layers", "3", "--recover", "none"]
    assert "No space left" in refuse(tmp_path, *flags)
    assert listing(tmp_path) == before


def test_weights_of_a_hub_id_are_fetched_last(work, run, refuse, tmp_path, monkeypatch):
    """CASES 15: a wrong plan is refused before a large download."""
    asked = []
    folder = tmp_path / ("f" * 40)
    shutil.copytree(work / "m", folder, ignore=shutil.ignore_patterns("*.safetensors"))

    def snapshot_download(name, **keywords):
        asked.append(keywords)
        if "allow_patterns" not in keywords:
            shutil.copy(work / "m" / "model.safetensors", folder)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refuse(tmp_path, "prune", "owner/model", "-o", tmp_path / "x", "--layers", "9")
    assert len(asked) == 1 and "*.safetensors" not in asked[0]["allow_patterns"]
    flags = ["--layers", "3", "--recover", "none"]
    assert run("prune", "owner/model", "-o", tmp_path / "x", *flags)[0] == 0
    assert len(asked) == 3 and "*.bin" in asked[2]["ignore_patterns"]
    assert asked[2]["revision"] == "f" * 40
    record = json.loads((tmp_path / "x" / "ghostlayers.json").read_text())
    assert record["source"] == {"model": "owner/model", "gguf": None, "revision": "f" * 40}
    assert "base_model: owner/model" in (tmp_path / "x" / "README.md").read_text()


@pytest.mark.parametrize("verb", ["prune", "compare", "analyze", "export", "report"])
def test_name_that_is_too_long(work, refuse, verb):
    name = work / ("x" * 300)
    calibration = ("--num-remove", 1, "--calibration", work / "t.txt")
    flags = {
        "prune": (work / "m", "-o", name, *calibration, *SHORT),
        "compare": (work / "m", "-o", name, *calibration, "--perplexity", work / "t.txt"),
        "analyze": (work / "m", "--save", f"{name}.safetensors", "--calibration", work / "t.txt"),
        "export": (name, "-o", work / "x.gguf"),
        "report": (name, "-o", work / "x.html"),
    }
    assert "File name too long" in refuse(work, verb, *flags[verb])


def test_interrupt_is_no_traceback(work, run, monkeypatch):
    def stop(*_args, **_keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("ghostlayers.loading.load_tokenizer", stop)
    status, _, err = run("eval", work / "m", "--perplexity", work / "t.txt")
    assert (status, err) == (130, "ghostlayers: interrupted\n")
