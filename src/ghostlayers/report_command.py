"""`ghostlayers report`: one HTML file of comparisons, checkpoints and measurements."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError
from .records import write_whole
from .report_inputs import KNOWN

if TYPE_CHECKING:
    from .report_data import Study

DEFAULT_OUT = "report.html"


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help=f"{KNOWN}; any number of each")
    parser.add_argument(
        "-o",
        "--out",
        default=DEFAULT_OUT,
        metavar="FILE",
        help=f"HTML file to write (default: {DEFAULT_OUT})",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run_report(args: argparse.Namespace, _settings: dict[str, Any]) -> dict[str, Any]:
    """Read the inputs, write the page, and say what is in it."""
    from .commands import check_json_target

    _check_out(args.out, force=args.force)
    check_json_target(args.json)
    studies = write_report(args.paths, args.out, force=args.force)
    from .report_headline import title_of

    out = Path(args.out).expanduser()
    for study in studies:
        print(f"{study.model}: {title_of(study)}")
        print(f"  {len(study.models)} models measured, {len(study.gaps)} refused or not run")
    print(f"written to {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return {
        "out": str(out),
        "models": [
            {
                "model": study.model,
                "headline": title_of(study),
                "measured": len(study.models),
                "refused_or_not_run": [vars(gap) for gap in study.gaps],
            }
            for study in studies
        ],
    }


def write_report(paths: Sequence[str], out: str, *, force: bool = False) -> list[Study]:
    """Write one HTML page of comparisons, checkpoints and measurements.

    Args:
        paths: Folders of `compare`, checkpoints, and JSON files of `eval`, `analyze` and `prune`.
        out: HTML file to write; it appears when it is complete.
        force: Replace it if it exists.

    Returns:
        What the page shows, one study for each dense model.

    Raises:
        CheckpointError: If an input is none of these or damaged, or `out` cannot be written.
        RequirementError: If plotly or jinja2 is not installed.
    """
    from .report_page import check_report_packages, render

    target = _check_out(out, force=force)
    check_report_packages()
    from .report_inputs import read_inputs
    from .report_studies import build_studies

    studies = build_studies(read_inputs(paths))
    _write(target, render(studies))
    return studies


def _check_out(target: str, *, force: bool) -> Path:
    path = Path(target).expanduser()
    if path.is_dir():
        raise CheckpointError(f"--out {target!r} is a folder. Give a file name.")
    if not path.resolve().parent.is_dir():
        raise CheckpointError(f"--out {target!r}: its folder does not exist.")
    if path.exists() and not force:
        raise CheckpointError(f"--out {target!r} exists. Give another name, or --force.")
    return path


def _write(path: Path, page: str) -> None:
    """Write a file in one step: it is there whole, or as it was."""
    try:
        write_whole(path, page)
    except OSError as error:
        raise CheckpointError(
            f"--out {str(path)!r} cannot be written: {error.strerror}."
        ) from error


__all__ = ["DEFAULT_OUT", "add_report_flags", "run_report", "write_report"]
