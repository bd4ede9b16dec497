"""Scores that are used again: the same result without a first sweep, or a clear refusal."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ghostlayers as gl
from ghostlayers import pipeline, scores_file, selection
from ghostlayers.fingerprint import fingerprint
from ghostlayers.scores_file import METADATA_KEY
from oracles import random_ids, tiny_model
from test_robust import model_with_sinks
from tiny_checkpoints import listing, save_tiny, text_of

SHORT = ["--num-windows", "8", "--window", "32"]
WINDOWS = random_ids(8, 64, seed=2)
WINDOWS[WINDOWS == 5] = 6  # the massive token of `model_with_sinks`
WINDOWS[:, 0] = 5


def no_sweep(*_args, **_keywords):
    raise AssertionError("a first sweep was run")


@pytest.fixture(scope="module")
def saved(work, tmp_path_factory):
    """Scores of the tiny model on a text, written by the command line."""
    from ghostlayers.cli import main

    path = tmp_path_factory.mktemp("scores") / "s.safetensors"
    flags = ["--calibration", work / "t.txt", *SHORT, "--save", path]
    assert main([str(part) for part in ("analyze", work / "m", *flags)]) == 0
    return path


@pytest.fixture(scope="module")
def measured():
    """A model with massive tokens, and its scores."""
    model = model_with_sinks()
    return model, gl.analyze(model, windows=WINDOWS, batch_size=4, progress=False)


def edited(path, target, change):
    """Write a copy of a file of scores with another header or other tensors."""
    with safe_open(str(path), framework="pt") as handle:
        header = json.loads(handle.metadata()[METADATA_KEY])
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, target, metadata={METADATA_KEY: json.dumps(header)})
    return target


# --- what is kept


def test_round_trip(measured, tmp_path):
    model, analysis = measured
    path = analysis.save(tmp_path / "s.safetensors")
    scores = gl.load_scores(path)
    assert np.array_equal(scores.measured.similarity.matrix, analysis.similarity.matrix)
    assert scores.measured.similarity.num_tokens == WINDOWS.numel()
    expected = gl.find_massive_tokens(model, [WINDOWS], progress=False)
    assert torch.equal(scores.measured.massive, expected) and expected.any()
    assert torch.equal(scores.windows.ids, WINDOWS)
    assert scores.windows.record() == analysis.windows.record()
    assert scores.dtype == "float32" and scores.settings["batch_size"] == 4
    assert scores.model == fingerprint(model)
    before, after = analysis.recoverability, scores.recoverability
    for name in ("error_before", "error_after"):
        assert np.array_equal(getattr(before, name), getattr(after, name), equal_nan=True)
    assert (before.num_tokens, before.held_out_tokens) == (after.num_tokens, after.held_out_tokens)
    assert before.ridge == after.ridge
    assert [item.name for item in tmp_path.iterdir()] == ["s.safetensors"]


@pytest.mark.parametrize(
    ("recover", "settings"),
    [
        ("none", {"num_remove": 2}),
        ("ghost", {"num_remove": 3, "select": "shortgpt", "seed": 5}),
        ("ghost-robust", {"sparsity": 0.3, "select": "streamline"}),
        ("fold+ghost", {"layers": "2-3,5", "refine": 4}),
        ("ghost-robust", {"num_remove": 1, "select": "auto"}),
        ("ghost-robust", {"max_ppl_ratio": 1e6, "select": "streamline", "protect_first": 4}),
    ],
)
def test_the_result_is_bitwise_that_of_a_run_without_scores(
    measured, tmp_path, monkeypatch, recover, settings
):
    model, analysis = measured
    scores = gl.load_scores(analysis.save(tmp_path / "s.safetensors"))
    settings = {"recover": recover, "batch_size": 4, "progress": False, **settings}
    plain = gl.prune(model, windows=WINDOWS, **settings)
    for name in ("measure_similarity", "NormAccumulator"):
        monkeypatch.setattr(selection, name, no_sweep)
    monkeypatch.setattr("ghostlayers.recovery.find_massive_tokens", no_sweep)
    reused = gl.prune(model, scores=scores, **settings)
    assert reused.plan == plain.plan and reused.changed == plain.changed
    one, two = (result.model.state_dict() for result in (plain, reused))
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
    records = [dict(result.record) for result in (plain, reused)]
    assert records[0].pop("scores") is None
    assert records[1].pop("scores")["model"] == fingerprint(model)
    assert json.dumps(records[0], default=str) == json.dumps(records[1], default=str)


def test_command_line_gives_the_same_files(work, saved, run, tmp_path, monkeypatch):
    flags = ["--num-remove", 2, "--recover", "ghost-robust"]
    text = ["--calibration", work / "t.txt", *SHORT]
    assert run("prune", work / "m", "-o", tmp_path / "a", *flags, *text)[0] == 0
    monkeypatch.setattr(selection, "measure_similarity", no_sweep)
    for name, more in (("b", []), ("c", text), ("d", ["--num-windows", 8])):
        out = tmp_path / name
        status, _, err = run("prune", work / "m", "-o", out, *flags, *more, "--scores", saved)
        assert status == 0, err
        one, two = listing(tmp_path / "a"), listing(out)
        records = [json.loads(files.pop("ghostlayers.json")) for files in (one, two)]
        assert one == two
        assert records[0].pop("scores") is None and records[1].pop("scores")["dtype"] == "float32"
        assert records[0] == records[1]


def test_sampled_windows_are_not_sampled_again(work, run, tmp_path, monkeypatch):
    sampled = ["--num-windows", 4, "--window", 16, "--seed", 3]
    scores = tmp_path / "s.safetensors"
    status, out, _ = run("analyze", work / "m", *sampled, "--save", scores)
    assert status == 0 and out.endswith(f"scores written to {scores}\n")
    flags = ["prune", work / "m", "--num-remove", 1]
    assert run(*flags, "-o", tmp_path / "a", *sampled)[0] == 0
    monkeypatch.setattr(pipeline, "sampled_windows", no_sweep)
    for name, more in (("b", []), ("c", sampled), ("d", ["--calibration", "self"])):
        assert run(*flags, "-o", tmp_path / name, *more, "--scores", scores)[0] == 0
        files = [(tmp_path / x / "model.safetensors").read_bytes() for x in ("a", name)]
        assert files[0] == files[1]


def test_the_text_is_not_needed_again(work, run, tmp_path):
    shutil.copy(work / "t.txt", tmp_path / "t.txt")
    flags = ["--calibration", tmp_path / "t.txt", *SHORT, "--save", tmp_path / "s.safetensors"]
    assert run("analyze", work / "m", *flags)[0] == 0
    (tmp_path / "t.txt").unlink()
    flags = ["--sparsity", 0.3, "--scores", tmp_path / "s.safetensors"]
    assert run("prune", work / "m", "-o", tmp_path / "x", *flags)[0] == 0
    record = json.loads((tmp_path / "x" / "ghostlayers.json").read_text())
    assert record["calibration"]["source"] == str(tmp_path / "t.txt")
    assert (record["config"]["num_windows"], record["config"]["window"]) == (8, 32)
    assert len(record["removed"]) == 3


# --- another model


@pytest.mark.parametrize("name", ["up_proj", "norm", "config"])
def test_other_models_are_refused_with_both_values(name):
    model, other = tiny_model(), tiny_model()
    scores = gl.analyze(model, windows=WINDOWS, progress=False).scores
    scores.check_model(other)
    with torch.no_grad():
        if name == "up_proj":
            other.model.layers[3].mlp.up_proj.weight.mul_(1.01)
        elif name == "norm":
            other.model.norm.weight.add_(0.01)
        else:
            other.config.rms_norm_eps = 0.1
    with pytest.raises(gl.CheckpointError, match="scores are of another model") as caught:
        gl.prune(other, num_remove=1, scores=scores, progress=False)
    part = "config" if name == "config" else "weights"
    key = f"{part}_sha256"
    expected = f"{part} sha256 {fingerprint(model)[key][:12]}, this model's is "
    assert expected + fingerprint(other)[key][:12] in str(caught.value)
    assert ("weights" in str(caught.value)) == (part == "weights")


def test_another_checkpoint_is_refused_on_the_command_line(work, saved, refuse, run, tmp_path):
    save_tiny(tmp_path / "deep", num_layers=9)
    flags = ["-o", tmp_path / "x", "--num-remove", 1, "--scores", saved]
    assert "another model: config sha256" in refuse(tmp_path, "prune", tmp_path / "deep", *flags)
    err = refuse(tmp_path, "prune", work / "m", *flags, "--dtype", "bfloat16")
    assert "in float32, this one is in bfloat16" in err


def test_a_saved_and_reloaded_model_is_the_same(work):
    from ghostlayers.loading import load_model, locate

    model = tiny_model()
    assert fingerprint(model) == fingerprint(load_model(locate(str(work / "m"))))
    assert fingerprint(tiny_model("gpt2")) == fingerprint(gl.share_tensors(tiny_model("gpt2")))


def test_offloaded_weights_are_read():
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model()
    expected = fingerprint(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert any(parameter.is_meta for parameter in model.parameters())
    assert fingerprint(model) == expected


# --- another calibration


def test_other_windows_are_refused_with_both_values(work, saved, refuse, tmp_path):
    (tmp_path / "u.txt").write_text(text_of(2000, seed=1))
    flags = ["-o", tmp_path / "x", "--num-remove", 1, "--scores", saved]
    own = gl.load_scores(saved).windows.ids_sha256[:12]
    for more, asked in (
        (["--calibration", tmp_path / "u.txt"], f"{tmp_path / 'u.txt'}, 8 windows of 32"),
        (["--num-windows", 4], f"{work / 't.txt'}, 4 windows of 32"),
        (["--window", 16], f"{work / 't.txt'}, 8 windows of 16"),
        (["--window", 16, "--num-windows", 16], f"{work / 't.txt'}, 16 windows of 16"),
        (["--calibration", "self"], "self, 8 windows of 32 tokens, seed 0"),
    ):
        err = refuse(tmp_path, "prune", work / "m", *flags, *more)
        windows = f"{work / 't.txt'}, 8 windows of 32 tokens, ids sha256 {own}"
        assert f"of another calibration: {windows}; asked for: {asked}" in err


def test_text_that_has_changed_is_noticed_if_it_is_named(work, run, refuse, tmp_path):
    text = ["--calibration", tmp_path / "t.txt", *SHORT]
    (tmp_path / "t.txt").write_text(text_of(2000))
    assert run("analyze", work / "m", *text, "--save", tmp_path / "s.safetensors")[0] == 0
    (tmp_path / "t.txt").write_text(text_of(2000, seed=1))
    flags = ["-o", tmp_path / "x", "--num-remove", 1, "--scores", tmp_path / "s.safetensors"]
    assert "another calibration" in refuse(tmp_path, "prune", work / "m", *flags, *text)


def test_another_seed_of_sampled_windows_is_refused(work, run, refuse, tmp_path):
    scores = tmp_path / "s.safetensors"
    sampled = ["--num-windows", 4, "--window", 16, "--calibration", "self"]
    assert run("analyze", work / "m", *sampled, "--save", scores)[0] == 0
    flags = ["-o", tmp_path / "x", "--num-remove", 1, "--scores", scores]
    err = refuse(tmp_path, "prune", work / "m", *flags, *sampled, "--seed", 1)
    assert "self, 4 windows of 16 tokens, seed 1" in err


def test_windows_given_in_must_be_those_of_the_scores(measured):
    model, analysis = measured
    gl.prune(model, num_remove=1, windows=WINDOWS, scores=analysis.scores, recover="none")
    with pytest.raises(gl.CalibrationError, match="another calibration"):
        gl.prune(model, num_remove=1, windows=WINDOWS[:4], scores=analysis.scores)
    with pytest.raises(gl.CalibrationError, match="asked for: self"):
        gl.prune(model, config=gl.PruneConfig(num_remove=1), scores=analysis.scores)


# --- files


def truncated(path, target):
    target.write_bytes(path.read_bytes()[:-20])


def flipped(path, target):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    target.write_bytes(bytes(data))


def header(**changes):
    return lambda path, target: edited(path, target, lambda header, _: header.update(changes))


BROKEN = {
    "truncated": (truncated, "are damaged"),
    "flipped bit": (flipped, "are damaged: their content"),
    "no scores": (lambda _, target: save_file({"a": torch.ones(1)}, target), "not written by"),
    "text": (lambda _, target: target.write_text("similarity 0.5"), "are damaged"),
    "empty": (lambda _, target: target.write_bytes(b""), "are damaged"),
    "missing": (lambda _, target: None, "do not exist"),
    "folder": (lambda _, target: target.mkdir(), "do not exist"),
    "newer": (header(format_version=2), "format version 2; this release reads 1"),
    "edited": (header(dtype="float16"), "are damaged: their content"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_cannot_be_trusted(work, saved, refuse, tmp_path, name):
    make, message = BROKEN[name]
    make(saved, tmp_path / "s.safetensors")
    flags = ["-o", tmp_path / "x", "--num-remove", 1, "--scores", tmp_path / "s.safetensors"]
    err = refuse(tmp_path, "prune", work / "m", *flags)
    assert message in err and "s.safetensors" in err


def test_other_tensors_do_not_pass(saved, tmp_path):
    def swap(_, tensors):
        tensors["similarity"] = tensors["similarity"].flip(0).contiguous()

    with pytest.raises(gl.CheckpointError, match="their content"):
        gl.load_scores(edited(saved, tmp_path / "s.safetensors", swap))


def test_a_file_is_replaced_only_by_force(work, run, refuse, tmp_path):
    target = tmp_path / "s.safetensors"
    target.write_text("precious")
    flags = ["--calibration", work / "t.txt", *SHORT, "--save"]
    assert "--force" in refuse(tmp_path, "analyze", work / "m", *flags, target)
    assert "is a folder" in refuse(tmp_path, "analyze", work / "m", *flags, tmp_path)
    missing = tmp_path / "no" / "s.safetensors"
    assert "folder does not exist" in refuse(tmp_path, "analyze", work / "m", *flags, missing)
    assert run("analyze", work / "m", *flags, target, "--force")[0] == 0
    assert gl.load_scores(target).windows.ids.shape == (8, 32)


def test_what_fails_while_it_is_written_leaves_nothing(measured, tmp_path, monkeypatch):
    target = tmp_path / "s.safetensors"
    target.write_text("precious")

    def half(_tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(scores_file, "save_file", half)
    with pytest.raises(gl.CheckpointError, match="disk full"):
        measured[1].save(target, force=True)
    assert listing(tmp_path) == {"s.safetensors": b"precious"}
