"""Several processes that share the windows of a run: `torchrun`, `accelerate launch`, Slurm.

Inside `session` every process takes a part of the batches, and what it measured is put together on
all of them, in an order that does not depend on their number. So all take the same decisions; the
first one prints and writes. Outside of a session, or `alone`, every function here is that of one
process, and torch.distributed is not touched: the Python API never shares work by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from . import errors
from .errors import DistributedError, GhostlayersError
from .process_session import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from .process_session import alone as alone
from .process_session import current, first_line
from .process_session import is_main as is_main
from .process_session import launched_rank as launched_rank
from .process_session import rank as rank
from .process_session import session as session
from .process_session import size as size

if TYPE_CHECKING:
    import torch

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


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


def _collective(call: Callable[[], ResultT]) -> ResultT:
    """Run a collective call; what torch raises when a process is gone becomes one line."""
    try:
        return call()
    except RuntimeError as error:
        opened = current()
        raise DistributedError(
            f"process {opened.rank} of {opened.size}: another process of this run ended, or did "
            f"not answer within {opened.timeout:g} s ({first_line(error)}). Nothing was written."
        ) from error


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
