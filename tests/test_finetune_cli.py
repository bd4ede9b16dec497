"""`ghostlayers finetune` on tiny checkpoints: what it writes, keeps, refuses and goes on from."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ghostlayers as gl
from ghostlayers import finetune_command
from ghostlayers.training import Training
from oracles import logits, random_ids, reload
from tiny_checkpoints import listing, save_tiny, tiny_tokenizer

SHORT = ["--num-windows", 8, "--window", 24]
FAST = ["--steps", 6, "--eval-every", 3, "--accumulation", 2, "--learning-rate", 1e-2, *SHORT]
OPERATOR = "model.layers.3.ghost_input.map.weight"


@pytest.fixture(scope="module")
def made(work, tmp_path_factory):
    """The tiny model pruned, with an operator (ghost, bfloat16: half) and without (stock)."""
    from ghostlayers.cli import main

    folder = tmp_path_factory.mktemp("tune")
    text = ["--calibration", work / "t.txt", *SHORT, "--layers", "3-4"]
    for name, more in (
        ("ghost", ["--recover", "ghost", "--ridge", 0.1]),
        ("half", ["--recover", "ghost", "--ridge", 0.1, "--dtype", "bfloat16"]),
        ("stock", ["--recover", "none"]),
    ):
        args = ["prune", work / "m", "-o", folder / name, *text, *more]
        assert main([str(arg) for arg in args]) == 0
    for name in ("ghost", "half"):  # leave something to win: the map is off by one of rank one
        tensors = load_file(folder / name / "model.safetensors")
        left, right = torch.randn(2, 64, generator=torch.Generator().manual_seed(5))
        tensors[OPERATOR] += 0.3 * torch.outer(left, right).to(tensors[OPERATOR].dtype)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def tune(work, made, run):
    def call(name, out, *more):
        flags = ["--teacher", work / "m", "-o", out, "--calibration", work / "t.txt", *FAST]
        return run("finetune", made / name, *flags, *more)

    return call


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def differing(one, two) -> set[str]:
    assert one.keys() == two.keys()
    assert all(one[name].dtype == two[name].dtype for name in one)
    return {name for name in one if not torch.equal(one[name], two[name])}


@pytest.mark.parametrize("name", ["ghost", "half"])
def test_writes_a_complete_checkpoint(made, tune, run, tmp_path, name):
    out = tmp_path / "new" / "tuned"
    status, printed, err = tune(name, out, "--json", tmp_path / "f.json")
    assert status == 0, err
    assert [path.name for path in out.parent.iterdir()] == ["tuned"]  # no work folder stays
    assert differing(weights(made / name), weights(out)) == {OPERATOR}
    assert {path.name for path in out.iterdir()} == {path.name for path in (made / name).iterdir()}
    assert (out / "config.json").read_bytes() == (made / name / "config.json").read_bytes()

    record, before = (json.loads((f / "ghostlayers.json").read_text()) for f in (out, made / name))
    found = record.pop("finetune")
    assert record == before and json.loads((tmp_path / "f.json").read_text())["finetune"] == found
    assert found["held_out_kl_after"] < found["held_out_kl_before"]
    assert [row["step"] for row in found["history"]] == [0, 3, 6]
    assert found["config"]["steps"] == 6 and found["versions"]["accelerate"]
    assert found["teacher_model"].endswith("m") and found["calibration"]["windows"] == 8
    assert found["held_out_windows"] == [3, 7] and found["trained_parameters"] == 64 * 64
    for word in ("train KL", "held-out KL", "perplexity", "x 50 x 6 bytes = 0.1 MB"):
        assert word in printed
    assert f"{found['held_out_perplexity_after']:.4f}" in printed and "step 3," in err

    loaded = gl.load_pruned(out)
    ids = random_ids()
    assert torch.equal(logits(loaded.model, ids), logits(reload(out), ids))
    assert not torch.equal(logits(loaded.model, ids), logits(reload(made / name), ids))
    assert "then distilled" in (out / "README.md").read_text()
    status, printed, _ = run("info", out)
    assert status == 0 and "operators, " in printed and "held-out KL" in printed


def test_lora_on_a_stock_checkpoint_stays_stock(made, tune, tmp_path):
    out = tmp_path / "tuned"
    status, _, err = tune("stock", out, "--train", "lora", "--learning-rate", 1e-3)
    assert status == 0, err
    found = differing(weights(made / "stock"), weights(out))
    assert len(found) == 6 * 7 and all(name.endswith("_proj.weight") for name in found)
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert {path.name for path in out.iterdir()} == {p.name for p in (made / "stock").iterdir()}
    assert "merged" in (out / "README.md").read_text()


def test_lora_on_a_ghost_checkpoint_and_a_second_distillation(made, tune, run, work, tmp_path):
    assert tune("ghost", tmp_path / "one", "--train", "lora")[0] == 0
    found = differing(weights(made / "ghost"), weights(tmp_path / "one"))
    assert OPERATOR in found and len(found) == 6 * 7 + 1
    flags = ["--teacher", work / "m", "--calibration", work / "t.txt", *FAST]
    assert run("finetune", tmp_path / "one", "-o", tmp_path / "two", *flags)[0] == 0
    record = json.loads((tmp_path / "two" / "ghostlayers.json").read_text())
    first = json.loads((tmp_path / "one" / "ghostlayers.json").read_text())
    assert record["finetune"]["before"] == first["finetune"]
    assert record["source"] == first["source"]


def test_the_same_command_goes_on(made, tune, tmp_path, monkeypatch):
    assert tune("ghost", tmp_path / "whole")[0] == 0
    original, steps = Training.run, []

    def killed(self, accelerator):
        def hook(step):
            if step == 5:
                raise KeyboardInterrupt

        self.on_step = hook
        return original(self, accelerator)

    def counted(self, accelerator):
        self.on_step = steps.append
        return original(self, accelerator)

    monkeypatch.setattr(Training, "run", killed)
    assert tune("ghost", tmp_path / "out")[0] == 130
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.finetune").is_dir()
    monkeypatch.setattr(Training, "run", counted)
    assert tune("ghost", tmp_path / "out")[0] == 0
    assert steps == [4, 5, 6] and not (tmp_path / ".out.finetune").exists()
    assert not differing(weights(tmp_path / "whole"), weights(tmp_path / "out"))


def test_cache_stays_where_it_was_asked_for(made, tune, refuse, work, tmp_path):
    assert tune("ghost", tmp_path / "a", "--keep-cache")[0] == 0
    kept = tmp_path / ".a.finetune" / "teacher"
    assert {path.name for path in kept.iterdir()} == {"teacher.json", "windows-00000.safetensors"}
    assert [path.name for path in kept.parent.iterdir()] == ["teacher"]
    before = listing(kept)
    assert tune("ghost", tmp_path / "b", "--cache", kept)[0] == 0
    assert listing(kept) == before and not (tmp_path / ".b.finetune").exists()
    status = tune("ghost", tmp_path / "c", "--cache", kept, "--top-k", 9)
    assert status[0] == 2 and "stale (top_k differ)" in status[2]
    assert listing(kept) == before and not (tmp_path / "c").exists()


def test_nothing_better_gives_the_same_weights_and_says_so(made, tune, tmp_path):
    status, _, err = tune("ghost", tmp_path / "out", "--learning-rate", 1)
    assert status == 0 and "nothing was better than the start" in err
    assert not differing(weights(made / "ghost"), weights(tmp_path / "out"))


def test_warns_of_a_teacher_of_another_depth(made, run, work, tmp_path):
    save_tiny(tmp_path / "deep", num_layers=9)
    flags = ["--calibration", work / "t.txt", *FAST]
    args = ("--teacher", tmp_path / "deep", "-o", tmp_path / "out")
    status, _, err = run("finetune", made / "ghost", *args, *flags)
    assert status == 0 and "has 9 decoder layers, the dense model of the checkpoint had 8" in err


def test_sampled_text_is_the_teachers(made, run, work, tmp_path):
    args = ("--teacher", work / "m", "-o", tmp_path / "out", *FAST, "--seed", 3)
    assert run("finetune", made / "ghost", *args)[0] == 0
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())["finetune"]
    assert (record["calibration"]["source"], record["calibration"]["sampler_seed"]) == ("self", 3)


def test_from_python_without_the_source(made, work, tmp_path):
    checkpoint, ids = gl.load_pruned(made / "ghost"), random_ids(8, 24, seed=2)
    settings = {"steps": 4, "eval_every": 2, "learning_rate": 1e-2}
    result = gl.finetune(checkpoint.model, reload(work / "m"), ids, **settings)
    assert result.changed == {OPERATOR} and result.model is not checkpoint.model
    out = gl.save_finetuned(result, checkpoint, tmp_path / "out", teacher="dense")
    assert differing(weights(made / "ghost"), weights(out)) == {OPERATOR}
    loaded = gl.load_pruned(out)
    assert torch.equal(logits(loaded.model, ids), logits(result.model, ids))
    assert loaded.record["finetune"]["teacher_model"] == "dense"
    assert loaded.record["source"] == checkpoint.record["source"]
    with pytest.raises(gl.CheckpointError, match="exists"):
        gl.save_finetuned(result, checkpoint, out)


# What is refused.


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("stock", [], "Use `train` lora (--train lora)"),
        ("ghost", ["--train", "operator"], "'operator'. Did you mean"),
        ("ghost", ["--top-k", "0"], "`top_k` is 0"),
        ("ghost", ["--window", "9999"], "`window` is 9999"),
        ("ghost", ["--teacher", "./nowhere"], "'./nowhere' does not exist"),
        ("ghost", ["--calibration", "./nowhere.txt"], "nowhere.txt"),
        ("nowhere", [], "is no folder"),
    ],
)
def test_one_line_and_nothing_written(made, refuse, work, tmp_path, path, changes, message):
    flags = ["--teacher", work / "m", "--calibration", work / "t.txt", *FAST]
    out = ("-o", tmp_path / "out")
    assert message in refuse(tmp_path, "finetune", made / path, *out, *flags, *changes)


def test_existing_output_and_own_source_are_refused(made, refuse, work, tmp_path):
    shutil.copytree(made / "ghost", tmp_path / "ghost")
    args = ("finetune", tmp_path / "ghost", "--teacher", work / "m", "-o", tmp_path / "ghost")
    assert "exists" in refuse(tmp_path, *args, *FAST)
    assert "would delete" in refuse(tmp_path, *args, *FAST, "--force")
    assert "was not written by" in refuse(
        tmp_path, "finetune", work / "m", "--teacher", work / "m", "-o", tmp_path / "x", *FAST
    )


def test_other_vocabularies_are_refused(made, refuse, work, tmp_path):
    save_tiny(tmp_path / "wide", vocab_size=300)
    tokenizer = tiny_tokenizer()
    shutil.copytree(work / "m", tmp_path / "words")
    tokenizer.add_tokens(["layer"])
    tokenizer.save_pretrained(tmp_path / "words")
    for name, message in (("wide", "has 300 tokens, the model's 256"), ("words", "1 entries")):
        args = ("--teacher", tmp_path / name, "-o", tmp_path / "out", *FAST)
        assert message in refuse(tmp_path, "finetune", made / "ghost", *args)


def test_missing_peft_is_one_line(made, refuse, work, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    args = ("--teacher", work / "m", "-o", tmp_path / "out", "--train", "lora", *FAST)
    assert "ghostlayers[finetune]" in refuse(tmp_path, "finetune", made / "ghost", *args)


def test_finetune_command_imports_no_torch():
    assert "torch" not in vars(finetune_command)


class TestTeacherOnDisk:
    def test_same_checkpoint(self, tune, tmp_path):
        for name, flags in (("memory", ()), ("disk", ("--device-map", '{"": "disk"}'))):
            status, _, err = tune("ghost", tmp_path / name, *flags)
            assert status == 0, err
        assert not differing(weights(tmp_path / "memory"), weights(tmp_path / "disk"))

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (("--device-map", "nowhere"), "`device_map` 'nowhere'"),
            (("--max-memory", "cpu=1GB"), "without `device_map`"),
        ],
    )
    def test_faults_come_first(self, tune, tmp_path, flags, said):
        status, _, err = tune("ghost", tmp_path / "no", *flags)
        assert status == 2 and said in err and len(err.splitlines()) == 1
        assert not list(tmp_path.iterdir())


def test_damaged_cache_is_named(tune, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "teacher.json").write_text("{")
    status, _, err = tune("ghost", tmp_path / "no", "--cache", tmp_path / "cache")
    assert status == 2 and "teacher.json is damaged" in err and len(err.splitlines()) == 1
