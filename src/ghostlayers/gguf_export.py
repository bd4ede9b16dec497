"""Export a pruned checkpoint to a GGUF file for llama.cpp and what is built on it.

The converter from PyPI does the work, in an environment of its own; operators of the form
y = x + RMSNorm(x) M are then put into its file (`gguf_graft`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError, GhostlayersError, unknown_name
from .gguf_check import check_layers
from .gguf_graft import graft_operators
from .gguf_verify import verify_gguf
from .loading import GHOST_MODEL_TYPE, locate
from .modeling_ghostlayers import SENTINEL
from .records import RECORD_FILE, read_record
from .tool_environments import CONVERTER, LLAMA_CPP, last_line, tool_python

OUTTYPES = ("f32", "f16", "bf16", "q8_0")
# Keys of config.json that only a checkpoint with operators has.
OWN_KEYS = ("auto_map", "base_model_type", "ghost_decoder", "ghost_operators")
OWN_FILES = ("config.json", "*.safetensors", "*.index.json", "modeling_ghostlayers.py")


def export_gguf(
    path: str | Path,
    out: str | Path,
    *,
    outtype: str = "f32",
    converter: str | None = None,
    verify: bool = False,
    runner: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write a GGUF file; it appears under its name only when it is complete and, if asked, checked.

    Args:
        path: A checkpoint folder: a stock one, or one whose operators all are `ghost-norm`.
        out: File to write.
        outtype: How weights are stored, one of `OUTTYPES`.
        converter: A Python that has `convert_hf_to_gguf`; None makes an environment with it.
        verify: Compare a greedy generation in llama.cpp with transformers, float32: equal text.
        runner: A Python that has `xllamacpp` for that; None makes an environment with it.
        force: Replace an existing file.

    Returns:
        JSON values: file, outtype, bytes, operators, and what was verified (or None).

    Raises:
        CheckpointError: If the operators have another form, the converter does not know the
            architecture, or the texts differ. Nothing is written then.
    """
    folder, file = _check(path, out, outtype=outtype, verify=verify, force=force)
    operators = operator_maps(folder)
    python = tool_python(CONVERTER, converter, flag="--converter")
    engine = tool_python(LLAMA_CPP, runner, flag="--runner") if verify else None
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as work:
        made = Path(work) / "model.gguf"
        if operators is None:
            _convert(python, folder, made, outtype)
        else:
            stock, body = Path(work) / "stock", Path(work) / "body.gguf"
            write_stock_part(folder, stock)
            _convert(python, stock, body, outtype)
            maps, norm_eps = operators
            graft_operators(body, made, maps, norm_eps=norm_eps)
        check_layers(made, _depth(folder, operators), dense_layers=_dense_depth(folder))
        checked = verify_gguf(made, folder, engine) if engine is not None else None
        if file.exists() and not force:
            raise CheckpointError(f"output {str(file)!r} exists by now. Pass --force.")
        with made.open("rb") as handle:
            os.fsync(handle.fileno())
        made.replace(file)
    return {
        "file": str(file),
        "outtype": outtype,
        "bytes": file.stat().st_size,
        "operators": 0 if operators is None else len(operators[0]),
        "verified": checked,
    }


def _check(
    path: str | Path, out: str | Path, *, outtype: str, verify: bool, force: bool
) -> tuple[Path, Path]:
    """Check everything that can be known before any work."""
    if outtype not in OUTTYPES:
        raise unknown_name("outtype", outtype, OUTTYPES)
    if verify and outtype != "f32":
        raise GhostlayersError(
            f"--verify compares texts exactly, which only f32 promises; got --outtype {outtype}. "
            "Verify an f32 file, then export this type without --verify."
        )
    source = locate(str(path))
    if source.gguf is not None:
        raise CheckpointError(f"PATH {str(path)!r} is a .gguf file. Give a checkpoint folder.")
    if not source.safetensors:
        raise CheckpointError(f"PATH {str(path)!r} has no safetensors weights to export.")
    file = Path(out).expanduser()
    if file.is_dir() or (file.exists() and not force):
        raise CheckpointError(
            f"output {str(file)!r} exists. Choose another file name"
            + (" or pass --force." if file.is_file() else ".")
        )
    if not file.resolve().parent.is_dir() or not os.access(file.resolve().parent, os.W_OK):
        raise CheckpointError(f"output {str(file)!r}: its folder does not exist or is read-only.")
    return source.folder, file.resolve()


