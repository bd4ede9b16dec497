"""`ghostlayers compare`: a grid of cuts and operators on one model, or a configuration file."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import distributed
from .compare_config import SHARED_FIELDS, VOLATILE_FIELDS, CompareConfig, smoke_config
from .compare_file import CompareRun, read_config, runs_of
from .config import PruneConfig
from .errors import CheckpointError
from .records import plain, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .compare_results import CompareResults, RunLine
    from .loading import ModelSource
    from .speed_results import SpeedSettings
    from .tasks import LoadedTasks

SMOKE_TEXT = "smoke.txt"


def add_compare_flags(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Add the flags of `compare`: every setting, lists split by commas."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{model_help}, dense")
    parser.add_argument(
        "--model", dest="model_flag", metavar="MODEL", help="stands for the models of --config"
    )
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--config", metavar="FILE", help="settings in YAML; flags go over them")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, and local text for texts of the Hub"
    )
    shared = [item for item in fields(PruneConfig) if item.name in SHARED_FIELDS]
    own = [item for item in fields(CompareConfig) if item.name != "shared"]
    for item in (*own, *shared):
        kind, text = str(item.type), item.metadata["help"]
        default = item.default
        if isinstance(default, tuple):
            text += ", split by commas" if item.name != "layers" else ""
            default = ",".join(map(str, default))
        if default not in (None, "", False):
            text += f" (default: {default})"
        flag, text = f"--{item.name.replace('_', '-')}", text.replace("%", "%%")
        keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if kind == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
        else:
            parser.add_argument(flag, type=_reader(kind, item.name), **keywords)


def _reader(kind: str, name: str) -> Any:
    """Return what turns a flag's text into a value."""
    if kind.startswith("tuple"):
        split = ";" if name == "layers" else ","
        each: Any = int if "int" in kind else str

        def read(text: str) -> tuple[Any, ...]:
            return tuple(each(part.strip()) for part in text.split(split) if part.strip())

        read.__name__ = "list of numbers" if each is int else "list"
        return read
    return {"int": int, "int | None": int, "float": float, "float | None": float}.get(kind, str)


def run_compare(args: argparse.Namespace, _settings: dict[str, Any]) -> dict[str, Any]:
    """Measure what is asked for; everything is checked before a model is loaded."""
    from .commands import _check_json_target, _quiet_transformers

    names = {item.name for item in fields(CompareConfig)} | set(SHARED_FIELDS)
    given = {name: value for name, value in vars(args).items() if name in names}
    file = {} if args.config is None else read_config(args.config)
    runs = runs_of(file, given, args.model_flag or args.model)
    for run in runs if not args.smoke else ():
        _ = run.config
    _check_json_target(args.json)
    out = Path(args.out).expanduser()
    _check_folder(out)
    _quiet_transformers()
    prepared = [_Prepared(run, out, args, set(given), several=len(runs) > 1) for run in runs]
    found = [each.measure() for each in prepared]
    return {"results": found, "versions": versions()}


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"-o {str(out)!r} is a file. Give a folder.")
    parent = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not os.access(parent, os.W_OK):
        raise CheckpointError(f"-o {str(out)!r} cannot be written.")


