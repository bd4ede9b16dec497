"""Flags that several verbs share: those of a settings class, and where weights go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from .config import PruneConfig
from .finetune_config import FinetuneConfig
from .placement import FLAGS

NUMBERS = {"int": int, "int | None": int, "float": float, "float | None": float}


def metavar(kind: str) -> str:
    """Return what stands for a value in the help, by the annotation of its setting."""
    word = "N" if "int" in kind else "X" if "float" in kind else "VALUE"
    return f"{word},..." if kind.startswith("tuple") else word


def add_config_flags(
    parser: argparse.ArgumentParser,
    names: Sequence[str] | None = None,
    config: type[PruneConfig] | type[FinetuneConfig] = PruneConfig,
) -> None:
    """Add a flag for each setting.

    Args:
        parser: Where to.
        names: Settings; None is all of them.
        config: Class of the settings.
    """
    for item in fields(config):
        if names is not None and item.name not in names:
            continue
        text = item.metadata["help"]
        if "choices" in item.metadata:
            text += f": {', '.join(item.metadata['choices']())}"
        if item.default is not None:
            text += f" (default: {item.default})"
        flag = f"--{item.name.replace('_', '-')}"
        if item.type == "bool":
            parser.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
            )
            continue
        parser.add_argument(
            flag,
            metavar=metavar(str(item.type)),
            type=NUMBERS.get(str(item.type), str),
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )


def add_placement_flags(
    parser: argparse.ArgumentParser,
    names: Sequence[str] = tuple(FLAGS),
    title: str = "models larger than memory",
) -> None:
    """Add flags of `placement`."""
    group = parser.add_argument_group(title)
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=FLAGS[name])


__all__ = ["add_config_flags", "add_placement_flags", "metavar"]
