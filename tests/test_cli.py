"""Every verb of the command line on a tiny checkpoint, and what a user can do wrong."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

import ghostlayers as gl
from ghostlayers.config import PruneConfig
from oracles import reload
from tiny_checkpoints import listing, text_of, tiny_tokenizer

SHORT = ["--num-windows", "4", "--window", "32"]


def text_flags(work, *more) -> list:
    return ["--calibration", work / "t.txt", *SHORT, *more]


# What the verbs do.


def test_analyze(work, run, tmp_path):
    status, out, err = run("analyze", work / "m", *text_flags(work), "--json", tmp_path / "a.json")
    assert (status, err) == (0, "")
    found = json.loads((tmp_path / "a.json").read_text())
    similarity = torch.tensor(found["similarity"])
    assert similarity.shape == (9, 9) and torch.equal(similarity.diagonal(), torch.ones(9))
    upper = similarity[:8, :8][tuple(torch.triu_indices(8, 8, offset=1))]
    assert found["rls"] == pytest.approx(-math.log2(float(upper.double().mean())), abs=1e-5)
    assert found["num_clusters"] == (2 if found["rls"] >= 1 else 3 if found["rls"] >= 0.7 else 4)
    expected = [1 - float(similarity[layer, layer + 1]) for layer in range(8)]
    assert found["block_influence"] == pytest.approx(expected, abs=1e-6)
    assert set(found["selections"]) == {"lorp", "shortgpt", "streamline"}
    for by_budget in found["selections"].values():
        assert list(by_budget) == ["1", "2", "3", "4", "5", "6"]
        for budget, layers in by_budget.items():
            assert len(set(layers)) == int(budget) and set(layers) <= set(range(1, 7))
    record = found["calibration"]
    assert (record["source"], record["windows"], record["window"], record["tokens"]) == (
        str(work / "t.txt"), 4, 32, 128,
    )  # fmt: skip
    assert record["bos_per_window"] is False and len(record["ids_sha256"]) == 64
    for word in ("RLS", "localized", "intermediate", "distributed"):
        assert word in out or word != "RLS"
    assert found["locality"] in out and "streamline" in out


@pytest.mark.parametrize(
    "recover", ["ghost", "ghost-robust", "linearpatch-rotate", "replaceme-lstsq", "none"]
)
def test_prune_info_eval(work, run, tmp_path, recover):
    out = tmp_path / "made" / "here"  # parents are made
    flags = text_flags(work, "--num-remove", 2, "--select", "streamline", "--recover", recover)
    status, printed, _ = run("prune", work / "m", "-o", out, *flags, "--json", tmp_path / "p.json")
    assert status == 0 and "from_pretrained" in printed
    assert [path.name for path in out.parent.iterdir()] == ["here"]  # no temporary folder stays
    record = json.loads((out / "ghostlayers.json").read_text())
    assert json.loads((tmp_path / "p.json").read_text()) == {"out": str(out), **record}

    status, printed, err = run("info", out, "--json", tmp_path / "i.json")
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "i.json").read_text()) == record
    first = record["removed"][0]
    assert f"{first}-{first + 1} of 8 layers" in printed and record["calibration"]["source"]
    assert ("error before" in printed) == (recover != "none")

    flags = ["--perplexity", work / "t.txt", *SHORT, "--json", tmp_path / "e.json"]
    status, printed, err = run("eval", work / "m", out, *flags)
    assert (status, err) == (0, "")
    dense, pruned = json.loads((tmp_path / "e.json").read_text())["results"]
    assert dense["path"] == str(work / "m") and pruned["path"] == str(out)
    assert dense["ratio"] == 1.0
    assert pruned["ratio"] == pytest.approx(pruned["perplexity"] / dense["perplexity"])
    for result in (dense, pruned):
        assert (result["tokens"], result["window"], result["bos_per_window"]) == (4 * 31, 32, False)
        assert result["ids_sha256"] == dense["ids_sha256"] and result["dtype"] == "float32"
    assert str(out) in printed and f"{pruned['perplexity']:.4f}" in printed


def test_eval_measures_cross_entropy(work, run, tmp_path):
    flags = ["--perplexity", work / "t.txt", "--window", 20, "--json", tmp_path / "e.json"]
    assert run("eval", work / "bos", *flags, "--batch-size", 7)[0] == 0
    (result,) = json.loads((tmp_path / "e.json").read_text())["results"]
    text = (work / "t.txt").read_text()
    ids = tiny_tokenizer()(text, add_special_tokens=False).input_ids
    count = len(ids) // 19
    windows = torch.tensor(ids[: count * 19]).reshape(count, 19)
    windows = torch.cat([torch.ones(count, 1, dtype=torch.long), windows], dim=1)
    with torch.no_grad():
        model = reload(work / "bos")
        losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in windows[:40]]
    assert result["bos_per_window"] is True and result["tokens"] == count * 19
    assert result["window_losses"][:40] == pytest.approx(losses, abs=1e-4)
    assert math.log(result["perplexity"]) == pytest.approx(
        sum(result["window_losses"]) / count, rel=1e-9
    )


def test_two_texts_have_two_hashes(work, run, tmp_path):
    (tmp_path / "u.txt").write_text(text_of(2000, seed=1))
    hashes = set()
    for text in (work / "t.txt", tmp_path / "u.txt"):
        run("eval", work / "m", "--perplexity", text, *SHORT, "--json", tmp_path / "e.json")
        hashes.add(json.loads((tmp_path / "e.json").read_text())["results"][0]["ids_sha256"])
    assert len(hashes) == 2


def test_eval_warns_when_token_ids_differ(work, run):
    status, _, err = run("eval", work / "m", work / "bos", "--perplexity", work / "t.txt", *SHORT)
    assert status == 0 and "not comparable" in err


def test_default_calibration_is_sampled_and_repeatable(work, run, tmp_path):
    weights = []
    for name in "ab":
        flags = ["--num-remove", 1, "--num-windows", 2, "--window", 16, "--seed", 3]
        assert run("prune", work / "m", "-o", tmp_path / name, *flags)[0] == 0
        record = json.loads((tmp_path / name / "ghostlayers.json").read_text())
        assert (record["calibration"]["source"], record["seed"]) == ("self", 3)
        assert record["calibration"]["tokens"] == 32
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]  # CASES 46


def test_json_on_stdout_is_nothing_else(work, run):
    status, out, err = run("analyze", work / "m", *text_flags(work), "--json", "-")
    assert status == 0 and json.loads(out)["num_clusters"] and "block influence" in err


def test_debug_shows_the_traceback(work, run):
    with pytest.raises(gl.PlanError, match="layer 9"):
        run("prune", work / "m", "-o", work / "x", "--layers", "9", "--debug")


def test_fewer_windows_than_asked_is_a_warning(work, run, tmp_path):
    (tmp_path / "t.txt").write_text("x" * 100)
    flags = ["--calibration", tmp_path / "t.txt", "--num-windows", 9, "--window", 32]
    status, out, err = run("analyze", work / "m", *flags)
    assert status == 0 and "9 windows of 32 tokens asked for" in err and "using 3" in err
    assert "3 windows of 32 tokens" in out


def test_defaults(work, run, tmp_path):
    flags = ["--num-remove", 2, "--dry-run", "--json", tmp_path / "d.json"]
    assert run("prune", work / "m", "-o", tmp_path / "x", *flags)[0] == 0
    found = json.loads((tmp_path / "d.json").read_text())
    config = found["config"]
    assert (config["select"], config["recover"], config["num_windows"]) == (
        "lorp",
        "ghost-robust",
        128,
    )
    assert config == PruneConfig(num_remove=2).to_dict()
    assert found["window"] == 512  # the model's maximum is below 2048


@pytest.mark.parametrize("flags", [["--num-remove", "2"], ["--layers", "1,3-4"]])
def test_dry_run_writes_nothing_and_opens_no_weights(work, run, tmp_path, flags):
    folder = shutil.copytree(work / "m", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    before = listing(tmp_path)
    status, out, err = run("prune", folder, "-o", tmp_path / "x", *flags, "--dry-run")
    assert (status, err) == (0, "") and "dry run" in out
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("recover", "flags", "expected"),
    [
        ("none", ["--sparsity", "0.3"], "3"),  # 2.4 of 8 equal layers
        ("none", ["--target-params", "197k"], "4"),
        ("ghost", ["--target-params", "186k"], "4 to 5, by which"),  # 4 in one or two cuts
        ("none", ["--target-bytes", "600KB"], "known once the weight files are opened"),
        ("none", ["--max-ppl-ratio", "1.2"], "known once repaired models are measured"),
    ],
)
def test_dry_run_says_how_many_layers_go(work, run, tmp_path, recover, flags, expected):
    command = ("prune", work / "m", "-o", tmp_path / "x", *flags, "--recover", recover)
    status, out, err = run(*command, "--dry-run", "--json", tmp_path / "d.json")
    assert (status, err) == (0, "")
    line = next(line for line in out.splitlines() if line.startswith("layers that go"))
    assert line.split("layers that go")[1].strip().startswith(expected)
    found = json.loads((tmp_path / "d.json").read_text())
    counts = {"3": [3, 3], "4": [4, 4], "4 to 5, by which": [4, 5]}.get(expected)
    assert found["num_remove_range"] == counts
    assert found["num_remove"] == (counts[0] if counts and counts[0] == counts[1] else None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--select", "shortgtp", "--num-remove", "1"], "'shortgpt'"),
        (["--layers", "6-9"], "layer 9"),
        (["--num-remove", "7"], "only 6 of the 8"),
    ],
)
def test_wrong_plans_are_refused_from_the_config_alone(work, refuse, tmp_path, flags, message):
    (tmp_path / "m").mkdir()
    shutil.copy(work / "m" / "config.json", tmp_path / "m")
    assert message in refuse(tmp_path, "prune", tmp_path / "m", "-o", tmp_path / "x", *flags)


@pytest.mark.parametrize("verb", ["analyze", "prune", "finetune", "eval", "info", None])
def test_help_imports_nothing_heavy(verb):
    _without_torch([*([verb] if verb else []), "--help"], "usage: ghostlayers")


def test_misspelt_selector_is_refused_before_torch_is_imported():
    flags = ["prune", "any/model", "-o", "x", "--num-remove", "1", "--select", "shortgtp"]
    _without_torch(flags, "'shortgpt'")


def _without_torch(args: list[str], expected: str) -> None:
    code = (
        "import sys\nfrom ghostlayers.cli import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout + done.stderr


def test_a_reader_that_is_gone_is_no_error(work):
    flags = ["prune", work / "m", "-o", work / "x", "--num-remove", 1, "--dry-run"]
    command = [sys.executable, "-m", "ghostlayers", *map(str, flags)]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert done.stderr.read() == b"" and done.wait() == 141


# The same from Python.


def test_models_and_tokenizers_by_path(work):
    tokenizer = gl.load_tokenizer(work / "m")
    result = gl.prune(
        gl.load_model(str(work / "m"), dtype="bfloat16"),
        tokenizer,
        layers=[2, 5, 3],
        recover="ghost",
        calibration=str(work / "t.txt"),
        num_windows=4,
        window=32,
    )
    assert result.model.dtype == torch.bfloat16
    assert repr(result) == (
        "PruneResult(GhostLlamaForCausalLM without layers 2-3,5 of 8: "
        "ghost in place of 2-3, ghost in place of 5)"
    )
    with pytest.raises(gl.CheckpointError, match="does not exist"):
        gl.load_model("./no-such-model")


def test_misspelt_settings_are_named(work):
    model = gl.load_model(work / "m")
    for call in (gl.prune, gl.analyze):
        with pytest.raises(gl.GhostlayersError, match="'calibrtion'. Did you mean 'calibration'"):
            call(model, calibrtion="c4")
    with pytest.raises(gl.GhostlayersError, match="Unknown setting 'step'. Did you mean 'steps'"):
        gl.finetune(model, model, torch.zeros(2, 8, dtype=torch.long), step=1)
