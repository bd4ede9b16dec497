"""Go on where an interrupted run stopped: the sums of a sweep, saved every so many seconds.

A work folder holds one safetensors file for each sweep and process of a run. Its header says of
which model, windows, accumulators and processes the sums are; a file of anything else is not used,
and a line says so. Files are replaced in one step, so that there is no half of one; all that a
sweep adds up is in them, so that the continued run has the bits of one without interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import distributed
from .errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SAVE_EVERY = 120.0
METADATA_KEY = "ghostlayers_sweep"
FILES = re.compile(r"sweep-\d{4}\.\d+-of-\d+\.(safetensors|part)")


@dataclass
class WorkFolder:
    """Where a run keeps its sums.

    Attributes:
        folder: The folder; it appears with the first file.
        every: Seconds between two files.
        sweeps: Number of sweeps so far.
        saved_at: When the last file was written, or the run began; monotonic seconds.
    """

    folder: Path
    every: float = SAVE_EVERY
    sweeps: int = 0
    saved_at: float = field(default_factory=time.monotonic)


_open: list[WorkFolder] = []


@contextmanager
def resumable(folder: Path | None, every: float = SAVE_EVERY) -> Iterator[None]:
    """Save the sweeps of a run in a folder, and take up those that are there.

    Args:
        folder: The work folder; None saves nothing.
        every: Seconds between two files.

    Raises:
        CheckpointError: If the folder holds other files, or cannot be used.
    """
    if folder is None:
        yield
        return
    check_work_folder(folder)
    _open.append(WorkFolder(folder, every))
    try:
        yield
    finally:
        _open.clear()


def work_folder(given: str | None, result: str | Path | None, verb: str) -> Path | None:
    """Return the checked work folder of a run.

    Args:
        given: As asked for.
        result: What the run writes; without `given` the folder is hidden beside it.
        verb: For the name of that folder.
    """
    if given is None and result is None:
        return None
    if given is not None:
        folder = Path(given).expanduser()
    else:
        path = Path(str(result)).expanduser().resolve()
        folder = path.parent / f".{path.name}.{verb}"
    check_work_folder(folder)
    return folder


def check_work_folder(folder: Path) -> None:
    """Check a work folder before any work is done.

    Raises:
        CheckpointError: If it holds files of others, or its parent cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"work folder {str(folder)!r} is a file. Give a folder.")
    if folder.is_dir():
        other = [path.name for path in folder.iterdir() if not FILES.fullmatch(path.name)]
        if other:
            raise CheckpointError(
                f"work folder {str(folder)!r} holds other files ({other[0]!r}). Give a new folder, "
                "or one that an interrupted run left."
            )
    parent = folder.resolve()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"work folder {str(folder)!r}: {parent} cannot be written.")


def remove_work_folder(folder: Path | None) -> None:
    """Remove a work folder when the run that needed it has written its result."""
    if folder is not None and folder.is_dir():
        shutil.rmtree(folder)


class SavedSweep:
    """The file of one sweep of this process; without a work folder nothing is read or written.

    Args:
        key: Returns JSON values that say of what the sums are; called when there is a file to read
            or to write, since it may read every weight.
    """

    def __init__(self, key: Callable[[], Mapping[str, Any]]) -> None:
        self.work = _open[0] if _open else None
        self.key = key
        if self.work is None:
            return
        self.work.sweeps += 1
        self.path = self.work.folder / f"sweep-{self.work.sweeps:04d}.{_place()}.safetensors"

    @cached_property
    def digest(self) -> str:
        """Hash of the key and of this process' place."""
        text = json.dumps({**self.key(), "process": _place()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """Return how many batches are in the sums, and the sums; 0 and nothing without a file."""
        if self.work is None or not self.path.is_file():
            return 0, {}
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path), framework="pt") as file:
                header = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
                if header.get("digest") == self.digest:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    return int(header["batches"]), tensors
        except SafetensorError as error:
            warnings.warn(f"{self.path} is damaged ({error}); not used.", stacklevel=2)
            return 0, {}
        warnings.warn(
            f"{self.path} is of another model, calibration or setting; not used.", stacklevel=2
        )
        return 0, {}

    def due(self) -> bool:
        """Say whether it is time to save."""
        if self.work is None:
            return False
        return time.monotonic() - self.work.saved_at >= self.work.every

    def save(self, batches: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the sums after so many batches; the file is replaced in one step.

        Raises:
            CheckpointError: If it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        assert self.work is not None
        header = json.dumps({"digest": self.digest, "batches": batches})
        part = self.path.with_suffix(".part")
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            self.work.folder.mkdir(parents=True, exist_ok=True)
            save_file(own, part, metadata={METADATA_KEY: header})
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(self.path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(
                f"work folder {str(self.work.folder)!r} cannot be written ({error}). Free space, "
                "or name a folder on another disk (`--resume-dir`)."
            ) from error
        self.work.saved_at = time.monotonic()


def _place() -> str:
    return f"{distributed.rank()}-of-{distributed.size()}"
