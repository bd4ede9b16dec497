"""Several processes that share the windows of a run: `torchrun`, `accelerate launch`, Slurm.

Inside `session` every process takes a part of the batches, and what it measured is put together on
all of them, in an order that does not depend on their number. So all take the same decisions; the
first one prints and writes. Outside of a session, or `alone`, every function here is that of one
process, and torch.distributed is not touched: the Python API never shares work by itself.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from . import errors
from .errors import DistributedError, GhostlayersError

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT = 1800.0
# How long a process waits to see whether the first one fails with the same line.
SAME_ERROR_SECONDS = 10.0
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass
class _Session:
    """The open session: this process' number, their number, and the store that they share."""

    rank: int
    size: int
    timeout: float
    store: Any
    suspended: int = 0


_open: list[_Session] = []


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


def check_same(what: str, value: Any) -> None:
    """Check that all processes were given the same.

    Raises:
        DistributedError: If not.
    """
    if any(other != value for other in gather_each(value)):
        raise DistributedError(
            f"the processes of this run were given different {what}. Start all with the same "
            "command and the same release."
        )


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
            f"{timeout:g} s: {_first_line(error)}"
        ) from error
    _open.append(_Session(own, count, timeout, store))
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


def _collective(call: Callable[[], ResultT]) -> ResultT:
    """Run a collective call; what torch raises when a process is gone becomes one line."""
    try:
        return call()
    except RuntimeError as error:
        opened = _open[0]
        raise DistributedError(
            f"process {opened.rank} of {opened.size}: another process of this run ended, or did "
            f"not answer within {opened.timeout:g} s ({_first_line(error)}). Nothing was written."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def section() -> Iterator[None]:
    """Run work in which processes may fail one by one; all of them raise if one does.

    The block must hold no collective call.

    Raises:
        GhostlayersError: That of the first process that raised one, on every process.
        DistributedError: If another process failed in another way.
    """
    if size() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # raised again below, when the others know
        failure = error
    told = None if failure is None else (type(failure).__name__, str(failure))
    outcomes = gather_each(told)
    if failure is not None:
        raise failure
    for number, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        kind = getattr(errors, outcome[0], None)
        if isinstance(kind, type) and issubclass(kind, GhostlayersError):
            raise kind(outcome[1])
        raise DistributedError(
            f"process {number} of {len(outcomes)} failed ({outcome[0]}: {outcome[1]}). Nothing was "
            "written."
        )


def gather_each(value: ItemT) -> list[ItemT]:
    """Return every process' value, in the order of their numbers; it is pickled."""
    if size() == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * size()
    _collective(lambda: dist.all_gather_object(found, value))
    return found


def share_of(count: int) -> range:
    """Return which of `count` consecutive items are this process'; sizes differ by at most 1."""
    return range(count * rank() // size(), count * (rank() + 1) // size())


def share(items: Sequence[ItemT]) -> list[ItemT]:
    """Return this process' part of some items, consecutive ones."""
    return [items[index] for index in share_of(len(items))]


def own_windows(num_windows: int, batch_size: int) -> slice:
    """Return which windows are this process', in whole batches of the run in one process."""
    part = share_of(-(-num_windows // batch_size))
    return slice(part.start * batch_size, min(part.stop * batch_size, num_windows))


def gather(own: Sequence[ItemT]) -> list[ItemT]:
    """Put what each process made of its `share` together, on all of them, in the first order."""
    return [item for part in gather_each(list(own)) for item in part]


def everyone(flag: bool) -> bool:
    """Say whether something holds on all processes."""
    return all(gather_each(flag))


def same(value: ItemT) -> ItemT:
    """Return the first process' value, so that all decide alike on unlike machines."""
    return gather_each(value)[0]


def broadcast_(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Overwrite a tensor with that of one process."""
    import torch.distributed as dist

    _collective(lambda: dist.broadcast(tensor, source))
    return tensor


def sum_(tensor: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over all processes, in place; the order is torch's."""
    import torch.distributed as dist

    if size() > 1:
        _collective(lambda: dist.all_reduce(tensor))
    return tensor


def spread(function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    """Call a function for every item, each on one process that works on it alone.

    Args:
        function: Its results are pickled; it must write nothing that another one writes.
        items: The same on all processes; neighbours, which often cost alike, go to different ones.

    Returns:
        All results in the order of the items, on every process.
    """
    with section():
        mine, count = rank(), size()
        with alone():
            own = [function(item) for item in items[mine::count]]
    parts = gather_each(own)
    return [parts[index % len(parts)][index // len(parts)] for index in range(len(items))]
