"""What each verb of the command line does. Tables go to stdout, everything else to stderr.

Each returns the JSON value of `--json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import distributed
from .config import PruneConfig
from .errors import CheckpointError
from .finetune_command import finetune_rows
from .placement import FLAGS, Placement
from .plan import format_layers
from .records import plain, read_record, write_json
from .resume import remove_work_folder, resumable, work_folder
from .tables import bar, boundary_table, heat_map, rank_table, render_table
from .text_sources import check_source


def write_result(target: str | None, value: dict[str, Any]) -> None:
    """Write a verb's result as JSON to a file, or to stdout for `-`."""
    if target == "-":
        print(json.dumps(plain(value), indent=2))
    elif target is not None:
        try:
            write_json(Path(target).expanduser(), value)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"--json {target!r} cannot be written ({reason}).") from error


def check_json_target(target: str | None) -> None:
    """Check, before any work, that the file of `--json` can be written."""
    if target in (None, "-"):
        return
    path = Path(str(target)).expanduser().resolve()
    if not path.parent.is_dir():
        raise CheckpointError(f"--json {target!r}: its folder does not exist.")
    if path.is_dir():
        raise CheckpointError(f"--json {target!r} is a folder. Give a file name.")
    device = path.exists() and not path.is_file()
    if not os.access(path if device else path.parent, os.W_OK):
        raise CheckpointError(f"--json {target!r}: its folder cannot be written.")


def quiet_transformers() -> None:
    """Show errors of transformers alone."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def check_calibration(config: PruneConfig) -> None:
    """Check, before any work, that the calibration text is there."""
    if config.calibration != "self":
        check_source(config.calibration)


def placement_of_run(args: argparse.Namespace, device: str) -> Placement:
    """Read the flags that say where weights and states go."""
    return Placement.parse(**{name: getattr(args, name) for name in FLAGS}, device=device)


def run_analyze(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a model and print what each selector would remove."""
    config = PruneConfig(num_remove=1, **settings)
    placement = placement_of_run(args, config.device)
    check_calibration(config)
    check_json_target(args.json)
    quiet_transformers()
    from .analysis import analyze
    from .calibration import resolve_window
    from .decoder import num_decoder_layers
    from .loading import load_config, load_model, load_tokenizer, locate
    from .rank_errors import checked_cuts
    from .scores_file import check_scores_target

    if args.save is not None:
        check_scores_target(args.save, force=args.force)
    source = locate(args.model)
    model_config = load_config(source)
    num_decoder_layers(model_config)
    resolve_window(config.window, model_config)
    checked_cuts(args.rank_errors, model_config)
    tokenizer = load_tokenizer(source)
    work = work_folder(args.resume_dir, args.save, "analyze")
    model = load_model(source, dtype=config.dtype, device=config.device, placement=placement)
    with resumable(work, args.save_every):
        analysis = analyze(model, tokenizer, config, rank_errors=args.rank_errors)
    if distributed.everyone(True) and not distributed.is_main():  # nobody checks targets any more
        return {}
    if args.save is not None:
        analysis.save(args.save, force=args.force)
    remove_work_folder(work)
    similarity, windows = analysis.similarity, analysis.windows.record()
    print(
        f"{args.model}: {similarity.num_layers} decoder layers, {windows['windows']} windows of "
        f"{windows['window']} tokens of {windows['source']}\n"
        f"RLS {similarity.rls:.4f}: similarity is {analysis.locality}, lorp uses "
        f"{analysis.num_clusters} clusters\n"
    )
    influence = similarity.block_influence
    top = max(float(influence.max()), 1e-12)
    rows = [[str(i), f"{float(v):.4f}", bar(float(v) / top)] for i, v in enumerate(influence)]
    print(render_table(["layer", "block influence", ""], rows))
    names = list(analysis.selections)
    budgets = sorted({budget for by_budget in analysis.selections.values() for budget in by_budget})
    rows = [
        [str(k), *(format_layers(analysis.selections[name].get(k, ())) or "-" for name in names)]
        for k in budgets
    ]
    print("\n" + render_table(["remove", *names], rows))
    if analysis.recoverability is not None:
        print("\n" + heat_map(analysis.recoverability.error_after.tolist()))
    if by_rank := rank_table(analysis.rank_errors):
        print("\nghost: error of the state behind each cut by rank of the map:\n" + by_rank)
    if args.save is not None:
        print(f"\nscores written to {args.save}")
    return {"model": args.model, **analysis.to_dict()}


def run_info(args: argparse.Namespace, _settings: dict[str, Any]) -> dict[str, Any]:
    """Print the record of a pruned checkpoint."""
    folder = Path(args.path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"PATH {args.path!r} is no folder. Give a checkpoint.")
    check_json_target(args.json)
    record = read_record(folder)
    calibration = record.get("calibration") or {}
    source = record.get("source") or {}
    rows = [
        ["source", str(source.get("model"))],
        ["removed", f"{format_layers(record['removed'])} of {record['num_layers']} layers"],
        ["kept", format_layers(record["kept"])],
        ["budget", str((record.get("budget") or {}).get("reason"))],
        ["selector", record["selector"]],
        ["recovery", record["recover"]],
        ["dtype", str(record.get("dtype"))],
        *finetune_rows(record),
        ["calibration", str(calibration.get("source"))],
        ["calibration tokens", str(calibration.get("tokens"))],
        ["calibration ids sha256", str(calibration.get("ids_sha256"))],
        ["seed", str(record["seed"])],
        ["versions", ", ".join(f"{name} {v}" for name, v in record["versions"].items())],
    ]
    print(render_table(["", ""], rows))
    layers = [[str(new), str(old)] for new, old in enumerate(record["kept"])]
    print("\n" + render_table(["layer", "was layer"], layers))
    if record["recover"] != "none":
        print("\n" + boundary_table(record["boundaries"]))
    if by_rank := rank_table(record["boundaries"]):
        print("\nerror by rank of the map:\n" + by_rank)
    return record


__all__ = ["check_calibration", "check_json_target", "placement_of_run", "quiet_transformers"]
__all__ += ["run_analyze", "run_info", "write_result"]
