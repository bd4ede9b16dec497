"""The command line: analyze, prune, finetune, eval, compare, report, export, info."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import fields
from typing import Any, NoReturn

from . import __version__, distributed
from .config import PruneConfig
from .errors import GhostlayersError, RefusedError
from .finetune_config import FinetuneConfig
from .flags import add_config_flags, add_placement_flags
from .requirements import needing_transformers
from .run_flags import add_run_flags

VERBS = {
    "analyze": "measure a model and say what each selector would remove; changes nothing",
    "prune": "remove layers, repair the model, write a checkpoint",
    "finetune": "distil the dense model into a pruned checkpoint and write another one",
    "eval": "perplexity, task accuracy and speed of models, each beside the first one",
    "compare": "measure a grid of cuts and operators from few passes over the model",
    "report": "draw comparisons, checkpoints and measurements on one HTML page",
    "export": "write a checkpoint as a GGUF file for llama.cpp and what is built on it",
    "info": "say what was removed from a checkpoint and how it was repaired",
}
EXAMPLES = """examples:
  ghostlayers analyze org/model --calibration c4
  ghostlayers prune org/model -o pruned --num-remove 7 --calibration c4
  ghostlayers prune org/model -o pruned --sparsity 0.2 --scores scores.safetensors
  ghostlayers prune ./model.gguf -o pruned --layers 12-18,21 --calibration notes.txt
  ghostlayers finetune pruned --teacher org/model -o tuned --calibration c4
  ghostlayers eval org/model pruned --perplexity wikitext2
  ghostlayers eval org/model pruned --tasks paper --speed
  ghostlayers compare org/model --num-remove 3,5,7 --calibration c4 --perplexity wikitext2 -o grid
  ghostlayers report grid -o report.html
  ghostlayers export pruned --format gguf -o pruned.gguf --verify
  ghostlayers info pruned
