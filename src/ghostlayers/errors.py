"""Errors that ghostlayers raises on purpose. Each is also a `ValueError`.

A message is one line: what is wrong with which argument, the value got, what is allowed, and what
to do. The command line prints it and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from textwrap import shorten
from typing import Any, TypeVar

T = TypeVar("T")


class GhostlayersError(ValueError):
    """Base of every error that a user can mend.

    Attributes:
        repeated: Whether another process of the run prints the same line.
    """

    repeated: bool = False


class RequirementError(GhostlayersError, ImportError):
    """A package is not installed, or not in a release that ghostlayers works with."""


class UnsupportedModelError(GhostlayersError):
    """The model's structure or configuration cannot be pruned safely."""


class CheckpointError(GhostlayersError):
    """A checkpoint cannot be read, written or trusted."""


class CalibrationError(GhostlayersError):
    """The calibration text, the windows or the measured states are unusable."""


class DistributedError(GhostlayersError):
    """Another process of the run failed or is gone, or the processes cannot meet."""


class PlanError(GhostlayersError):
    """The layers asked for cannot be removed."""


class RefusedError(GhostlayersError):
    """Everything that was asked for was refused; what says so is written all the same.

    Attributes:
        result: The JSON value of the verb; None where another process writes it.
    """

    def __init__(self, line: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(line)
        self.result = result


def unknown_name(kind: str, name: str, known: Iterable[str]) -> GhostlayersError:
    """Build the error for an unknown name: nearest match first, then every known name.

    Args:
        kind: What the name stands for, such as ``"selector"``.
        name: The name that was given.
        known: All allowed names.

    Returns:
        The error, not yet raised.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return GhostlayersError(f"Unknown {kind} {name!r}. {hint}Allowed: {', '.join(names)}.")


def one_line(what: str, error: BaseException) -> str:
    """Say in one line what failed and the class and message of the error behind it."""
    reason = shorten(str(error), 300, placeholder=" ...") or "no reason given"
    return f"{what} ({type(error).__name__}: {reason.rstrip('.')})."


def configured(kind: type[T], settings: Mapping[str, Any]) -> T:
    """Make a configuration, a dataclass, from keyword settings.

    Raises:
        GhostlayersError: If it has no setting of such a name.
    """
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise unknown_name("setting", name, known)
    return kind(**settings)
