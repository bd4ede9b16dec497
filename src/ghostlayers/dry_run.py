"""What `prune --dry-run` says."""

from __future__ import annotations

from typing import Any

from .config import PruneConfig
from .decoder import num_decoder_layers, text_config
from .operators import FOLDING, NO_OPERATOR
from .records import versions
from .rotation import rotation_name
from .tables import render_table


def describe_run(
    config: PruneConfig, model_config: Any, window: int, num_remove: int | None
) -> tuple[str, dict[str, Any]]:
    """Describe a run from its settings and the model's config alone.

    Args:
        config: Settings.
        model_config: The model's config.
        window: Tokens per window.
        num_remove: Number of layers that go, if the settings say so.

    Returns:
        A table, and the JSON value of `--json`.
    """
    depth, size = num_decoder_layers(model_config), text_config(model_config).hidden_size
    moments = 0 if config.recover == NO_OPERATOR else 4 * size * size * 8
    folding = config.recover in FOLDING
    rows = [[name, str(value)] for name, value in config.to_dict().items()]
    rows += [
        ["window (resolved)", str(window)],
        ["decoder layers", str(depth)],
        ["hidden size", str(size)],
        ["calibration tokens", str(config.num_windows * window)],
        [
            "moments per boundary",
            "known once the model is loaded" if folding else f"{moments / 1e6:.1f} MB (float64)",
        ],
    ]
    if config.recover == "linearpatch-rotate":
        rows.append(["rotation", rotation_name(size)])
    table = render_table(["setting", "value"], rows)
    text = f"{table}\n\ndry run: nothing was loaded or written"
    return text, {
        "config": config.to_dict(),
        "window": window,
        "num_layers": depth,
        "num_remove": num_remove,
        "moments_bytes_per_boundary": None if folding else moments,
        "versions": versions(),
    }
