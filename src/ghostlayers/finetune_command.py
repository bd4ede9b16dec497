"""`ghostlayers finetune`: distil the dense model into a pruned checkpoint and write another one."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, GhostlayersError, UnsupportedModelError
from .finetune_config import DEFAULT_WINDOW, FinetuneConfig
from .flags import add_config_flags, add_placement_flags
from .placement import Placement
from .records import has_operators, read_record
from .tables import render_table
from .text_sources import check_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .calibration import Windows
    from .distillation import FinetuneResult
    from .loading import ModelSource
    from .teacher_logits import TeacherLogits
TEACHER_FLAGS = ("device_map", "max_memory", "offload_folder")


def add_finetune_flags(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Add the flags of `finetune`."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint written by prune")
    parser.add_argument(
        "--teacher", required=True, metavar="MODEL", help=f"the dense model: {model_help}"
    )
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="folder to write")
    add_config_flags(parser, config=FinetuneConfig)
    add_placement_flags(parser, TEACHER_FLAGS, "a teacher larger than memory")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="folder for the teacher's logits, which stay there (default: in a work folder beside "
        "OUT, .OUT.finetune, that holds the state of an interrupted run as well and goes when OUT "
        "is written)",
    )
    parser.add_argument(
        "--keep-cache", action="store_true", help="keep the teacher's logits in the work folder"
    )


def run_finetune(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Distil and write the checkpoint; the JSON value is its record."""
    config = FinetuneConfig(**settings)
    _placement(args)  # its faults come before any work
    from .checkpoint import load_pruned
    from .commands import check_json_target, quiet_transformers
    from .output_folder import check_output

    if config.calibration != "self":
        check_source(config.calibration)
    check_json_target(args.json)
    out = check_output(args.out, force=args.force)
    folder = Path(args.path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"PATH {args.path!r} is no folder. Give a checkpoint.")
    record = read_record(folder)
    quiet_transformers()
    from .loading import load_config, locate
    from .trained_parameters import check_trainable

    source, teacher_source = locate(str(folder)), locate(args.teacher)
    for given in (source, teacher_source):
        check_output(out, force=args.force, source=given)
    check_trainable(config, has_operators=has_operators(record), what=f"PATH {args.path!r}")
    _check_teacher(record, load_config(source), load_config(teacher_source), args.teacher)
    from accelerate import PartialState

    PartialState(cpu=config.device == "cpu")  # each process takes its own device before it loads
    work = out.resolve().parent / f".{out.name}.finetune"
    with _nothing_left(work):
        cache, windows = _teacher_logits(args, config, source, teacher_source, work)
    student = load_pruned(folder, device=config.device)
    from .distillation import finetune
    from .finetuned_checkpoint import save_finetuned

    work.mkdir(parents=True, exist_ok=True)
    is_main = PartialState().is_main_process
    on_row = _print_row if is_main else None
    result = finetune(student.model, cache, windows, config, work=work, on_row=on_row)
    if not is_main:
        args.json = None
        return {}
    save_finetuned(result, student, out, source=source, teacher=args.teacher, force=args.force)
    _print_result(result, out)
    _clean(work, keep_cache=args.keep_cache)
    return {"out": str(out), **read_record(out)}


def _placement(args: argparse.Namespace) -> Placement:
    """Read where the teacher's weights go; `--device` is that of the student beside a map."""
    return Placement.parse(**{name: getattr(args, name) for name in TEACHER_FLAGS})


def _check_teacher(record: dict[str, Any], own: Any, other: Any, name: str) -> None:
    """Refuse a teacher of another vocabulary; warn of one of another depth."""
    from .decoder import num_decoder_layers, text_config
    from .distillation import check_vocabulary

    sizes = [getattr(text_config(config), "vocab_size", 0) for config in (own, other)]
    check_vocabulary(*sizes)
    depth = num_decoder_layers(other)
    if depth != record["num_layers"]:
        print(
            f"ghostlayers: warning: the teacher {name} has {depth} decoder layers, the dense "
            f"model of the checkpoint had {record['num_layers']}",
            file=sys.stderr,
        )


