"""`ghostlayers compare`: a grid of cuts and operators on one model, or a configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import distributed
from .compare_config import SHARED_FIELDS, VOLATILE_FIELDS, CompareConfig, smoke_config
from .compare_file import CompareRun, read_config, runs_of
from .compare_lock import SMOKE_TEXT, locked
from .config import PruneConfig
from .errors import CheckpointError, RefusedError
from .flags import add_placement_flags, metavar
from .records import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .calibration import Windows
    from .compare_results import CompareResults, ResultsFile
    from .placement import Placement
    from .speed_results import SpeedSettings
    from .tasks import LoadedTasks


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
            place = "CUT;..." if item.name == "layers" else metavar(kind)
            parser.add_argument(flag, metavar=place, type=_reader(kind, item.name), **keywords)
    add_placement_flags(parser)


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
    from .commands import check_json_target, placement_of_run, quiet_transformers

    names = {item.name for item in fields(CompareConfig)} | set(SHARED_FIELDS)
    given = {name: value for name, value in vars(args).items() if name in names}
    file = {} if args.config is None else read_config(args.config)
    runs = runs_of(file, given, args.model_flag or args.model)
    devices = [dict(run.config.shared).get("device", "auto") for run in runs]
    placements = [placement_of_run(args, device) for device in devices]
    check_json_target(args.json)
    out = Path(args.out).expanduser()
    _check_folder(out)
    quiet_transformers()
    with ExitStack() as stack:
        prepared = []
        for run, folder, placement in zip(runs, _folders(runs, out), placements, strict=True):
            stack.enter_context(locked(folder))
            prepared.append(_Prepared(run, folder, args, placement, set(given)))
        found = [each.measure() for each in prepared]
    summaries = [_summary(results, folder) for results, folder in found]
    value: dict[str, Any] = {"results": summaries, "versions": versions()}
    reasons = [reason for results, _ in found for reason in results.refusals]
    if reasons and not any(results.measured for results, _ in found):
        what = f"all {len(reasons)} cuts or cells were refused, the first: {reasons[0]}"
        raise RefusedError(what, value)
    return value


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"-o {str(out)!r} is a file. Give a folder.")
    parent = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"-o {str(out)!r} cannot be written.")


class _Prepared:
    """One run whose settings fit the model; no weight is loaded yet."""

    def __init__(
        self,
        run: CompareRun,
        folder: Path,
        args: argparse.Namespace,
        placement: Placement,
        given: set[str],
    ) -> None:
        from .decoder import num_decoder_layers
        from .loading import GHOST_MODEL_TYPE, load_config, locate

        self.run, self.args, self.placement = run, args, placement
        self.source = locate(run.model)
        model_config = load_config(self.source)
        if model_config.model_type == GHOST_MODEL_TYPE:
            raise CheckpointError(
                f"MODEL {run.model!r} has operators already. Compare cuts of the dense model."
            )
        depth = num_decoder_layers(model_config)
        self.folder = folder
        self.config = self._config(depth, given)
        self.window = self._check(depth, model_config)
        self.speed = self._speed(model_config)
        self.tasks = self._tasks()

    def _check(self, depth: int, model_config: Any) -> int:
        """Check the settings against the model; return the window that is scored."""
        import torch

        from .calibration import resolve_window
        from .decoder import text_config
        from .devices import resolve_device
        from .operators import RANKED, check_size
        from .plan import check_num_remove, parse_layers

        config, shared = self.config, dict(self.config.shared)
        for budget in config.num_remove:
            check_num_remove(budget, depth, self._allowed(model_config))
        for text in config.layers:
            parse_layers(text, depth)
        if set(RANKED) & set(config.recover):
            check_size(shared.get("rank"), int(text_config(model_config).hidden_size))
        if (device := shared.get("moments_device", "auto")) != "auto":
            resolve_device(device, option="moments_device", dtype=torch.float64)
        resolve_window(shared.get("window"), model_config)
        return resolve_window(config.eval_window, model_config, option="eval_window")

    def _config(self, depth: int, given: set[str]) -> CompareConfig:
        if not self.args.smoke:
            return self.run.config
        text = self.folder / SMOKE_TEXT
        with distributed.section():
            if not text.exists() and distributed.is_main():
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

    def measure(self) -> tuple[CompareResults, Path]:
        """Load the model, measure, print and write the tables."""
        from .compare import Comparison
        from .compare_evaluator import Evaluator
        from .compare_results import ResultsFile
        from .compare_scoring import TextScorer, scoring_windows
        from .compare_tables import tables, write_tables
        from .loading import load_model, load_tokenizer

        config, shared = self.config, self.config.prune_config(num_remove=1)
        file = ResultsFile(self.folder)
        tokenizer = load_tokenizer(self.source)
        windows = scoring_windows(tokenizer, config, self.window) if config.texts else None
        model = load_model(
            self.source, dtype=shared.dtype, device=shared.device, placement=self.placement
        )
        texts = None
        if windows is not None:
            with distributed.alone():  # whole cells are shared, not windows
                texts = TextScorer(
                    model,
                    windows,
                    batch_size=config.batch_size,
                    max_bytes=config.memory("states_memory"),
                )
        self._begin(file, model, windows or {})
        evaluator = Evaluator(config, tokenizer, texts, self.tasks, self.speed)
        comparison = Comparison(
            model, tokenizer, config, file, evaluator, source=self.source, say=_say
        )
        results = comparison.run()
        if distributed.is_main():
            write_tables(results, self.folder)
        print("\n\n".join(table.text() for table in tables(results)))
        print(f"\nwritten to {self.folder}")
        if refused := len(results.refusals):
            asked = refused + len(results.measured)
            print(f"{refused} of {asked} cuts or cells were refused; results.jsonl says why")
        return results, self.folder

    def _begin(
        self, file: ResultsFile, model: PreTrainedModel, windows: Mapping[str, Windows]
    ) -> None:
        """Check that this run continues what is there; store what it is where that is new."""
        from .compare_growth import check_continues, check_scored, grown_line
        from .compare_provenance import run_line

        line, before = run_line(self.run, self.config, self.source, model, self.args), None
        if file.results.run is not None:
            before, settings = file.results.run, self.config.to_dict()
            grows = check_continues(
                file.results, settings, line.model, VOLATILE_FIELDS, self.folder
            )
            hashes = {name: each.ids_sha256 for name, each in windows.items()}
            check_scored(file.results, hashes, self.folder)
            if not grows and before.versions == line.versions:
                return
        file.start(grown_line(line, before))


def _say(line: str) -> None:
    print(f"ghostlayers: {line}", file=sys.stderr, flush=True)


def _summary(results: CompareResults, folder: Path) -> dict[str, Any]:
    return {
        "out": str(folder),
        "model": None if results.run is None else results.run.model["name"],
        "cuts": len(results.cuts),
        "cells": len(results.cells),
        "refused": len(results.refusals),
    }


def _folders(runs: Sequence[CompareRun], out: Path) -> list[Path]:
    """Return a folder for each run: `out` itself for one, else folders of different names in it."""
    if len(runs) == 1:
        return [out]
    found: list[Path] = []
    for run in runs:
        budgets = "-".join(map(str, run.config.num_remove))
        name = folder = out / f"{Path(run.model).name}-{budgets}".strip("-")
        same = 1
        while folder in found:
            same += 1
            folder = name.with_name(f"{name.name}-run{same}")
        found.append(folder)
    return found


def _own_text() -> str:
    """Return text that is there without network: this package's own source."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


__all__ = ["add_compare_flags", "run_compare"]
