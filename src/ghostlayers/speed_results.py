"""What is timed of a model, and the numbers that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .calibration import max_window
from .errors import GhostlayersError


@dataclass(frozen=True)
class SpeedSettings:
    """What is timed.

    Attributes:
        batch_sizes: Sequences at once.
        lengths: Tokens of the prompt.
        new_tokens: Tokens generated, 2 or more: one prefill, the others decode steps.
        repeats: Timed runs of each combination.
        warmup: Runs before those.

    Raises:
        GhostlayersError: If a number is too small.
    """

    batch_sizes: tuple[int, ...] = (1, 4)
    lengths: tuple[int, ...] = (64, 256)
    new_tokens: int = 32
    repeats: int = 5
    warmup: int = 2

    def __post_init__(self) -> None:
        least = {"batch_sizes": 1, "lengths": 1, "new_tokens": 2, "repeats": 1, "warmup": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or min(numbers) < bound:
                raise GhostlayersError(f"speed `{name}` is {value}. Allowed: {bound} or more.")

    @classmethod
    def parse(cls, *, batch_sizes: str, lengths: str, **numbers: Any) -> SpeedSettings:
        """Read lists of numbers that commas split.

        Raises:
            GhostlayersError: If one is no number.
        """
        lists: dict[str, Any] = {}
        for name, text in (("batch_sizes", batch_sizes), ("lengths", lengths)):
            parts = [part.strip() for part in text.split(",")]
            if not all(part.isdecimal() for part in parts):
                raise GhostlayersError(
                    f"speed `{name}` is {text!r}. Allowed: numbers split by commas, such as 1,8."
                )
            lists[name] = tuple(map(int, parts))
        return cls(**lists, **numbers)


@dataclass(frozen=True)
class SpeedRow:
    """Times of one batch size and prompt length, in seconds.

    Attributes:
        batch_size: Sequences at once.
        length: Tokens of the prompt.
        prefill: Time to the first token, one value a run.
        decode: Time of each later token, of all runs.
        operator_prefill: Time in all operators until the first token, one value a run.
        operator_decode: Time in all operators for each later token, of all runs.
        peak_memory_bytes: See `SpeedResult.memory`; None where it cannot be had.
    """

    batch_size: int
    length: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    operator_prefill: tuple[float, ...]
    operator_decode: tuple[float, ...]
    peak_memory_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: median and spread (third less first quartile) of each."""
        prefill, decode = _spread(self.prefill), _spread(self.decode)
        prefill["tokens_per_s"] = self.batch_size * self.length / prefill["median_s"]
        decode["tokens_per_s"] = self.batch_size / decode["median_s"]
        own = (_spread(self.operator_prefill), _spread(self.operator_decode))
        for part, whole in zip(own, (prefill, decode), strict=True):
            part["share"] = part["median_s"] / whole["median_s"]
        return {
            "batch_size": self.batch_size,
            "length": self.length,
            "prefill": prefill,
            "decode": decode,
            "operator": {"prefill": own[0], "decode": own[1]},
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True)
class SpeedResult:
    """Speed and size of one model.

    Attributes:
        rows: One for each batch size and length.
        settings: What was timed.
        facts: Device, dtype, threads, layers, parameters, bytes, operators.
        memory: What `peak_memory_bytes` counts.
    """

    rows: tuple[SpeedRow, ...]
    settings: SpeedSettings
    facts: dict[str, Any]
    memory: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            **self.facts,
            **asdict(self.settings),
            "memory": self.memory,
            "rows": [row.to_dict() for row in self.rows],
        }


def check_lengths(settings: SpeedSettings, config: Any) -> None:
    """Check prompts and new tokens against a model's longest window.

    Raises:
        GhostlayersError: If they do not fit.
    """
    limit, needed = max_window(config), max(settings.lengths) + settings.new_tokens
    if limit is not None and needed > limit:
        raise GhostlayersError(
            f"speed: a prompt of {max(settings.lengths)} and {settings.new_tokens} new tokens, "
            f"but the model allows {limit} (max_position_embeddings). Lower `lengths`."
        )


def compare_speed(own: dict[str, Any], first: dict[str, Any]) -> None:
    """Add to a result's JSON values how many times as fast as the first it is.

    Args:
        own: From `SpeedResult.to_dict`; gets `promised_speedup`, the ratio of the numbers of
            layers, and `speedup` beside each median.
        first: The same of the baseline, measured with the same settings.
    """
    own["promised_speedup"] = first["num_layers"] / own["num_layers"]
    for row, base in zip(own["rows"], first["rows"], strict=True):
        for phase in ("prefill", "decode"):
            row[phase]["speedup"] = base[phase]["median_s"] / row[phase]["median_s"]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(values)
    if len(values) < 2:
        return {"median_s": median, "iqr_s": None}
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return {"median_s": median, "iqr_s": third - first}


__all__ = ["SpeedResult", "SpeedRow", "SpeedSettings", "check_lengths", "compare_speed"]