def _teacher_logits(
    args: argparse.Namespace,
    config: FinetuneConfig,
    source: ModelSource,
    teacher_source: ModelSource,
    work: Path,
) -> tuple[TeacherLogits, Windows]:
    """Make the windows and run the teacher on them; it is in memory only meanwhile."""
    from accelerate import PartialState

    from .calibration import resolve_window, sampled_windows, text_windows
    from .loading import load_model, load_tokenizer
    from .teacher_logits import cache_bytes, cache_teacher

    tokenizer = load_tokenizer(teacher_source)
    _check_tokenizers(tokenizer, source)
    teacher = load_model(teacher_source, device=config.device, placement=_placement(args))
    longest = resolve_window(config.window, teacher.config)
    window = min(longest, DEFAULT_WINDOW) if config.window is None else longest
    if config.calibration == "self":
        windows = sampled_windows(
            teacher, tokenizer, num_windows=config.num_windows, window=window, seed=config.seed
        )
    else:
        windows = text_windows(
            tokenizer, config.calibration, num_windows=config.num_windows, window=window
        )
    size = cache_bytes(len(windows.ids), windows.ids.shape[1], config.top_k)
    folder = Path(args.cache).expanduser() if args.cache else work / "teacher"
    print(
        f"teacher logits: {windows.ids.shape[0]} windows x {windows.ids.shape[1]} tokens x "
        f"{config.top_k} x 6 bytes = {size / 1e6:.1f} MB in {folder}"
    )
    with PartialState().main_process_first():
        cache = cache_teacher(
            teacher,
            windows,
            folder,
            top_k=config.top_k,
            batch_size=config.batch_size,
            replace_stale=args.cache is None,
        )
    return cache, windows


@contextmanager
def _nothing_left(work: Path) -> Iterator[None]:
    """Remove the work folder of a run that is refused before there are any logits in it."""
    try:
        yield
    except GhostlayersError:
        if work.is_dir() and not any(work.rglob("*.safetensors")):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _check_tokenizers(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> None:
    from .loading import load_tokenizer

    if not (source.folder / "tokenizer_config.json").is_file():
        return
    own, other = load_tokenizer(source).get_vocab(), tokenizer.get_vocab()
    if own != other:
        differ = len(own.items() ^ other.items())
        raise UnsupportedModelError(
            f"the tokenizers of teacher and checkpoint differ in {differ} entries. Allowed: the "
            "dense model that the checkpoint was made from."
        )


def _print_row(row: dict[str, Any]) -> None:
    train = "" if row["train_kl"] is None else f", train KL {row['train_kl']:.4f}"
    print(f"step {row['step']}{train}, held-out KL {row['held_out_kl']:.4f}", file=sys.stderr)


def _print_result(result: FinetuneResult, out: Path) -> None:
    rows = [
        [
            str(row["step"]),
            "-" if row["train_kl"] is None else f"{row['train_kl']:.4f}",
            f"{row['held_out_kl']:.4f}",
        ]
        for row in result.history
    ]
    print(render_table(["step", "train KL", "held-out KL"], rows) + "\n")
    found = result.record
    rows = [
        [
            name,
            f"{found[f'held_out_kl_{when}']:.4f}",
            f"{found[f'held_out_perplexity_{when}']:.4f}",
        ]
        for name, when in (("before", "before"), (f"step {found['best_step']}", "after"))
    ]
    print(render_table(["", "held-out KL", "perplexity"], rows))
    if not result.changed:
        print(
            "ghostlayers: warning: nothing was better than the start on the held-out windows; the "
            "weights are those of the checkpoint given in",
            file=sys.stderr,
        )
    print(f"\nwritten to {out}")


def finetune_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return what `info` says of a distillation; nothing where there was none."""
    found = record.get("finetune")
    if found is None:
        return []
    before, after = (found[f"held_out_kl_{when}"] for when in ("before", "after"))
    steps = f"{found['config']['train']}, {found['best_step']} steps"
    return [["finetuned", f"{steps}, held-out KL {before:.4f} -> {after:.4f}"]]


def _clean(work: Path, *, keep_cache: bool) -> None:
    """Remove the state, and the teacher's logits unless they are to stay."""
    from .training import STATE_FILE

    (work / STATE_FILE).unlink(missing_ok=True)
    if not keep_cache or not any(work.iterdir()):
        shutil.rmtree(work)
