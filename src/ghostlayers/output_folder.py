"""A checkpoint's folder: checked before any work, there under its name only when it is complete."""

from __future__ import annotations

import glob
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from .errors import CheckpointError

if TYPE_CHECKING:
    from .loading import ModelSource

# The name of config.json until all else is written.
HIDDEN_CONFIG = "config.json.incomplete"


def check_output(
    out: str | Path, *, force: bool = False, source: ModelSource | None = None
) -> Path:
    """Check an output folder before any work is done.

    Raises:
        CheckpointError: If it exists and `force` is not given, if replacing it would delete the
            source or the working directory, or if its parent cannot be written.
    """
    path = Path(out).expanduser()
    if not str(out):
        raise CheckpointError("output is ''. Give a folder name.")
    if path.exists() and not force:
        raise CheckpointError(
            f"output {str(path)!r} exists. Choose another name, or --force (force=True)."
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"output {str(path)!r} is a file. Choose a folder name.")
    inside = [Path.cwd()] if source is None else [Path.cwd(), source.folder.resolve()]
    if any(folder.is_relative_to(path.resolve()) for folder in inside):
        raise CheckpointError(
            f"output {str(path)!r} holds the model or the working directory: --force would delete "
            "it. Choose another folder."
        )
    parent = path.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"output {str(path)!r}: {parent} cannot be written.")
    return path


@contextmanager
def complete_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder beside `out` and rename it to `out` when the block succeeds.

    A process that is killed leaves a hidden folder that no loader takes for a checkpoint, as long
    as the block hides the config (`hide_config`); the next one that writes `out` removes it.
    """
    check_output(out, force=force)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(out)
    own = f"{platform.node()}-{os.getpid()}"
    folder = out.parent / f".{out.name}.incomplete-{own}"
    try:
        folder.mkdir()
        yield folder
        if (folder / HIDDEN_CONFIG).is_file():
            (folder / HIDDEN_CONFIG).rename(folder / "config.json")
        umask = os.umask(0)
        os.umask(umask)
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(0o666 & ~umask)
        if out.exists():
            old = out.parent / f".{out.name}.replaced-{own}"
            out.rename(old)
            try:
                folder.rename(out)
            except OSError:
                old.rename(out)
                raise
            shutil.rmtree(old)
        else:
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"output {str(out)!r} cannot be written ({error}).") from error
    finally:
        if os.path.exists(folder):
            shutil.rmtree(folder)


def hide_config(folder: Path) -> None:
    """Rename the config of a folder that is being written, so that nothing loads it yet."""
    (folder / "config.json").rename(folder / HIDDEN_CONFIG)


def remove_left_over(out: Path) -> None:
    """Remove what processes of this machine left that were killed while they wrote `out`.

    A folder that was just being replaced is put back.
    """
    for kind in ("replaced", "incomplete"):
        name = f".{out.name}.{kind}-{platform.node()}-"
        for path in out.parent.glob(f"{glob.escape(name)}*"):
            process = path.name.rpartition("-")[2]
            if not process.isdigit() or _is_running(int(process)):
                continue
            if kind == "replaced" and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
