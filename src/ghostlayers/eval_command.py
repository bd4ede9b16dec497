"""`ghostlayers eval`: models beside the first of them, on the same text, tasks and lengths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import distributed
from .config import PruneConfig
from .errors import CalibrationError, GhostlayersError
from .flags import add_config_flags, add_placement_flags
from .records import versions
from .text_sources import check_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .calibration import Windows
    from .loading import ModelSource
    from .placement import Placement
    from .speed_results import SpeedSettings
    from .task_scores import TaskResults
    from .tasks import LoadedTasks

DEFAULT_TEXT = "wikitext2"
# name: (default, help); the flags are --speed-NAME
SPEED_DEFAULTS: dict[str, tuple[str | int, str]] = {
    "batch_sizes": ("1,4", "sequences at once, split by commas"),
    "lengths": ("64,256", "tokens of the prompt, split by commas"),
    "new_tokens": (32, "tokens generated after each prompt"),
    "repeats": (5, "timed runs of each"),
    "warmup": (2, "runs before those, not timed"),
}


def add_eval_flags(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Add the flags of `eval`."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help=f"{model_help}; the first is the baseline of the others (before an output of prune "
        "the dense model that it names is put)",
    )
    parser.add_argument(
        "--no-dense",
        action="store_true",
        help="measure the PATHs alone, also where the first is an output of prune",
    )
    parser.add_argument(
        "--perplexity",
        metavar="SRC",
        help="texts to score, split by commas; sources as for --calibration of prune (default: "
        "wikitext2, unless --tasks or --speed is given)",
    )
    parser.add_argument(
        "--window",
        type=int,
        help="tokens per window (default: 2048, or the model's maximum if shorter)",
    )
    parser.add_argument("--num-windows", type=int, help="windows scored (default: all)")
    parser.add_argument(
        "--tasks",
        metavar="NAMES",
        help="tasks of lm-evaluation-harness, split by commas; 'paper': the nine of the papers",
    )
    parser.add_argument(
        "--include-path", metavar="DIR", help="folder of further task files (.yaml)"
    )
    parser.add_argument("--limit", type=int, help="items per task (default: all)")
    parser.add_argument("--num-fewshot", type=int, help="examples per item (default: the task's)")
    parser.add_argument(
        "--speed", action="store_true", help="time prefill and decode on random token ids"
    )
    for name, (default, text) in SPEED_DEFAULTS.items():
        kind = str if isinstance(default, str) else int
        flag = f"--speed-{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default})")
    add_config_flags(parser, ("batch_size", "dtype", "device"))
    add_placement_flags(parser)


def run_eval(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure what is asked for on every path; everything is checked before a model is loaded."""
    from .commands import check_json_target, placement_of_run, quiet_transformers

    texts = _texts(args)
    for text in texts:
        check_source(text)
    check_json_target(args.json)
    _check_numbers(args)
    if distributed.size() > 1 and (args.tasks is not None or args.speed):
        raise GhostlayersError(
            f"{'--speed' if args.speed else '--tasks'} runs in one process, and there are "
            f"{distributed.size()}. Start without torchrun; they share --perplexity alone."
        )
    own = {name: settings[name] for name in ("batch_size", "dtype", "device") if name in settings}
    config = PruneConfig(num_remove=1, **own)
    placement = placement_of_run(args, config.device)
    quiet_transformers()
    from .calibration import resolve_window
    from .eval_baseline import with_dense
    from .loading import load_config, locate

    sources = [locate(path) for path in args.paths]
    if not args.no_dense:
        sources = with_dense(sources)
    configs = [load_config(source) for source in sources]
    window = min(resolve_window(args.window, each) for each in configs)
    speed = _speed_settings(args, configs) if args.speed else None
    tasks = _load_tasks(args) if args.tasks is not None else None
    results: list[dict[str, Any]] = []
    baseline: TaskResults | None = None
    for source in sources:
        windows = [_windows(source, text, args.num_windows, window) for text in texts]
        result, scores = _evaluate(source, config, placement, windows, tasks, args.limit, speed)
        if scores is not None:
            baseline = baseline or scores
            result["tasks"] = scores.to_dict(baseline)
        results.append(result)
    _compare(results)
    _print_eval(results)
    return {"results": results, "versions": versions()}


