"""Flags of verbs whose work several processes share, and that go on after an interruption."""

from __future__ import annotations

import argparse

from . import distributed
from .resume import SAVE_EVERY


def add_run_flags(parser: argparse.ArgumentParser, *, saves: bool) -> None:
    """Add the flags to a verb's parser; `saves` says whether its sweeps are saved."""
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=distributed.DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="with several processes (torchrun, accelerate launch): how long one may not answer "
        f"before the run ends (default: {distributed.DEFAULT_TIMEOUT:g})",
    )
    if not saves:
        return
    parser.add_argument(
        "--resume-dir",
        metavar="DIR",
        help="work folder of sums from which an interrupted run goes on; it goes when the result "
        "is written (default: a hidden folder beside the result)",
    )
    parser.add_argument(
        "--save-every",
        type=_seconds,
        default=SAVE_EVERY,
        metavar="SECONDS",
        help=f"how often these sums are saved (default: {SAVE_EVERY:g})",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1e9:
        raise ValueError
    return value
