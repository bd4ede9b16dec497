"""What a comparison says of itself: the model, the machine, the versions, the command."""

from __future__ import annotations

import argparse
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare_results import RunLine
from .records import plain, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .compare_config import CompareConfig
    from .compare_file import CompareRun
    from .loading import ModelSource


def run_line(
    run: CompareRun,
    config: CompareConfig,
    source: ModelSource,
    model: PreTrainedModel,
    args: argparse.Namespace,
) -> RunLine:
    """Return the first line of a comparison's file."""
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
        machine=machine(),
        title=run.title,
        expected=plain(run.expected),
        planned=None if run.planned is None else {**run.planned, "smoke": bool(args.smoke)},
        commit=commit(),
        command=list(args.command_line),
    )


def machine() -> dict[str, Any]:
    """Return the processor, the GPU (None without) and the number of threads."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "gpu": gpu, "threads": torch.get_num_threads()}


def commit() -> str | None:
    """Return the commit of the source tree that this package runs from; None if installed."""
    here = Path(__file__).resolve().parent
    asked = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no repository
    top, head = found.stdout.split("\n")[:2]
    return head if Path(top) / "src" / here.name == here else None


__all__ = ["commit", "machine", "run_line"]
