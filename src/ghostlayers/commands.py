"""What each verb of the command line does. Tables go to stdout, everything else to stderr.

Each returns the JSON value of `--json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import distributed
from .config import PruneConfig
from .errors import CheckpointError
from .finetune_command import finetune_rows
from .placement import FLAGS, Placement
from .plan import format_layers
from .records import has_operators, plain, read_record, write_json
from .resume import remove_work_folder, resumable, work_folder
from .tables import bar, boundary_table, heat_map, rank_table, render_table, search_table
from .text_sources import check_source

if TYPE_CHECKING:
    from .scores import Scores


def write_result(target: str | None, value: dict[str, Any]) -> None:
    """Write a verb's result as JSON to a file, or to stdout for `-`."""
    if target == "-":
        print(json.dumps(plain(value), indent=2))
    elif target is not None:
        write_json(Path(target), value)


def check_json_target(target: str | None) -> None:
    """Check, before any work, that the file of `--json` can be written."""
    if target in (None, "-"):
        return
    path = Path(str(target)).resolve()
    if not path.parent.is_dir():
        raise CheckpointError(f"--json {target!r}: its folder does not exist.")
    if path.is_dir():
        raise CheckpointError(f"--json {target!r} is a folder. Give a file name.")


def quiet_transformers() -> None:
    """Show errors of transformers alone."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _check_calibration(config: PruneConfig) -> None:
    if config.calibration != "self":
        check_source(config.calibration)


def placement_of_run(args: argparse.Namespace, device: str) -> Placement:
    """Read the flags that say where weights and states go."""
    return Placement.parse(**{name: getattr(args, name) for name in FLAGS}, device=device)


def run_analyze(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a model and print what each selector would remove."""
    config = PruneConfig(num_remove=1, **settings)
    placement = placement_of_run(args, config.device)
    _check_calibration(config)
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


def _start(
    args: argparse.Namespace, given: dict[str, Any]
) -> tuple[Scores | None, dict[str, Any] | None, dict[str, Any], dict[str, Any]]:
    """Read what a run starts from: the scores, the record, settings as given and completed."""
    if args.like is not None:
        from .like_record import read_like, settings_like

        if args.scores is not None:
            raise CheckpointError("--like and --scores are given. Allowed: one of them.")
        like = read_like(args.like)
        settings = settings_like(like, given)
        return None, like, settings, settings
    if args.scores is None:
        return None, None, given, given
    from .scores_file import load_scores

    scores = load_scores(args.scores)
    return scores, None, given, scores.settings_with(given)


def run_prune(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Prune a model and write the checkpoint."""
    scores, like, given, settings = _start(args, settings)
    config = PruneConfig(**settings)
    placement = placement_of_run(args, config.device)
    if scores is None or "calibration" in given:
        _check_calibration(config)
    check_json_target(args.json)
    from .checkpoint import check_output, save_pruned

    out = check_output(args.out, force=args.force)
    _check_push(args.push_to_hub)
    quiet_transformers()
    from .budgets import check_reachable
    from .calibration import resolve_window
    from .decoder import pruned_config
    from .dry_run import describe_run
    from .loading import GHOST_MODEL_TYPE, load_config, load_model, load_tokenizer, locate
    from .pipeline import allowed_layers, prune, prune_without_weights, resolve_plan
    from .quantized import check_quantized, is_quantized

    source = locate(args.model)
    check_output(out, force=args.force, source=source)
    model_config = load_config(source)
    if model_config.model_type == GHOST_MODEL_TYPE:
        raise CheckpointError(
            f"MODEL {args.model!r} has operators already. Prune the dense model it was made from."
        )
    plan = resolve_plan(config, model_config)
    check_quantized(config, model_config)
    check_reachable(config, model_config, allowed_layers(config, model_config))
    if plan is not None:
        pruned_config(model_config, plan)
    window = resolve_window(config.window, model_config)
    if args.dry_run:
        num_remove = config.num_remove if plan is None else len(plan.removed)
        allowed = allowed_layers(config, model_config)
        text, value = describe_run(config, model_config, window, num_remove, allowed)
        print(text)
        return value
    tokenizer, work = load_tokenizer(source), work_folder(args.resume_dir, out, "prune")
    if is_quantized(model_config) and plan is not None:
        if scores is not None:
            raise CheckpointError(
                "--scores: with --layers nothing of a quantized model is measured. Leave it out."
            )
        result = prune_without_weights(model_config, plan, config)
        result = replace(result, tokenizer=tokenizer)
    else:
        model = load_model(source, dtype=config.dtype, device=config.device, placement=placement)
        with resumable(work, args.save_every):
            result = prune(model, tokenizer, scores=scores, source=source, **given)
    if like is not None:
        from .like_record import check_like

        check_like(result.record, like)
    if distributed.everyone(True) and not distributed.is_main():  # nobody checks OUT any more
        return {}
    for line in result.warnings:
        print(f"ghostlayers: warning: {line}", file=sys.stderr)
    save_pruned(result, out, source=source, dtype=config.dtype, force=args.force)
    remove_work_folder(work)
    record = read_record(out)
    _print_pruned(record, out)
    return {"out": str(out), **_push(out, args.push_to_hub), **record}


def _check_push(repo: str | None) -> None:
    if repo is not None:
        from .hub_upload import check_push

        check_push(repo)


def _push(out: Path, repo: str | None) -> dict[str, Any]:
    """Upload a finished checkpoint if a repository was named; return what the JSON says of it."""
    if repo is None:
        return {}
    from .hub_upload import push_to_hub

    url = push_to_hub(out, repo)
    print(f"\nuploaded: {url}")
    return {"uploaded": url}


def _print_pruned(record: dict[str, Any], out: Path) -> None:
    from .model_card import load_snippet
    from .operators import NO_OPERATOR

    if record["search"] is not None:
        print(search_table(record["search"]) + "\n")
    print(f"budget: {record['budget']['reason']}")
    print(
        f"removed {len(record['removed'])} of {record['num_layers']} layers "
        f"({record['selector']}): {format_layers(record['removed'])}"
    )
    if record["recover"] != NO_OPERATOR:
        print(boundary_table(record["boundaries"]))
    if record["config"]["rank"] is not None:
        print("\nerror by rank of the map:\n" + rank_table(record["boundaries"]))
    print(f"\nwritten to {out}. Load it:\n")
    print(load_snippet(str(out), has_operators=has_operators(record)))


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


__all__ = ["run_analyze", "run_info", "run_prune", "write_result"]
