"""Run the command line and end with SIGKILL at a planted point.

`python killed.py WHERE RANK NUMBER ARGUMENTS...`: the process RANK is killed when it comes to WHERE
for the NUMBERth time. WHERE is `batch` (a batch of a sweep was added up), `weights`, `card` (the
weights, the model card are written), `error` (an exception instead of a kill) or `never`.
"""

from __future__ import annotations

import os
import signal
import sys

from ghostlayers import checkpoint, cli, distributed, shared_sweep

where, rank, number, *arguments = sys.argv[1:]
left = int(number)


def here(name: str) -> None:
    global left
    if name != where and (where, name) != ("error", "batch"):
        return
    if distributed.launched_rank() != int(rank):
        return
    left -= 1
    if left:
        return
    if where == "error":
        raise MemoryError("planted")
    os.kill(os.getpid(), signal.SIGKILL)


def after(name: str, function):
    def call(*args, **keywords):
        result = function(*args, **keywords)
        here(name)
        return result

    return call


saved_sweep = shared_sweep.SavedSweep


class Planted(saved_sweep):
    def due(self) -> bool:
        here("batch")  # before this batch is saved
        return super().due()


shared_sweep.SavedSweep = Planted
checkpoint.write_shards = after("weights", checkpoint.write_shards)
checkpoint.model_card = after("card", checkpoint.model_card)

if __name__ == "__main__":
    sys.exit(cli.main(arguments))
