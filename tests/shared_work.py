"""What the tests of several processes run: the same function in one process and in each of them.

As a script: `python shared_work.py CASE FILE`, started once per process with the launcher's
environment variables; each writes its result to FILE.RANK.
"""

from __future__ import annotations

import sys
import tempfile

import torch

import ghostlayers as gl
from ghostlayers import distributed
from ghostlayers.layerwise import runs_layerwise
from ghostlayers.loading import load_model, locate
from ghostlayers.placement import Placement
from ghostlayers.similarity import SEQUENCE
from ghostlayers.token_classes import NormAccumulator
from ghostlayers.weight_scores import taylor_scores
from oracles import random_ids, tiny_model

PRUNE = {
    "ghost": {"layers": "2,5-6", "recover": "ghost"},
    "sequential": {"layers": "2,5-6", "fit": "sequential"},
    "linearpatch": {"layers": "2-3", "recover": "linearpatch-rotate"},
    "norm": {"layers": "3-4", "recover": "ghost-norm"},
    "fold": {"layers": "3-4", "recover": "fold", "refine": 6},
    "fold+ghost": {"layers": "3-4", "recover": "fold+ghost", "refine": 6},
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
    common = {"windows": ids, "batch_size": 2, "progress": False}
    found = gl.analyze(sink_model(), rank_errors="3-4", **common)
    over = gl.analyze(sink_model(), cosine_over=SEQUENCE, **common)
    recover = found.recoverability
    return {
        "similarity": torch.from_numpy(found.similarity.matrix),
        "massive": found.scores.measured.massive,
        "after": None if recover is None else torch.from_numpy(recover.error_after),
        "selections": found.selections,
        "ranks": found.rank_errors,
        "over sequence": torch.from_numpy(over.similarity.matrix),
    }


def losses_case(ids: torch.Tensor, family: str = "llama") -> dict:
    found = gl.perplexity(sink_model(family), ids, batch_size=3, progress=False)
    return {"perplexity": found.perplexity, "losses": found.window_losses}


def taylor_case(ids: torch.Tensor) -> dict:
    scores = taylor_scores(sink_model(), ids[:, :16], range(8), batch_size=2, progress=False)
    single = taylor_scores(sink_model(), ids[:2, :16], range(8), batch_size=2, progress=False)
    return {"taylor": scores, "one batch": single}


def offloaded_case(ids: torch.Tensor) -> dict:
    """Run a model on disk, layer by layer."""
    with tempfile.TemporaryDirectory() as folder:
        dense = sink_model()
        dense.should_save_on_this_rank = bool  # transformers writes on the first process alone
        dense.save_pretrained(f"{folder}/m")
        source, places = locate(f"{folder}/m"), Placement({"": "disk"}, spill_folder=folder)
        model = load_model(source, placement=places)
        assert runs_layerwise(model)
        common = {"windows": ids, "batch_size": 2, "progress": False}
        pruned = gl.prune(model, None, num_remove=2, recover="ghost-robust", **common)
        return {
            "record": {k: v for k, v in pruned.record.items() if k != "config"},
            "tensors": {str(b): dict(fit.tensors) for b, fit in pruned.fits.items()},
            "losses": gl.perplexity(model, ids, batch_size=2, progress=False).window_losses,
            "taylor": taylor_scores(model, ids[:, :16], range(8), batch_size=2, progress=False),
        }


def padded_case(places: tuple[int, ...]) -> dict:
    """Sweep over one window a batch, of which the mask leaves nothing at some places."""
    model, ids = sink_model(), windows(4, 24)
    mask = torch.ones_like(ids)
    mask[3, :9] = 0
    mask[list(places)] = 0
    batches = [
        {"input_ids": one, "attention_mask": own}
        for one, own in zip(ids.split(1), mask.split(1), strict=True)
    ]
    norms = NormAccumulator(8)
    try:
        found = gl.measure_similarity(model, batches, also=[norms], progress=False)
    except gl.CalibrationError as error:
        return {"refused": str(error)}
    massive, cuts = norms.massive(), [gl.Boundary(2, 4), gl.Boundary(6, 8)]
    result = {"tokens": found.num_tokens, "matrix": torch.from_numpy(found.matrix)}
    for operator, known in (("ghost", None), ("ghost-robust", massive), ("ghost-norm", None)):
        common = {"operator": operator, "massive": known, "progress": False}
        moments = gl.collect_moments(model, batches, cuts, **common)
        for cut, split in moments.items():
            total = split.total if known is None else split.total.ordinary
            result[f"{operator} {cut}"] = [total.gram, total.cross, total.num_tokens]
    return result


def padded() -> dict:
    """Give 3 processes windows that leave some, or all, of them nothing to count."""
    places = {"first": (0,), "middle": (1, 2), "last": (2, 3), "two": (0, 3), "all": range(4)}
    return {name: padded_case(tuple(each)) for name, each in places.items()}


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
    found["offloaded"] = offloaded_case(ids)
    found["spread"] = distributed.spread(lambda item: item**2, range(7))
    for family in families:
        found[family] = [prune_case("ghost", ids, family), losses_case(ids, family)]
    return found


def some() -> dict:
    ids, few = windows(7), windows(2)
    found = {name: prune_case(name, ids) for name in ("ghost", "sequential", "norm", "fold+ghost")}
    found["few"] = prune_case("cosine", few)
    found["one"] = analysis_case(windows(1))
    found["analysis"] = analysis_case(ids)
    found["losses"] = losses_case(few)
    found["taylor"] = taylor_case(ids)
    found["offloaded"] = offloaded_case(few)
    found["spread"] = distributed.spread(lambda item: item**2, range(2))
    return found


CASES = {
    "everything": lambda: everything(("gpt2", "gemma3_text", "mixtral", "gpt_neox")),
    "some": some,
    "padded": padded,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed.session(timeout=240):
        made = CASES[sys.argv[1]]()
        torch.save(made, f"{sys.argv[2]}.{distributed.rank()}")
