"""What a configuration file of `compare` asks for, before flags and `--smoke` change it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .compare_config import SHARED_FIELDS, CompareConfig, short_names
from .config import PruneConfig


def planned_run(values: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Return what a run of a file is meant to be.

    Args:
        values: Flat settings of the file; they may be faulty where flags stand over them.
        model: Model of the file; None if it names none.

    Returns:
        As JSON values: `model`, `settings` with defaults in their place, and the short names that
        results give the texts, `calibrations` and `texts`.
    """
    shared = [item for item in fields(PruneConfig) if item.name in SHARED_FIELDS]
    own = [item for item in fields(CompareConfig) if item.name != "shared"]
    lists = {item.name for item in own if isinstance(item.default, tuple)}
    settings: dict[str, Any] = {item.name: item.default for item in (*own, *shared)}
    settings |= {
        name: [value] if name in lists and not isinstance(value, list | tuple) else value
        for name, value in values.items()
    }
    names = {
        key: list(short_names(tuple(map(str, settings[name]))).values())
        for key, name in (("calibrations", "calibration"), ("texts", "perplexity"))
    }
    planned: dict[str, Any] = json.loads(
        json.dumps({"model": model, "settings": settings, **names}, default=str)
    )
    return planned


__all__ = ["planned_run"]
