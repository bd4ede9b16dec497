"""What a budget may be, and how its value is written. The config checks values: no torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any

from .errors import GhostlayersError

if TYPE_CHECKING:
    from .config import PruneConfig

BUDGETS = (
    "num_remove",
    "layers",
    "sparsity",
    "target_params",
    "target_bytes",
    "max_ppl_ratio",
)
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTE_UNITS = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
UNITS: dict[str, Mapping[str, int]] = {"target_params": COUNT_UNITS, "target_bytes": BYTE_UNITS}


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return f"--{name.replace('_', '-')}"


def budget_kind(config: PruneConfig) -> str:
    """Return the name of the one budget that a configuration gives."""
    return next(name for name in BUDGETS if getattr(config, name) is not None)


def with_num_remove(config: PruneConfig, num_remove: int) -> PruneConfig:
    """Return the configuration that removes so many layers, whatever its budget was."""
    values: dict[str, Any] = {**dict.fromkeys(BUDGETS), "num_remove": num_remove}
    return replace(config, **values)


def parse_quantity(name: str, value: int | str) -> int:
    """Read a number with an optional unit, such as ``6.5B`` parameters or ``4GiB``.

    Args:
        name: `target_params` or `target_bytes`; it decides the units. Case does not matter.
        value: The number.

    Returns:
        A whole number; fractions of one are cut off.

    Raises:
        GhostlayersError: If it is no positive number with a known unit.
    """
    units = {unit.lower(): factor for unit, factor in UNITS[name].items()}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
    number = int(Decimal(match[1]) * units[match[2]]) if match and match[2] in units else 0
    if number < 1:
        known = ", ".join(unit for unit in UNITS[name] if unit)
        raise GhostlayersError(
            f"`{name}` is {value!r}; allowed: a positive number, alone or with a unit of {known}"
        )
    return number


def format_quantity(name: str, number: float) -> str:
    """Write a number the way `parse_quantity` reads it, rounded up to three decimals."""
    suffixes = ("B", "KB", "MB", "GB", "TB") if name == "target_bytes" else tuple(COUNT_UNITS)
    suffix = suffixes[0]
    for suffix in suffixes:
        factor = UNITS[name][suffix]
        if number < 1000 * factor:
            break
    scaled = Decimal(math.ceil(number)) / factor
    rounded = scaled.quantize(Decimal("0.001"), ROUND_CEILING).normalize()
    return f"{rounded:f}{suffix}"


def budget_faults(config: PruneConfig) -> list[str]:
    """List what is wrong with the budget of a configuration, without looking at a model."""
    faults = []
    given = [name for name in BUDGETS if getattr(config, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"`{name}`" for name in given) + " are" if given else "none is"
        names = ", ".join(f"`{name}`" for name in BUDGETS)
        faults.append(f"give exactly one of {names} ({found} given)")
    if config.sparsity is not None and not 0.0 < config.sparsity < 1.0:
        faults.append(f"`sparsity` is {config.sparsity}; allowed: above 0 and below 1")
    if config.max_ppl_ratio is not None and not 1.0 <= config.max_ppl_ratio < math.inf:
        faults.append(f"`max_ppl_ratio` is {config.max_ppl_ratio}; allowed: 1 or more")
    for name in UNITS:
        value: Any = getattr(config, name)
        if value is not None:
            try:
                parse_quantity(name, value)
            except GhostlayersError as error:
                faults.append(str(error))
    return faults
