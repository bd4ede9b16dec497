from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from ghostlayers.errors import GhostlayersError, RequirementError
from ghostlayers.requirements import ALLOWED, OLDEST, check_transformers, needing_transformers

RUN = f"Run: python -m pip install '{ALLOWED}'"


def installed(monkeypatch, version: str | None) -> None:
    def find(name: str) -> str:
        assert name == "transformers"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


@pytest.mark.parametrize("version", ["5.9.0", "5.10.4", "5.24.0", "5.99", "5.25.0.dev0", "5.30rc1"])
def test_supported_release(monkeypatch, version):
    installed(monkeypatch, version)
    check_transformers()


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.8.1", "6.0.0", "6.0.0rc1", "6", "10.1"])
def test_too_old_or_too_new(monkeypatch, version):
    installed(monkeypatch, version)
    with pytest.raises(ImportError) as caught:
        check_transformers()
    expected = f"ghostlayers works with {ALLOWED}; transformers {version} is installed. {RUN}"
    assert str(caught.value) == expected


def test_without_transformers_only_what_needs_it_fails(monkeypatch):
    installed(monkeypatch, None)
    check_transformers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequirementError) as caught, needing_transformers():
        import transformers  # noqa: F401
    expected = f"ghostlayers works with {ALLOWED}; transformers is not installed. {RUN}"
    assert str(caught.value) == expected
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, GhostlayersError)


def test_other_missing_modules_are_not_renamed():
    with pytest.raises(ModuleNotFoundError, match="nonesuch"), needing_transformers():
        import nonesuch  # noqa: F401


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_of_the_package_checks_and_imports_nothing_heavy():
    done = fresh(
        "import importlib.metadata as m, sys\nm.version = lambda name: '4.57.6'\n"
        "try:\n    import ghostlayers\nexcept ImportError as error:\n    print(error)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and "transformers 4.57.6 is installed" in done.stdout


def test_package_and_command_line_without_transformers(tmp_path):
    blocked = (
        "import importlib.metadata as m, sys\n"
        "def find(name):\n    raise m.PackageNotFoundError(name)\n"
        "class Block:\n    def find_spec(name, path=None, target=None):\n"
        "        if name == 'transformers':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "m.version = find\nsys.meta_path.insert(0, Block)\nimport ghostlayers\n"
    )
    done = fresh(f"{blocked}ghostlayers.PruneConfig(num_remove=1)\nghostlayers.load_pruned")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ghostlayers.errors.RequirementError: ") and "not installed" in last
    (tmp_path / "config.json").write_text("{}")
    flags = ["prune", str(tmp_path), "-o", str(tmp_path / "x"), "--num-remove", "1"]
    done = fresh(f"{blocked}from ghostlayers.cli import main\nsys.exit(main({flags}))")
    assert done.returncode == 2
    assert done.stderr.startswith("ghostlayers: error: ") and len(done.stderr.splitlines()) == 1
    assert "transformers is not installed" in done.stderr and RUN in done.stderr


def test_project_file_and_makefile_agree_with_the_code():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"(transformers[<>=~!][^"]*)"', project) == [ALLOWED]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^OLDEST_TRANSFORMERS \?= (.*)$", makefile, re.M) == [f"{OLDEST}.0"]