class _Prepared:
    """One run whose settings fit the model; no weight is loaded yet."""

    def __init__(
        self,
        run: CompareRun,
        out: Path,
        args: argparse.Namespace,
        given: set[str],
        *,
        several: bool,
    ) -> None:
        from .calibration import resolve_window
        from .decoder import num_decoder_layers
        from .loading import GHOST_MODEL_TYPE, load_config, locate
        from .plan import check_num_remove, parse_layers

        self.run, self.args = run, args
        self.source = locate(run.model)
        model_config = load_config(self.source)
        if model_config.model_type == GHOST_MODEL_TYPE:
            raise CheckpointError(
                f"MODEL {run.model!r} has operators already. Compare cuts of the dense model."
            )
        depth = num_decoder_layers(model_config)
        self.folder = out / _folder_name(run) if several else out
        self.config = self._config(depth, given)
        for budget in self.config.num_remove:
            check_num_remove(budget, depth, self._allowed(model_config))
        for text in self.config.layers:
            parse_layers(text, depth)
        resolve_window(dict(self.config.shared).get("window"), model_config)
        self.window = resolve_window(self.config.eval_window, model_config)
        self.speed = self._speed(model_config)
        self.tasks = self._tasks()

    def _config(self, depth: int, given: set[str]) -> CompareConfig:
        if not self.args.smoke:
            return self.run.config
        text = self.folder / SMOKE_TEXT
        self.folder.mkdir(parents=True, exist_ok=True)
        if not text.exists():
            text.write_text(_own_text(), encoding="utf-8")
        return smoke_config(self.run.config, depth, str(text), given)

    def _allowed(self, model_config: Any) -> tuple[int, ...]:
        from .pipeline import allowed_layers

        return allowed_layers(self.config.prune_config(num_remove=1), model_config)

    def _speed(self, model_config: Any) -> SpeedSettings | None:
        from .speed_results import SpeedSettings, check_lengths

        if not self.config.speed:
            return None
        names = ("batch_sizes", "lengths", "new_tokens", "repeats", "warmup")
        settings = SpeedSettings.parse(**{n: getattr(self.config, f"speed_{n}") for n in names})
        check_lengths(settings, model_config)
        return settings

    def _tasks(self) -> LoadedTasks | None:
        if self.config.tasks is None:
            return None
        from .tasks import load_tasks

        config = self.config
        loaded = load_tasks(
            config.tasks or "", include_path=config.include_path, num_fewshot=config.num_fewshot
        )
        for name, reason in loaded.not_run.items():
            print(f"ghostlayers: warning: task {name} is not run: {reason}", file=sys.stderr)
        return loaded

    def measure(self) -> dict[str, Any]:
        """Load the model, measure, print and write the tables."""
        from .compare import Comparison, check_same_run
        from .compare_evaluator import Evaluator
        from .compare_results import ResultsFile
        from .compare_scoring import TextScorer, scoring_windows
        from .compare_tables import tables, write_tables
        from .fingerprint import fingerprint
        from .loading import load_model, load_tokenizer

        config, shared = self.config, self.config.prune_config(num_remove=1)
        file = ResultsFile(self.folder)
        tokenizer = load_tokenizer(self.source)
        windows = scoring_windows(tokenizer, config, self.window) if config.texts else None
        model = load_model(self.source, dtype=shared.dtype, device=shared.device)
        texts = None
        if windows is not None:
            with distributed.alone():  # whole cells are shared, not windows
                texts = TextScorer(
                    model,
                    windows,
                    batch_size=config.batch_size,
                    max_bytes=config.memory("states_memory"),
                )
        if file.results.run is None:
            file.add(_run_line(self.run, config, self.source, model, self.args))
        else:
            check_same_run(
                file.results, config.to_dict(), fingerprint(model), VOLATILE_FIELDS, self.folder
            )
        evaluator = Evaluator(config, tokenizer, texts, self.tasks, self.speed)
        comparison = Comparison(
            model, tokenizer, config, file, evaluator, source=self.source, say=_say
        )
        results = comparison.run()
        if distributed.is_main():
            write_tables(results, self.folder)
        print("\n\n".join(table.text() for table in tables(results)))
        print(f"\nwritten to {self.folder}")
        return _summary(results, self.folder)


def _say(line: str) -> None:
    print(f"ghostlayers: {line}", file=sys.stderr, flush=True)


def _summary(results: CompareResults, folder: Path) -> dict[str, Any]:
    refused = [cell for cell in results.cells if cell.refused]
    return {
        "out": str(folder),
        "model": None if results.run is None else results.run.model["name"],
        "cuts": len(results.cuts),
        "cells": len(results.cells),
        "refused": len(refused) + sum(cut.refused is not None for cut in results.cuts),
    }


def _folder_name(run: CompareRun) -> str:
    budgets = "-".join(map(str, run.config.num_remove))
    return f"{Path(run.model).name}-{budgets}".strip("-")


def _own_text() -> str:
    """Return text that is there without network: this package's own source."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def _run_line(
    run: CompareRun,
    config: CompareConfig,
    source: ModelSource,
    model: PreTrainedModel,
    args: argparse.Namespace,
) -> RunLine:
    from .compare_results import RunLine
    from .decoder import decoder_layers, text_config
    from .fingerprint import fingerprint

    return RunLine(
        model={
            "name": Path(source.name).name if Path(source.name).exists() else source.name,
            "architecture": type(model).__name__,
            "num_layers": len(decoder_layers(model)),
            "hidden_size": int(text_config(model.config).hidden_size),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "fingerprint": fingerprint(model),
        },
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        settings=plain(config.to_dict()),
        machine=_machine(),
        title=run.title,
        expected=plain(run.expected),
        commit=_commit(),
        command=list(args.command_line),
    )


def _machine() -> dict[str, Any]:
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "gpu": gpu, "threads": torch.get_num_threads()}


def _commit() -> str | None:
    """Return the commit of the source tree that this package runs from; None if installed."""
    here = Path(__file__).resolve().parent
    asked = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no repository
    top, commit = found.stdout.split("\n")[:2]
    return commit if Path(top) / "src" / here.name == here else None


__all__ = ["add_compare_flags", "run_compare"]