"""
ANALYZE_FIELDS = (
    "num_clusters",
    "cosine_over",
    "protect_first",
    "protect_last",
    "calibration",
    "num_windows",
    "window",
    "batch_size",
    "dtype",
    "device",
    "seed",
)
# Verbs whose work several processes share.
SHARED_VERBS = ("analyze", "prune", "eval", "compare")
SAVING_VERBS = ("analyze", "prune")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line.

    Attributes:
        verbs: The parsers of its verbs, by name.
    """

    verbs: dict[str, _Parser]

    def error(self, message: str) -> NoReturn:
        if distributed.launched_rank():
            self.exit(2)  # the first process prints it
        self.exit(2, f"ghostlayers: error: {message}. See: {self.prog} --help\n")

    def parse_args(self, *args: Any, **keywords: Any) -> Any:
        """Parse; of options that the verb does not have, name the nearest one that it has."""
        found, unknown = self.parse_known_args(*args, **keywords)
        if unknown:
            verb = self.verbs[found.verb]
            verb.error(f"unrecognized arguments: {' '.join(unknown)}{verb.nearest(unknown)}")
        return found

    def nearest(self, unknown: Sequence[str]) -> str:
        """Return a question that names the options nearest to unknown ones."""
        names = [name.partition("=")[0] for name in unknown if name.startswith("--")]
        near = [difflib.get_close_matches(name, self._option_string_actions, 1) for name in names]
        found = [match for matches in near for match in matches]
        return f" (did you mean {', '.join(found)}?)" if found else ""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs; imports no torch."""
    from .compare_command import add_compare_flags
    from .eval_command import add_eval_flags
    from .export_command import add_export
    from .finetune_command import add_finetune_flags
    from .report_command import add_report_flags

    parser = _Parser(
        prog="ghostlayers",
        description="Make a large language model shallower without training, and keep it working.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ghostlayers {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    added = parser.verbs = {}
    for verb, text in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument(
            "--json",
            metavar="FILE",
            help="write the result as JSON ('-': stdout, and tables go to stderr)",
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        added[verb] = sub

    model_help = "Hub id, local checkpoint folder, or .gguf file"
    _add_analyze_flags(added["analyze"], model_help)
    _add_prune_flags(added["prune"], model_help)
    add_finetune_flags(added["finetune"], model_help)
    add_eval_flags(added["eval"], model_help)
    add_compare_flags(added["compare"], model_help)
    add_report_flags(added["report"])
    add_export(added["export"])

    for verb in SHARED_VERBS:
        add_run_flags(added[verb], saves=verb in SAVING_VERBS)
    added["info"].add_argument("path", metavar="PATH", help="a checkpoint written by prune")
    return parser


def _add_analyze_flags(parser: argparse.ArgumentParser, model_help: str) -> None:
    parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument(
        "--save", metavar="FILE", help="write the scores (.safetensors) for prune --scores"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the file of --save if it exists"
    )
    parser.add_argument(
        "--rank-errors",
        metavar="LAYERS",
        action="append",
        default=[],
        help="also fit ghost at these cuts (12-18,21 are two; may be repeated) and show its error "
        "by rank: what prune --rank would cost",
    )
    add_config_flags(parser, ANALYZE_FIELDS)
    add_placement_flags(parser)


def _add_prune_flags(parser: argparse.ArgumentParser, model_help: str) -> None:
    parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--scores",
        metavar="FILE",
        help="scores from analyze --save: no first sweep; calibration settings that are not given "
        "are those of the scores",
    )
    add_config_flags(parser)
    parser.add_argument(
        "--like",
        metavar="RECORD",
        help="a checkpoint, or its ghostlayers.json: the same settings, and the same layers, "
        "operators and calibration tokens or nothing is written",
    )
    add_placement_flags(parser)
    parser.add_argument(
        "--push-to-hub",
        metavar="REPO",
        help="upload OUT to owner/name on the Hub once it is written (default: no upload)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--dry-run", action="store_true", help="check and print the settings; load no weights"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit status: 0; 2 for an error that the user can mend; 130 after Ctrl-C; 141 when nobody
        reads the output any more.
    """
    if not sys.stderr.isatty() or distributed.launched_rank():
        os.environ.setdefault("TQDM_DISABLE", "1")
    args = build_parser().parse_args(argv)
    args.command_line = list(sys.argv[1:] if argv is None else argv)
    warnings.simplefilter("default" if args.debug else "ignore")
    try:
        with needing_transformers():
            status = _run(args)
            sys.stdout.flush()
            return status
    except GhostlayersError as error:
        if args.debug:
            raise
        if not error.repeated:
            print(f"ghostlayers: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output is gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as shells say of a process that ended by SIGPIPE
    except OSError as error:  # a full disk, a folder that may not be read, a name too long
        if args.debug:
            raise
        where = "" if error.filename is None else f" ({error.filename!r})"
        reason = error.strerror or str(error)
        print(f"ghostlayers: error: {reason}{where}. --debug shows where.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if args.debug:
            raise
        print("ghostlayers: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    from . import commands
    from .compare_command import run_compare
    from .eval_command import run_eval
    from .export_command import run_export
    from .finetune_command import run_finetune
    from .prune_command import run_prune
    from .report_command import run_report

    settings: dict[str, Any] = {
        item.name: getattr(args, item.name)
        for item in fields(FinetuneConfig if args.verb == "finetune" else PruneConfig)
        if hasattr(args, item.name)
    }
    shared = args.verb in SHARED_VERBS
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("always", module=r"ghostlayers(\..*)?")
        warnings.showwarning = _show_warning
        if shared:
            stack.enter_context(distributed.session(args.timeout))
            distributed.check_same("settings", (args.verb, settings, __version__))
        if shared and not distributed.is_main():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stderr(nowhere))
            stack.enter_context(redirect_stdout(nowhere))
        run = {
            "analyze": commands.run_analyze,
            "prune": run_prune,
            "finetune": run_finetune,
            "eval": run_eval,
            "compare": run_compare,
            "export": run_export,
            "report": run_report,
            "info": commands.run_info,
        }[args.verb]
        refused: RefusedError | None = None
        with redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
            try:
                result = run(args, settings)
            except RefusedError as error:
                refused, result = error, error.result or {}
        if distributed.is_main():
            commands.write_result(args.json, result)
        if refused is not None:
            raise refused
    return 0


def _show_warning(message: Warning | str, *_args: Any, **_keywords: Any) -> None:
    print(f"ghostlayers: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