def _texts(args: argparse.Namespace) -> list[str]:
    """Return the texts to score; one whose name holds a comma must be given alone."""
    if args.perplexity is None:
        return [] if args.tasks is not None or args.speed else [DEFAULT_TEXT]
    if Path(args.perplexity).is_file():
        return [args.perplexity]
    texts = [text.strip() for text in args.perplexity.split(",") if text.strip()]
    if not texts:
        raise CalibrationError(f"--perplexity is {args.perplexity!r}. Give a text, or several.")
    return list(dict.fromkeys(texts))


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("window", 2), ("num_windows", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise CalibrationError(f"`{name}` is {value}. Allowed: {least} or more.")
    if args.limit is not None and args.limit < 1:
        raise GhostlayersError(f"`limit` is {args.limit}. Allowed: 1 or more.")
    given = [
        flag
        for flag, value in (
            ("--include-path", args.include_path),
            ("--limit", args.limit),
            ("--num-fewshot", args.num_fewshot),
        )
        if value is not None
    ]
    if given and args.tasks is None:
        raise GhostlayersError(f"{given[0]} needs --tasks.")


def _speed_settings(args: argparse.Namespace, configs: Sequence[Any]) -> SpeedSettings:
    from .speed_results import SpeedSettings, check_lengths

    settings = SpeedSettings.parse(
        **{name: getattr(args, f"speed_{name}") for name in SPEED_DEFAULTS}
    )
    for each in configs:
        check_lengths(settings, each)
    return settings


def _load_tasks(args: argparse.Namespace) -> LoadedTasks:
    from .tasks import load_tasks

    loaded = load_tasks(args.tasks, include_path=args.include_path, num_fewshot=args.num_fewshot)
    for name, reason in loaded.not_run.items():
        print(f"ghostlayers: warning: task {name} is not run: {reason}", file=sys.stderr)
    return loaded


def _windows(source: ModelSource, text: str, num_windows: int | None, window: int) -> Windows:
    from .calibration import text_windows
    from .loading import load_tokenizer

    return text_windows(
        load_tokenizer(source), text, num_windows=num_windows, window=window, evaluation=True
    )


def _evaluate(
    source: ModelSource,
    config: PruneConfig,
    placement: Placement,
    windows: Sequence[Windows],
    tasks: LoadedTasks | None,
    limit: int | None,
    speed: SpeedSettings | None,
) -> tuple[dict[str, Any], TaskResults | None]:
    """Load one model and measure it; it is gone when this returns."""
    from .evaluation import perplexity
    from .loading import load_model, load_tokenizer
    from .model_checks import check_causal

    model = load_model(source, dtype=config.dtype, device=config.device, placement=placement)
    check_causal(model)
    result: dict[str, Any] = {"path": source.name}
    if windows:
        scored = [perplexity(model, w, batch_size=config.batch_size).to_dict() for w in windows]
        result |= {**scored[0], "texts": scored}
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    result["dtype"] = str(model.dtype).removeprefix("torch.")
    scores = None
    if tasks is not None:
        scores = _task_scores(model, load_tokenizer(source), tasks, limit, config.batch_size)
    if speed is not None:
        from .speed import measure_speed

        result["speed"] = measure_speed(model, speed).to_dict()
    return result, scores


def _task_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    limit: int | None,
    batch_size: int,
) -> TaskResults:
    from .tasks import evaluate_tasks

    return evaluate_tasks(model, tokenizer, tasks, limit=limit, batch_size=batch_size)


def _compare(results: Sequence[dict[str, Any]]) -> None:
    """Put each result beside the first."""
    from .speed_results import compare_speed

    first = results[0]
    for result in results:
        for text, base in zip(result.get("texts", ()), first.get("texts", ()), strict=True):
            text["ratio"] = text["perplexity"] / base["perplexity"]
            if text["ids_sha256"] != base["ids_sha256"]:
                print(
                    f"ghostlayers: warning: {result['path']} scored other token ids of "
                    f"{text['source']} than {first['path']}: the two perplexities are not "
                    "comparable",
                    file=sys.stderr,
                )
        if "texts" in result:
            result["ratio"] = result["texts"][0]["ratio"]
        if "speed" in result:
            compare_speed(result["speed"], first["speed"])


def _print_eval(results: Sequence[dict[str, Any]]) -> None:
    from .eval_tables import perplexity_table, speed_table, task_table

    parts = []
    if "perplexity" in results[0]:
        parts.append(perplexity_table(results))
    if "tasks" in results[0]:
        parts.append(task_table(results))
    if "speed" in results[0]:
        parts.append(speed_table(results))
    print("\n\n".join(parts))


__all__ = ["SPEED_DEFAULTS", "run_eval"]
