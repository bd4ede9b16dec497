"""What the tests of several processes run: the same function in one process and in each of them.

As a script: `python shared_work.py CASE FILE`, started once per process with the launcher's
environment variables; each writes its result to FILE.RANK.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch

import ghostlayers as gl
from ghostlayers import distributed
from ghostlayers.weight_scores import taylor_scores
from oracles import random_ids, tiny_model

PRUNE = {
    "ghost": {"layers": "2,5-6", "recover": "ghost"},
    "sequential": {"layers": "2,5-6", "fit": "sequential"},
    "linearpatch": {"layers": "2-3", "recover": "linearpatch-rotate"},
    "fold": {"layers": "3-4", "recover": "fold"},
    "fold+ghost": {"layers": "3-4", "recover": "fold+ghost"},
    "cosine": {"layers": "3-4", "recover": "replaceme-cosine"},
    "auto": {"num_remove": 2, "select": "auto"},
    "shortened-ppl": {"num_remove": 2, "select": "shortened-ppl", "recover": "none"},
    "greedy-ppl": {"num_remove": 2, "select": "greedy-ppl", "recover": "none"},
    "laco": {"num_remove": 2, "select": "laco", "recover": "none", "laco_layers": 2},
    "max-ppl": {"max_ppl_ratio": 1.2, "select": "shortgpt"},
}
COMMON = {"score_window": 16, "score_windows": 5}


def sink_model(family: str = "llama"):
    """A model with a token class of very long states: id 7 in every window's front."""
    model = tiny_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] *= 60.0
    return model


def windows(count: int, length: int = 64) -> torch.Tensor:
    ids = random_ids(count, length, seed=5)
    ids[ids == 7] = 8
    ids[:, 0] = 7
    return ids


def prune_case(name: str, ids: torch.Tensor, family: str = "llama") -> dict:
    settings = {**PRUNE[name], **COMMON, "batch_size": 2}
    result = gl.prune(sink_model(family), None, windows=ids, progress=False, **settings)
    record = {k: v for k, v in result.record.items() if k != "config"}
    state = {k: v.clone() for k, v in result.model.state_dict().items()}
    return {"removed": result.plan.removed, "record": record, "state": state}


def analysis_case(ids: torch.Tensor) -> dict:
    found = gl.analyze(sink_model(), windows=ids, batch_size=2, progress=False)
    recover = found.recoverability
    return {
        "similarity": torch.from_numpy(found.similarity.matrix),
        "massive": found.scores.measured.massive,
        "after": None if recover is None else torch.from_numpy(recover.error_after),
        "selections": found.selections,
    }


def losses_case(ids: torch.Tensor, family: str = "llama") -> dict:
    found = gl.perplexity(sink_model(family), ids, batch_size=3, progress=False)
    return {"perplexity": found.perplexity, "losses": found.window_losses}


def taylor_case(ids: torch.Tensor) -> dict:
    scores = taylor_scores(sink_model(), ids[:, :16], range(8), batch_size=2, progress=False)
    single = taylor_scores(sink_model(), ids[:2, :16], range(8), batch_size=2, progress=False)
    return {"taylor": scores, "one batch": single}


def everything(families: tuple[str, ...] = ()) -> dict:
    """Run each method on 13 windows, some on fewer windows than there are processes."""
    ids, few = windows(13), windows(2)
    found = {name: prune_case(name, ids) for name in PRUNE}
    found["few"] = prune_case("ghost", few)
    found["one"] = analysis_case(windows(1))
    found["analysis"] = analysis_case(ids)
    found["losses"] = losses_case(ids)
    found["few losses"] = losses_case(few)
    found["taylor"] = taylor_case(ids)
    found["spread"] = distributed.spread(lambda item: item**2, range(7))
    for family in families:
        found[family] = [prune_case("ghost", ids, family), losses_case(ids, family)]
    return found


def some() -> dict:
    ids, few = windows(7), windows(2)
    found = {name: prune_case(name, ids) for name in ("ghost", "sequential", "fold+ghost", "auto")}
    found["few"] = prune_case("cosine", few)
    found["one"] = analysis_case(windows(1))
    found["analysis"] = analysis_case(ids)
    found["losses"] = losses_case(few)
    found["taylor"] = taylor_case(ids)
    found["spread"] = distributed.spread(lambda item: item**2, range(2))
    return found


CASES = {
    "everything": lambda: everything(("gpt2", "gemma3_text", "mixtral", "gpt_neox")),
    "some": some,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(count: int, command: list, **environment: str) -> list[subprocess.Popen]:
    """Start processes as a launcher does: by environment variables alone."""
    port = str(free_port())
    paths = [str(Path(gl.__file__).parents[1]), str(Path(__file__).parent)]
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        **environment,
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def outcome(processes: list[subprocess.Popen], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Wait for processes: status, stdout, stderr of each."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed.session(timeout=240):
        made = CASES[sys.argv[1]]()
        torch.save(made, f"{sys.argv[2]}.{distributed.rank()}")
