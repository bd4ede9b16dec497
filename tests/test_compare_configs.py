"""Every configuration of `configs/` runs at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ROOT, packaged_gguf
from ghostlayers.compare_file import read_config, runs_of
from ghostlayers.compare_results import read_results
from tiny_checkpoints import save_tiny

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def check_smoke(run, config: Path, model: Path, out: Path, *flags) -> None:
    status, _, err = run(
        "compare", "--config", config, "--smoke", "--model", model, "-o", out, *flags
    )
    assert status == 0, err
    wanted = runs_of(read_config(config), {}, str(model))
    files = sorted(out.rglob("results.jsonl"))
    assert len(files) == len(wanted)
    for file in files:
        results = read_results(file)
        assert results.run.title and results.dense is not None
        operators = {cell.operator for cell in results.cells if not cell.refused}
        assert operators == set(results.run.settings["recover"])
        for cut in results.cuts:
            assert cut.refused is None, cut.refused
            assert len(results.cells_of(cut)) == (1 if cut.merged else len(operators))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("smoke") / "m")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_smoke(run, config, tiny, tmp_path):
    check_smoke(run, config, tiny, tmp_path / "o")


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_smoke_of_a_real_model(run, config, tmp_path):
    check_smoke(run, config, packaged_gguf("smollm2"), tmp_path / "o")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_full_settings_are_valid_and_have_a_source(config):
    file = read_config(config)
    assert file["source"].startswith("arXiv") and file["title"] and file["expected"]["source"]
    runs = runs_of(file, {}, None)
    assert runs
    for each in runs:
        assert each.config.num_remove


def test_there_are_configurations():
    assert len(CONFIGS) >= 5