def operator_maps(folder: Path) -> tuple[dict[int, np.ndarray], float] | None:
    """Read the operators of a checkpoint, as far as llama.cpp can hold them.

    Returns:
        (C, C) float32 maps in the layout of `nn.Linear` by the decoder layer that they stand
        before (L: behind the last one), and ε of their norm; None for a stock checkpoint.

    Raises:
        CheckpointError: If an operator has another form.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != GHOST_MODEL_TYPE:
        return None
    specs = config["ghost_operators"]
    eps = {spec.get("norm_eps") for spec in specs}
    others = any(
        spec.get("bias") or spec.get("sink_cosine") or spec.get("sink_threshold") for spec in specs
    )
    if None in eps or len(eps) != 1 or others:
        raise CheckpointError(
            f"PATH {str(folder)!r} has operators on the residual stream itself, which no graph of "
            "llama.cpp holds. Prune with --recover fold (or replaceme-lstsq, none): these are "
            "stock; or, for Llama-family models, with --recover ghost-norm."
        )
    tensors = _operator_tensors(folder)
    maps = {}
    for spec in specs:
        layer, side = spec["layer"], spec["side"]
        place = f".{config['ghost_decoder']}.{layer}.ghost_{side}."
        own = {n.rpartition(place)[2]: t for n, t in tensors.items() if place in f".{n}"}
        full = own.get("map.weight")
        weight = own["up.weight"] @ own["down.weight"] if full is None else full
        maps[layer + (side == "output")] = weight.numpy()
    return maps, float(eps.pop())


def _depth(folder: Path, operators: tuple[dict[int, np.ndarray], float] | None) -> int:
    """Return how many layers the file must have, those that stand for operators included."""
    from .decoder import num_decoder_layers
    from .loading import load_config

    depth = num_decoder_layers(load_config(locate(str(folder))))
    return depth + (0 if operators is None else len(operators[0]))


def _dense_depth(folder: Path) -> int | None:
    """Return the depth before layers were removed, if `prune` wrote the checkpoint."""
    if not (folder / RECORD_FILE).is_file():
        return None
    depth: int = read_record(folder)["num_layers"]
    return depth


def _is_operator(name: str) -> bool:
    return ".ghost_input." in name or ".ghost_output." in name


def _operator_tensors(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found = {}
    for file in locate(str(folder)).safetensors:
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if _is_operator(name):
                    found[name] = handle.get_tensor(name).float()
    return found


def write_stock_part(folder: Path, out: Path) -> None:
    """Write a checkpoint with operators without them, as the stock architecture.

    Args:
        folder: The checkpoint.
        out: Folder to make.
    """
    from safetensors import safe_open

    from .checkpoint import MAX_SHARD_BYTES
    from .tensor_copy import TensorCopy, num_bytes, write_shards

    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*OWN_FILES))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = config["base_model_type"]
    config["architectures"] = [name.removeprefix("Ghost") for name in config["architectures"]]
    config.get("id2label", {}).pop(SENTINEL, None)
    config = {k: v for k, v in config.items() if k not in OWN_KEYS and v != {}}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copies = []
    for file in locate(str(folder)).safetensors:
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if not _is_operator(name):
                    size = num_bytes(handle.get_slice(name))
                    copies.append(TensorCopy(name, size, file, name))
    write_shards(copies, out, MAX_SHARD_BYTES)


def _convert(python: Path, folder: Path, out: Path, outtype: str) -> None:
    command = [str(python), "-I", "-m", CONVERTER.module, str(folder)]
    command += ["--outtype", outtype, "--outfile", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode or not out.is_file():
        raise CheckpointError(
            f"the GGUF converter fails on {folder.name!r} ({last_line(run.stderr)}). llama.cpp "
            "may not know this architecture."
        )
