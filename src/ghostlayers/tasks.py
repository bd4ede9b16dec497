"""Zero-shot and few-shot tasks by lm-evaluation-harness, for a model in memory.

Tasks are loaded before any model runs. One whose data cannot be had is reported with the reason;
averages say which tasks they are over.
"""

from __future__ import annotations

import difflib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from .errors import GhostlayersError, RequirementError
from .task_scores import METRICS, TaskResults, TaskScore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAPER = "paper"
PAPER_TASKS = (
    "arc_easy",
    "arc_challenge",
    "hellaswag",
    "winogrande",
    "boolq",
    "openbookqa",
    "rte",
    "copa",
    "race",
)
# Seeds of lm-evaluation-harness itself, so that its few-shot examples are drawn here as well.
PYTHON_SEED, SEED = 0, 1234


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks whose data are here.

    Attributes:
        tasks: lm-evaluation-harness' task objects by name.
        not_run: Tasks that could not be loaded, and why.
    """

    tasks: Mapping[str, Any]
    not_run: Mapping[str, str]


def task_names(tasks: str | Sequence[str]) -> list[str]:
    """Split names at commas; `paper` stands for the nine tasks of the papers.

    Raises:
        GhostlayersError: If there is no name.
    """
    parts = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    names = [name.strip() for name in parts if name.strip()]
    if not names:
        raise GhostlayersError(
            f"`tasks` is {tasks!r}. Allowed: names of lm-evaluation-harness, split by commas, or "
            f"{PAPER!r} ({', '.join(PAPER_TASKS)})."
        )
    expanded = [each for name in names for each in (PAPER_TASKS if name == PAPER else (name,))]
    return list(dict.fromkeys(expanded))


def load_tasks(
    tasks: str | Sequence[str],
    *,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
) -> LoadedTasks:
    """Load tasks and their data.

    Args:
        tasks: Names of tasks, tags or groups; see `task_names`.
        include_path: Folder of further task files (.yaml); they win over those of the harness.
        num_fewshot: Examples in front of each item; None takes the task's own number, and a task
            that fixes it at 0 keeps 0.

    Returns:
        What could be loaded, and why the rest could not.

    Raises:
        RequirementError: If lm-evaluation-harness is not installed.
        GhostlayersError: If a name is unknown, the folder does not exist, or no task at all can be
            loaded.
    """
    names = task_names(tasks)
    if num_fewshot is not None and num_fewshot < 0:
        raise GhostlayersError(f"`num_fewshot` is {num_fewshot}. Allowed: 0 or more.")
    if include_path is not None and not Path(include_path).is_dir():
        raise GhostlayersError(f"`include_path` {str(include_path)!r} is no folder.")
    loaded: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    with _harness():
        manager = _manager(names, include_path)
        for name in _without_tags(names, manager):
            try:
                found = manager.load([name])["tasks"]
            except Exception as error:  # every network, Hub and script failure has its own class
                reason = shorten(str(error), 200, placeholder=" ...") or "no reason given"
                not_run[name] = f"{type(error).__name__}: {reason}"
                continue
            for leaf, task in found.items():
                if "acc" in task.aggregation() or "acc_norm" in task.aggregation():
                    _set_fewshot(task, num_fewshot)
                    loaded[leaf] = task
                else:
                    not_run[leaf] = f"it measures {', '.join(task.aggregation())}, no accuracy"
    if not loaded:
        name, reason = next(iter(not_run.items()))
        raise GhostlayersError(
            f"no task can be run: {', '.join(not_run)}. {name}: {reason.rstrip('.')}. Check the "
            "network, or give local task files by `include_path`."
        )
    return LoadedTasks(loaded, not_run)


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: str | Sequence[str] | LoadedTasks,
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    num_fewshot: int | None = None,
) -> TaskResults:
    """Measure accuracies of a model.

    Args:
        model: A causal LM, dense, pruned or recovered; its mode and weights stay as they are.
        tokenizer: Its tokenizer.
        tasks: Names, see `load_tasks`, or what that returned: several models then share the data.
        include_path: See `load_tasks`; not used for loaded tasks.
        limit: Items per task, from the first; None takes all.
        batch_size: Requests per forward pass.
        num_fewshot: See `load_tasks`; not used for loaded tasks.

    Returns:
        The value of each item; `to_dict(baseline)` has accuracies and the comparison.

    Raises:
        GhostlayersError: As `load_tasks`; if a number is below 1; if logits are not finite.
    """
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise GhostlayersError(f"`{name}` is {value}. Allowed: 1 or more.")
    if not isinstance(tasks, LoadedTasks):
        tasks = load_tasks(tasks, include_path=include_path, num_fewshot=num_fewshot)
    training, scores = model.training, {}
    with _harness():
        from .harness_model import HarnessModel

        try:
            harness = HarnessModel(model, tokenizer, batch_size)
            for name, task in tasks.tasks.items():
                scores[name] = _run(harness, name, task, limit)
        finally:
            model.train(training)
    from importlib.metadata import version

    protocol = {
        "limit": limit,
        "bos": harness.bos is not None,
        "max_length": harness.max_length,
        "batch_size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "lm_eval": version("lm_eval"),
    }
    return TaskResults(scores, tasks.not_run, protocol)


def _run(harness: Any, name: str, task: Any, limit: int | None) -> TaskScore:
    from lm_eval.evaluator import evaluate

    task.set_fewshot_seed(seed=SEED)
    found = evaluate(
        lm=harness,
        task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = found["samples"][name]
    measured = [sample for sample in samples if set(METRICS) & set(sample["metrics"])]
    measured = [sample for sample in measured if sample["filter"] == measured[0]["filter"]]
    measured.sort(key=lambda sample: int(sample["doc_id"]))
    return TaskScore(
        task=name,
        items=tuple((s["doc_id"], s["doc_hash"], s["target_hash"]) for s in measured),
        values={
            metric: tuple(float(sample[metric]) for sample in measured)
            for metric in METRICS
            if metric in measured[0]["metrics"]
        },
        num_fewshot=int(task.get_config("num_fewshot") or 0),
        version=found["versions"].get(name),
    )


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples as lm-evaluation-harness does."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


@lru_cache(maxsize=1)
def _own_index() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    """Index the local task files, as they are now, and those of the harness only if need be.

    The latter takes seconds, and is kept when there are no local ones.
    """
    from lm_eval.tasks import TaskManager

    if include_path is None:
        manager = _own_index()
    else:
        folder = str(Path(include_path).resolve())
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
        manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise GhostlayersError(
                f"Unknown task {name!r}. {hint}Allowed: {PAPER!r}, the names that "
                "`lm-eval ls tasks` prints, and those in the files of `include_path`."
            )
    return manager


def _without_tags(names: Sequence[str], manager: Any) -> list[str]:
    """Put the tasks of a tag in its place, so that each is loaded or refused by itself."""
    expanded: list[str] = []
    for name in names:
        entry = manager.task_index[name]
        expanded += sorted(entry.tags) if entry.kind.name == "TAG" else [name]
    return list(dict.fromkeys(expanded))


@contextmanager
def _harness() -> Iterator[None]:
    """Let the harness seed and log; random states and its log level stay as they were.

    Raises:
        RequirementError: If lm-evaluation-harness is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise RequirementError(
            f"tasks need lm-evaluation-harness ({error.name} is not installed). Run: "
            "pip install 'ghostlayers[eval]'"
        ) from error
    import numpy
    import torch

    logger = logging.getLogger("lm_eval")
    level, python, arrays = logger.level, random.getstate(), numpy.random.get_state()
    logger.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            random.seed(PYTHON_SEED)
            numpy.random.seed(SEED)
            torch.manual_seed(SEED)
            yield
    finally:
        logger.setLevel(level)
        random.setstate(python)
        numpy.random.set_state(arrays)


__all__ = ["PAPER_TASKS", "LoadedTasks", "evaluate_tasks", "load_tasks", "task_names"]
