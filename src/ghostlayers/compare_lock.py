"""One comparison at a time in a folder; what a refused one made there goes again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import distributed
from .errors import CheckpointError

LOCK_FILE, RESULTS_FILE, SMOKE_TEXT = ".lock", "results.jsonl", "smoke.txt"
SCORES_FOLDER = "scores"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this run; make it if it is not there. Of several processes the first does.

    The lock is on an open file: the system drops it when the process ends, however it ends.

    Raises:
        CheckpointError: If another process holds it, or it cannot be written.
    """
    from filelock import FileLock, Timeout

    if not distributed.is_main():
        with distributed.section():
            pass
        yield
        return
    made = missing_folders(folder / SCORES_FOLDER)
    own = [folder / name for name in (LOCK_FILE, SMOKE_TEXT) if not (folder / name).exists()]
    lock = FileLock(folder / LOCK_FILE)
    with distributed.section():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise CheckpointError(
                f"-o {str(folder)!r} is in use by another comparison. Wait for it, or choose "
                "another folder."
            ) from error
        except OSError as error:
            raise cannot_be_written(folder, error) from error
    try:
        yield
    finally:
        lock.release()
        if not (folder / RESULTS_FILE).is_file():
            for path in own:
                path.unlink(missing_ok=True)
            remove_empty(made)


def cannot_be_written(folder: Path, error: OSError) -> CheckpointError:
    """Return the error of a folder that takes no file."""
    return CheckpointError(f"-o {str(folder)!r} cannot be written ({error.strerror or error}).")


def missing_folders(folder: Path) -> list[Path]:
    """Return the folders that must be made for one to exist, the innermost first."""
    return [each for each in (folder, *folder.absolute().parents) if not each.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, as far as they are there and empty."""
    for folder in folders:
        if not folder.is_dir():
            continue
        if any(folder.iterdir()):
            return
        folder.rmdir()


__all__ = ["LOCK_FILE", "RESULTS_FILE", "SMOKE_TEXT", "cannot_be_written", "locked"]
