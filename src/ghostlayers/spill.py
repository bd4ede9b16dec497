"""Hidden states in flight: kept in main memory, or spilled to files that are mapped when read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import GhostlayersError

# States of one pass that are held in main memory at once, and the share of a disk's free space.
MAX_MEMORY_BYTES = 2 * 2**30
FREE_SHARE = 0.9


class StateStore:
    """Tensors by name and batch number; files in a folder of their own if there is a spill folder.

    On disk only what was read last is resident, and it goes with the tensor. Used as a context
    manager: at the end everything is gone.

    Args:
        folder: Folder to spill into; None keeps the tensors in main memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self.files: dict[tuple[str, int], Path] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._written = 0

    def __enter__(self) -> StateStore:
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._temporary = tempfile.TemporaryDirectory(prefix="states-", dir=self.folder)
            except OSError as error:
                raise GhostlayersError(
                    f"`spill_folder` {str(self.folder)!r} cannot be written "
                    f"({error.strerror}). Give a folder on a disk with free space."
                ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.tensors.clear()
        self.files.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def limit(self) -> int:
        """How many bytes it takes."""
        if self.folder is None:
            return MAX_MEMORY_BYTES
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return int(FREE_SHARE * shutil.disk_usage(existing).free)

    def put(self, name: str, number: int, tensor: Tensor) -> None:
        """Keep a copy of a tensor, on the CPU.

        Raises:
            GhostlayersError: If the disk is full.
        """
        key, value = (name, number), tensor.detach()
        if self._temporary is None:
            self.tensors[key] = value.to("cpu", copy=True)
            return
        self._written += 1
        path = Path(self._temporary.name) / f"{self._written}.safetensors"
        try:
            save_file({"state": value.cpu().contiguous()}, path)
        except (OSError, SafetensorError) as error:
            raise GhostlayersError(
                f"`spill_folder` {str(self.folder)!r}: a state of {value.nbytes} bytes cannot be "
                f"written ({error}). Give a folder on a disk with free space."
            ) from error
        self.files[key] = path

    def get(self, name: str, number: int) -> Tensor:
        """Return a tensor that the caller may write into."""
        key = (name, number)
        if self._temporary is None:
            return self.tensors[key].clone()
        return load_file(self.files[key])["state"]

    def drop(self, name: str, number: int) -> None:
        """Forget a tensor."""
        key = (name, number)
        self.tensors.pop(key, None)
        if key in self.files:
            self.files.pop(key).unlink()
