"""Start processes as a launcher does, by environment variables alone; libraries load only once.

They are forks of one server that has imported what they need, and end as any process does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "ghostlayers.analysis",
        "ghostlayers.checkpoint",
        "ghostlayers.compare",
        "ghostlayers.pipeline",
    ]
)


@dataclass(frozen=True)
class Launched:
    """A started process and the files of its output."""

    process: BaseProcess
    out: Path
    err: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(count: int, command: list, **environment: str) -> list[Launched]:
    """Start `count` processes of a script, or of a module after `-m`."""
    base = {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        **environment,
    }
    folder = Path(tempfile.mkdtemp())
    started = []
    for rank in range(count):
        files = folder / f"{rank}.out", folder / f"{rank}.err"
        own = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = FORKS.Process(target=_run, args=(own, files, [str(part) for part in command]))
        process.start()
        started.append(Launched(process, *files))
    return started


def _run(environment: dict[str, str], files: tuple[Path, Path], command: list[str]) -> None:
    """Become the command."""
    import torch

    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def outcome(started: list[Launched], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Wait for processes: status, stdout, stderr of each."""
    end, found = time.monotonic() + timeout, []
    try:
        for each in started:
            each.process.join(max(0.0, end - time.monotonic()))
            assert each.process.exitcode is not None, f"no end within {timeout} s"
            found.append((each.process.exitcode, each.out.read_text(), each.err.read_text()))
    finally:
        for each in started:
            each.process.kill()
    return found
