"""`--select module:function`, and the command line of the selectors that run the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ghostlayers as gl
from ghostlayers.selectors import MODEL_SELECTORS, get_selector, select_names, selector_names
from ghostlayers.selectors.own import checked_layers
from oracles import random_ids, tiny_model

SHORT = ["--num-windows", "4", "--window", "32"]
PICKS = """
import numpy, torch
from ghostlayers import GhostlayersError, PlanError

def deepest(context):
    assert context.model.training is False and context.ids.shape == (4, 32)
    return context.allowed[-context.num_remove:]

def by_similarity(context):
    influence = context.similarity.block_influence
    return sorted(context.allowed, key=lambda layer: influence[layer])[: context.num_remove]

def arrays(context): return numpy.array([3, 2])
def tensors(context): return torch.tensor([3, 2])
def none(context): return None
def text(context): return "12"
def floats(context): return [1.0, 2.0]
def truths(context): return [True, False]
def few(context): return [3]
def twice(context): return [3, 3]
def protected(context): return [0, 3]
def beyond(context): return [3, 99]
def broken(context): return 1 / 0
def own_error(context): raise PlanError("no layer pleases me.")
def no_argument(): return [1, 2]
value = 3
"""


@pytest.fixture
def picks(tmp_path, monkeypatch) -> Path:
    (tmp_path / "own_picks.py").write_text(PICKS)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    (tmp_path / "own_missing.py").write_text("import no_such_thing_here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_picks", raising=False)
    return tmp_path


def flags(work, select, *more) -> list:
    return ["--calibration", work / "t.txt", *SHORT, "--select", select, "--num-remove", 2,
            "--recover", "none", *more]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "removed"), [("deepest", [5, 6]), ("arrays", [2, 3]), ("tensors", [2, 3])]
)
def test_own_selector(work, run, picks, name, removed):
    path = list(sys.path)
    status, printed, err = run("prune", work / "m", "-o", "out", *flags(work, f"own_picks:{name}"))
    assert (status, err) == (0, "")
    record = json.loads((picks / "out" / "ghostlayers.json").read_text())
    assert (record["removed"], record["selector"]) == (removed, f"own_picks:{name}")
    assert record["rls"] is None and f"own_picks:{name}" in printed
    assert sys.path == path


def test_own_selector_may_read_similarities(work, run, picks):
    ids = random_ids(4, 32)
    wanted = gl.prune(tiny_model(), num_remove=2, select="shortgpt", recover="none", windows=ids)
    found = gl.prune(
        tiny_model(), num_remove=2, select="own_picks:by_similarity", recover="none", windows=ids
    )
    assert found.record["removed"] == wanted.record["removed"]
    assert found.record["rls"] == wanted.record["rls"]


WRONG = {
    "own_picks:none": "returned None", "own_picks:text": "returned '12'",
    "own_picks:floats": "returned [1.0, 2.0]", "own_picks:truths": "returned [True, False]",
    "own_picks:few": "Allowed: 2 different layers", "own_picks:twice": "[3, 3]",
    "own_picks:protected": "may not be removed: [0]", "own_picks:beyond": "[99]",
    "own_picks:broken": "raised ZeroDivisionError: division by zero",
    "own_picks:own_error": "no layer pleases me", "own_picks:no_argument": "raised TypeError",
    "own_picks:value": "has no function 'value'", "own_picks:deeper": "has no function 'deeper'",
    "own_broken:pick": "importing own_broken raised ZeroDivisionError",
    "own_missing:pick": "raised ModuleNotFoundError: No module named 'no_such_thing_here'",
    "own_nowhere:pick": "no module 'own_nowhere'", "own_picks:": "module:function",
    ":pick": "module:function", "a b:pick": "module:function", "a:b:c": "module:function",
    "shortened-pp": "'shortened-ppl'",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_own_selectors(work, refuse, picks, name):
    assert WRONG[name] in refuse(work, "prune", work / "m", "-o", work / "x", *flags(work, name))


def test_own_selectors_are_imported_before_weights_are_loaded(work, refuse, picks):
    (picks / "m").mkdir()
    (picks / "m" / "config.json").write_bytes((work / "m" / "config.json").read_bytes())
    err = refuse(work, "prune", "m", "-o", work / "x", *flags(work, "own_picks:deeper"))
    assert "has no function" in err


def test_layers_in_another_order_are_sorted():
    assert checked_layers("a:b", (5, 2), 2, (1, 2, 5)) == (2, 5)


@pytest.mark.parametrize("select", ["shortened-ppl", "shortened-taylor", "greedy-ppl"])
def test_prune_from_the_command_line(work, run, tmp_path, select):
    more = ["--no-plus", "--score-windows", 2, "--score-window", 16]
    status, printed, err = run(
        "prune", work / "m", "-o", tmp_path / "out", *flags(work, select, *more)
    )
    assert (status, err) == (0, "") and select in printed
    record = json.loads((tmp_path / "out" / "ghostlayers.json").read_text())
    assert (record["selection"]["windows"], record["selection"]["window"]) == (2, 16)
    assert record["config"]["plus"] is False and len(record["removed"]) == 2
    assert run("info", tmp_path / "out")[0] == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--select", "shortened-magnitude", "--num-remove", 3], "--no-plus"),
        (["--score-windows", 0], "`score_windows` is 0"),
        (["--score-window", 1], "`score_window` is 1"),
    ],
)
def test_errors(work, refuse, tmp_path, more, message):
    command = ["prune", work / "m", "-o", tmp_path / "x", *flags(work, "shortened-taylor")]
    assert message in refuse(tmp_path, *command, *more)


def test_names():
    assert selector_names() == ("lorp", "shortgpt", "streamline")
    assert set(select_names()) == {*selector_names(), *MODEL_SELECTORS, "auto"}
    for name in MODEL_SELECTORS:
        with pytest.raises(gl.GhostlayersError, match="needs the model"):
            get_selector(name)


def test_quantized_models_are_refused_where_weights_are_read(work, refuse, tmp_path):
    config = json.loads((work / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    command = ["prune", tmp_path / "q", "-o", tmp_path / "x", *flags(work, "shortened-taylor")]
    assert "is quantized" in refuse(tmp_path, *command)


def test_settings_are_checked_without_torch():
    code = (
        "import sys\nfrom ghostlayers.config import PruneConfig\n"
        "PruneConfig(num_remove=1, select='laco')\nPruneConfig(num_remove=1, select='a.b:c')\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
