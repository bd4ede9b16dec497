"""The session that a launcher's processes open: who they are, how they meet, how they fail.

`distributed` holds what they do together inside it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .errors import DistributedError, GhostlayersError

DEFAULT_TIMEOUT = 1800.0
# How long a process waits to see whether the first one fails with the same line.
SAME_ERROR_SECONDS = 10.0


@dataclass
class Session:
    """The open session: this process' number, their number, and the store that they share."""

    rank: int
    size: int
    timeout: float
    store: Any
    suspended: int = 0


_open: list[Session] = []


def launched_processes() -> int:
    """Return how many processes the launcher started; 1 without one."""
    text = os.environ.get("WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def launched_rank() -> int:
    """Return this process' number by `RANK`, whether a session is open or not."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() and launched_processes() > 1 else 0


def rank() -> int:
    """Return this process' number; 0 outside of a session."""
    return _open[0].rank if size() > 1 else 0


def size() -> int:
    """Return how many processes share work; 1 outside of a session and inside `alone`."""
    return _open[0].size if _open and not _open[0].suspended else 1


def current() -> Session:
    """Return the open session; there must be one."""
    return _open[0]


def is_main() -> bool:
    """Say whether this process prints and writes."""
    return not _open or _open[0].rank == 0


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        if not text and default is not None:
            return default
        raise DistributedError(
            f"environment variable {name} is {text!r}; a number is needed where WORLD_SIZE is "
            "above 1. Start with torchrun, or unset WORLD_SIZE."
        )
    return int(text)


@contextmanager
def session(timeout: float = DEFAULT_TIMEOUT) -> Iterator[None]:
    """Join the processes that the launcher started; without a launcher nothing is done.

    Reads `WORLD_SIZE`, `RANK`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`. Tensors travel by
    gloo on the CPU and by NCCL on CUDA devices; process i of a machine takes its i-th device.

    Args:
        timeout: Seconds after which a process that does not answer ends the run.

    Raises:
        DistributedError: If a variable is missing, or a process does not come.
    """
    if max(1, _number("WORLD_SIZE", 1)) == 1:
        yield
        return
    import torch

    dist: Any = importlib.import_module("torch.distributed")
    _number("RANK")
    _number("MASTER_PORT")
    if not os.environ.get("MASTER_ADDR"):
        raise DistributedError("environment variable MASTER_ADDR is missing. Start with torchrun.")
    if torch.cuda.is_available():
        torch.cuda.set_device(_number("LOCAL_RANK", 0) % torch.cuda.device_count())
    limit = timedelta(seconds=timeout)
    try:
        store, own, count = next(dist.rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("group", store),
            rank=own,
            world_size=count,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"the {launched_processes()} processes of this run did not all come within "
            f"{timeout:g} s: {first_line(error)}"
        ) from error
    _open.append(Session(own, count, timeout, store))
    try:
        yield
    except GhostlayersError as error:
        error.repeated = _is_repeated(error, store, own, count)
        raise
    finally:
        _open.clear()
    dist.destroy_process_group()  # not after an error: it would wait for those that are gone


def _is_repeated(error: GhostlayersError, store: Any, own: int, count: int) -> bool:
    """Tell the first process' error to all; say whether it is this one as well.

    The store goes with the first process, so that one waits until the others have read it.
    """
    if isinstance(error, DistributedError):
        return False
    limit = timedelta(seconds=SAME_ERROR_SECONDS)
    try:
        if own == 0:
            store.set("failed", str(error))
            store.wait([f"heard {other}" for other in range(1, count)], limit)
            return False
        store.wait(["failed"], limit)
        same = bool(store.get("failed").decode() == str(error))
        store.set(f"heard {own}", "")
        return same
    except RuntimeError:  # another process did not fail, or is gone
        return False


@contextmanager
def alone() -> Iterator[None]:
    """Let each process work for itself, as if there were no others."""
    for opened in _open:
        opened.suspended += 1
    try:
        yield
    finally:
        for opened in _open:
            opened.suspended -= 1


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
