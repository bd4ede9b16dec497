"""The demo on a tiny model: its checkpoint loads, its report shows what it printed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import ghostlayers as gl
from tiny_checkpoints import save_tiny

pytest.importorskip("plotly", reason="pip install 'ghostlayers[report]'")
pytest.importorskip("jinja2", reason="pip install 'ghostlayers[report]'")


def test_demo_leaves_a_checkpoint_and_reports(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(
        "demo", Path(__file__).parents[1] / "examples" / "demo.py"
    )
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    model, out = save_tiny(tmp_path / "tiny"), tmp_path / "out"
    monkeypatch.setattr(demo, "packaged_model", lambda: model)
    monkeypatch.setattr(demo, "WINDOW", 48)
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(out), "--num-remove", "2"])
    demo.main()
    printed = capsys.readouterr().out
    results = json.loads((out / "eval.json").read_text())["results"]
    assert [result["path"] for result in results] == [
        str(model),
        str(out / "without-repair"),
        str(out / "model"),
    ]
    page = (out / "report.html").read_text(encoding="utf-8")
    for result in results:
        assert f"{result['perplexity']:.2f}" in printed
        assert f"{result['perplexity']:.2f} ± " in page
    assert "2 of 8 layers removed" in page and str(out / "report.html") in printed
    assert printed.split("\n\n")[1] in (out / "report.txt").read_text()
    assert gl.load_pruned(out / "model").model.config.num_hidden_layers == 6
