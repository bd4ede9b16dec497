"""`ghostlayers prune`: from the flags to a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import distributed
from .commands import (
    check_calibration,
    check_json_target,
    placement_of_run,
    quiet_transformers,
)
from .config import PruneConfig
from .errors import CheckpointError
from .like_record import check_like, check_like_model, read_like, settings_like
from .plan import format_layers
from .quantized import is_quantized
from .records import has_operators, read_record
from .resume import remove_work_folder, resumable, work_folder
from .tables import boundary_table, rank_table, search_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .loading import ModelSource
    from .pipeline import PruneResult
    from .placement import Placement
    from .plan import PruningPlan
    from .scores import Scores


@dataclass(frozen=True)
class _Start:
    """What a run starts from.

    Attributes:
        given: Settings of the command line, or of the record.
        settings: The same, completed by those of the scores.
        scores: Of `--scores`.
        like: The record of `--like`.
    """

    given: dict[str, Any]
    settings: dict[str, Any]
    scores: Scores | None = None
    like: dict[str, Any] | None = None


def _start(args: argparse.Namespace, given: dict[str, Any]) -> _Start:
    """Read the scores or the record that a run starts from."""
    if args.like is not None:
        if args.scores is not None:
            raise CheckpointError("--like and --scores are given. Allowed: one of them.")
        like = read_like(args.like)
        settings = settings_like(like, given)
        return _Start(settings, settings, like=like)
    if args.scores is None:
        return _Start(given, given)
    from .scores_file import load_scores

    scores = load_scores(args.scores)
    return _Start(given, scores.settings_with(given), scores)


def run_prune(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Prune a model and write the checkpoint; everything is checked before a weight is loaded."""
    start = _start(args, settings)
    config = PruneConfig(**start.settings)
    placement = placement_of_run(args, config.device)
    if start.scores is None or "calibration" in start.given:
        check_calibration(config)
    check_json_target(args.json)
    from .checkpoint import save_pruned
    from .output_folder import check_output

    out = check_output(args.out, force=args.force)
    _check_push(args.push_to_hub)
    quiet_transformers()
    from .loading import load_config, load_tokenizer, locate

    source = locate(args.model)
    check_output(out, force=args.force, source=source)
    model_config = load_config(source)
    plan, window = _check_model_config(config, model_config, args.model)
    if args.dry_run:
        return _dry_run(config, model_config, plan, window)
    tokenizer, work = load_tokenizer(source), work_folder(args.resume_dir, out, "prune")
    if plan is not None and is_quantized(model_config):
        result = replace(_copied(start, config, model_config, plan), tokenizer=tokenizer)
    else:
        with resumable(work, args.save_every):
            result = _measured(start, config, source, placement, tokenizer)
    if start.like is not None:
        check_like(result.record, start.like)
    if distributed.everyone(True) and not distributed.is_main():  # nobody checks OUT any more
        return {}
    _say(result.warnings)
    save_pruned(result, out, source=source, dtype=config.dtype, force=args.force)
    remove_work_folder(work)
    record = read_record(out)
    _print_pruned(record, out)
    return {"out": str(out), **_push(out, args.push_to_hub), **record}


def _say(warnings: Sequence[str]) -> None:
    for line in warnings:
        print(f"ghostlayers: warning: {line}", file=sys.stderr)


def _check_model_config(
    config: PruneConfig, model_config: Any, name: str
) -> tuple[PruningPlan | None, int]:
    """Check the settings against the model's config; return the named layers and the window."""
    from .budgets import check_reachable
    from .calibration import resolve_window
    from .decoder import pruned_config
    from .loading import GHOST_MODEL_TYPE
    from .pipeline import allowed_layers, resolve_plan
    from .quantized import check_quantized

    if model_config.model_type == GHOST_MODEL_TYPE:
        raise CheckpointError(
            f"MODEL {name!r} has operators already. Prune the dense model it was made from."
        )
    plan = resolve_plan(config, model_config)
    check_quantized(config, model_config)
    check_reachable(config, model_config, allowed_layers(config, model_config))
    if plan is not None:
        pruned_config(model_config, plan)
    return plan, resolve_window(config.window, model_config)


def _dry_run(
    config: PruneConfig, model_config: Any, plan: PruningPlan | None, window: int
) -> dict[str, Any]:
    """Print what would be done."""
    from .dry_run import describe_run
    from .pipeline import allowed_layers

    num_remove = config.num_remove if plan is None else len(plan.removed)
    allowed = allowed_layers(config, model_config)
    text, value = describe_run(config, model_config, window, num_remove, allowed)
    print(text)
    return value


def _copied(
    start: _Start, config: PruneConfig, model_config: Any, plan: PruningPlan
) -> PruneResult:
    """Prune a quantized model, of which no weight is read."""
    from .fingerprint import config_sha256
    from .pipeline import prune_without_weights

    if start.scores is not None:
        raise CheckpointError(
            "--scores: with --layers nothing of a quantized model is measured. Leave it out."
        )
    if start.like is not None:
        _say(check_like_model({"config_sha256": config_sha256(model_config)}, start.like))
    return prune_without_weights(model_config, plan, config)


def _measured(
    start: _Start,
    config: PruneConfig,
    source: ModelSource,
    placement: Placement,
    tokenizer: PreTrainedTokenizerBase,
) -> PruneResult:
    """Load a model and prune it; it is gone when this returns, but for what the result shares."""
    from .fingerprint import shared_fingerprint
    from .loading import load_model
    from .pipeline import prune

    model = load_model(source, dtype=config.dtype, device=config.device, placement=placement)
    if start.like is not None:
        _say(check_like_model(shared_fingerprint(model), start.like))
    return prune(model, tokenizer, scores=start.scores, source=source, **start.given)


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


__all__ = ["run_prune"]
