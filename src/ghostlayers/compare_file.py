"""Configuration files of `ghostlayers compare`: YAML, one table of a paper each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .compare_config import SHARED_FIELDS, CompareConfig, make_config
from .compare_planned import planned_run
from .errors import GhostlayersError
from .expected_numbers import expected_faults, with_model

# Keys that describe the file; `runs` holds mappings of settings that differ between models.
DESCRIPTIONS = ("title", "source", "notes", "expected")
OTHER_KEYS = (*DESCRIPTIONS, "model", "runs")


@dataclass(frozen=True)
class CompareRun:
    """One model to compare cuts of.

    Attributes:
        model: Hub id or path.
        values: Flat settings, those of the command line over those of the file.
        title: What it reproduces.
        expected: Numbers and their source.
        planned: What the file asks for, as `planned_run`; None without a file.
    """

    model: str
    values: dict[str, Any]
    title: str | None = None
    expected: Any = None
    planned: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def config(self) -> CompareConfig:
        """The settings, checked."""
        return make_config(self.values)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a configuration file and check its keys.

    Raises:
        GhostlayersError: If it is no YAML mapping, or a key is unknown; all faults in one message.
    """
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise GhostlayersError(f"--config {str(path)!r} cannot be read ({error}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise GhostlayersError(f"--config {str(path)!r} is no YAML: {reason}.") from error
    if not isinstance(value, dict):
        raise GhostlayersError(f"--config {str(path)!r} holds no mapping of settings.")
    runs = value.get("runs", [])
    faults = _unknown(value, "", OTHER_KEYS)
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        faults.append("`runs` is no list of mappings")
        runs = []
    for number, run in enumerate(runs, start=1):
        faults += _unknown(run, f"run {number}: ", ("model",))
    for name in ("title", "source", "notes", "model"):
        if not isinstance(value.get(name), str | None):
            faults.append(f"`{name}` is {value[name]!r}; allowed: a text")
    expected, model = "null", value.get("model")
    try:
        expected = json.dumps(value.get("expected"), default=_as_text)
        faults += expected_faults(json.loads(expected), model)
    except (TypeError, ValueError) as error:
        faults.append(f"`expected` cannot be stored ({error})")
    if faults:
        raise GhostlayersError(
            f"--config {str(path)!r}: {'; '.join(faults)}. Keys are the flags of `compare --help` "
            f"with underscores, and {', '.join(OTHER_KEYS)}."
        )
    return {**value, "expected": with_model(json.loads(expected), model)}


def _as_text(value: Any) -> str:
    """Return what YAML reads as a date as it is written."""
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{value!r} is no text, number, list or mapping")


def _unknown(values: Mapping[Any, Any], where: str, also: tuple[str, ...]) -> list[str]:
    known = (*(name for name in CompareConfig.__dataclass_fields__ if name != "shared"),)
    allowed = (*known, *SHARED_FIELDS, *also)
    found = []
    for name in values:
        if name not in allowed:
            near = get_close_matches(str(name), allowed, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            found.append(f"{where}unknown key {str(name)!r}{hint}")
    return found


def runs_of(
    file: Mapping[str, Any], given: Mapping[str, Any], model: str | None
) -> list[CompareRun]:
    """List what a file and the command line ask for.

    Args:
        file: From `read_config`; empty without a file.
        given: Settings of the command line.
        model: Model of the command line; it stands for every model of the file. Runs that then
            have the same settings are one.

    Raises:
        GhostlayersError: If no model is named.
    """
    common = {name: value for name, value in file.items() if name not in OTHER_KEYS}
    found: list[CompareRun] = []
    for own in file.get("runs") or [{}]:
        name = model or own.get("model") or file.get("model")
        if not isinstance(name, str):
            raise GhostlayersError("no model is named. Give MODEL, or `model` in the file.")
        values = {**common, **{k: v for k, v in own.items() if k != "model"}}
        planned = planned_run(values, own.get("model") or file.get("model")) if file else None
        values |= given
        run = CompareRun(name, values, file.get("title"), file.get("expected"), planned)
        if run not in found:
            found.append(run)
    return found


__all__ = ["CompareRun", "read_config", "runs_of"]
