"""`PruneConfig`: the one source of defaults for the API, the command line and its help."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .budget_values import budget_faults
from .errors import GhostlayersError, unknown_name
from .operators import GUARDED, RANKED, REFINED_STEPS, operator_names
from .plan import layers_text
from .selectors import AUTO, AUTO_MIN_WINDOWS, select_names
from .selectors.own import is_own, own_name_fault

DTYPES = ("auto", "float32", "bfloat16", "float16")
COSINES = ("channels", "sequence")
FITS = ("dense", "sequential")
FOLD_MAPS = ("both", "mlp")
# `max_ppl_ratio` measures on every fourth window.
MIN_HELD_OUT_WINDOWS = 4


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


def text_option(purpose: str, sampler: str) -> Any:
    """Return the field of a text source; `sampler` is what samples the text of `self`."""
    return _option(
        "self",
        f"{purpose}: c4, wikitext2, ptb, owner/dataset[:config][:split][:column], a local "
        f".txt/.jsonl/.parquet file, or self ({sampler} samples it)",
    )


def batch_option() -> Any:
    """Return the field of the batch size."""
    return _option(1, "windows per forward pass")


def device_option() -> Any:
    """Return the field of the device."""
    return _option("auto", "auto, cpu, cuda, cuda:1, mps, ...; auto = CUDA if present")


@dataclass(frozen=True)
class PruneConfig:
    """Settings of one pruning run.

    Exactly one of the budgets (the first six fields) decides how much goes. Every field is also a
    command-line flag of `ghostlayers prune` (underscores become dashes) and is stored in the
    checkpoint. From Python, `layers` may also be a sequence of indices; it becomes that text.

    Raises:
        GhostlayersError: At construction, with every fault in one message.
    """

    num_remove: int | None = _option(None, "number of layers to remove")
    layers: str | None = _option(
        None, "remove exactly these layers, e.g. 12-18,21 (0-based, both ends included)"
    )
    sparsity: float | None = _option(
        None, "remove the fewest layers that hold at least this share of decoder-layer parameters"
    )
    target_params: int | str | None = _option(
        None,
        "remove the fewest layers that leave at most so many parameters, embeddings and operators "
        "included, e.g. 6.5B (K, M, B, T)",
    )
    target_bytes: int | str | None = _option(
        None,
        "remove the fewest layers that leave at most so many bytes of weight files, e.g. 4GB or "
        "4GiB",
    )
    max_ppl_ratio: float | None = _option(
        None,
        "remove the most layers that leave the repaired model's held-out perplexity within this "
        "multiple of the dense model's, found by bisection, e.g. 1.3",
    )
    select: str = _option(
        "lorp", "which layers go; or your own selector as module:function", choices=select_names
    )
    recover: str = _option("ghost-robust", "how each boundary is repaired", choices=operator_names)
    ridge: float = _option(
        0.0,
        "relative ridge: lambda * trace(gram) / C is added to the diagonal; 0 = minimum norm "
        "(ghost, replaceme-lstsq) or chosen on held-out windows (ghost-robust, ghost-norm, fold, "
        "fold+ghost)",
    )
    rank: int | None = _option(
        None,
        "rank of the map (ghost, ghost-robust, ghost-norm), stored as two factors (default: full)",
    )
    refine: int | None = _option(
        None,
        "gradient steps, one batch each, by which the repair follows the divergence from "
        "the dense model (ghost-robust, ghost-norm, fold, fold+ghost); 0 = closed form alone "
        "(default: 96 for fold and fold+ghost, else 0)",
    )
    fit: str = _option(
        "dense",
        "states that several boundaries are fitted on: the dense model's, or those of the model "
        "repaired so far, from the input side",
        choices=lambda: FITS,
    )
    fold_maps: str = _option(
        "both",
        "maps that fold refits: attention and MLP output, or MLP only",
        choices=lambda: FOLD_MAPS,
    )
    moments_device: str = _option(
        "auto", "where the float64 moments live: auto (where the model is), cpu, cuda, cuda:1, ..."
    )
    num_clusters: int | None = _option(
        None, "clusters of lorp (default: 2, 3 or 4, by the Representation Locality Score)"
    )
    plus: bool = _option(
        True,
        "shortened-taylor and shortened-magnitude keep the first four and the last two layers",
    )
    score_windows: int = _option(
        10,
        "calibration windows, from the first on, that shortened-ppl, shortened-taylor, greedy-ppl "
        "and laco read",
    )
    score_window: int = _option(128, "tokens that they read from the start of each of these")
    laco_layers: int = _option(4, "layers that laco collapses into one")
    laco_interval: int = _option(2, "layers that laco goes down after a merge")
    laco_range: str | None = _option(
        None, "layers that laco merges, e.g. 4-27 (both ends included; default: all that may go)"
    )
    laco_threshold: float | None = _option(
        None, "cosine above which laco keeps a merge (default: the highest that fits the budget)"
    )
    cosine_over: str = _option(
        "channels",
        "what cosines of hidden states are taken over: the channels of a token, as the papers "
        "define it, or the tokens of a channel, as published code does (to compare with its "
        "tables only)",
        choices=lambda: COSINES,
    )
    protect_first: int = _option(1, "layers at the input side that no selector removes")
    protect_last: int = _option(1, "layers at the output side that no selector removes")
    calibration: str = text_option("calibration text", "the model")
    num_windows: int = _option(128, "calibration windows")
    window: int | None = _option(
        None, "tokens per window (default: 2048, or the model's maximum if shorter)"
    )
    batch_size: int = batch_option()
    dtype: str = _option(
        "auto", "dtype to load, measure and write; auto = as stored", choices=lambda: DTYPES
    )
    device: str = device_option()
    seed: int = _option(0, "seed of clustering and of sampled calibration text")

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", layers_text(self.layers))
        faults = budget_faults(self)
        for name in ("num_windows", "batch_size", "score_windows", "laco_interval"):
            if getattr(self, name) < 1:
                faults.append(f"`{name}` is {getattr(self, name)}; allowed: 1 or more")
        if self.select == AUTO and self.layers is None and self.num_windows < AUTO_MIN_WINDOWS:
            faults.append(
                f"`num_windows` is {self.num_windows}; `select` auto needs {AUTO_MIN_WINDOWS} or "
                "more, to hold some out"
            )
        if self.max_ppl_ratio is not None and self.num_windows < MIN_HELD_OUT_WINDOWS:
            faults.append(
                f"`num_windows` is {self.num_windows}; `max_ppl_ratio` needs "
                f"{MIN_HELD_OUT_WINDOWS} or more, to hold some out"
            )
        for name in ("score_window", "laco_layers"):
            if getattr(self, name) < 2:
                faults.append(f"`{name}` is {getattr(self, name)}; allowed: 2 or more")
        if self.laco_threshold is not None and not -1.0 <= self.laco_threshold < 1.0:
            faults.append(
                f"`laco_threshold` is {self.laco_threshold}; allowed: -1 or more, below 1"
            )
        for name in ("protect_first", "protect_last", "seed"):
            if getattr(self, name) < 0:
                faults.append(f"`{name}` is {getattr(self, name)}; allowed: 0 or more")
        if self.seed >= 2**32:
            faults.append(f"`seed` is {self.seed}; allowed: below 2**32")
        if self.window is not None and self.window < 2:
            faults.append(f"`window` is {self.window}; allowed: 2 or more tokens")
        if self.num_clusters is not None and self.num_clusters < 1:
            faults.append(f"`num_clusters` is {self.num_clusters}; allowed: 1 or more")
        if self.rank is not None and self.rank < 1:
            faults.append(f"`rank` is {self.rank}; allowed: 1 or more")
        if self.rank is not None and self.recover not in RANKED:
            faults.append(
                f"`rank` is {self.rank} and `recover` is {self.recover}; rank works with "
                f"{', '.join(RANKED)}"
            )
        if self.refine is not None and self.refine < 0:
            faults.append(f"`refine` is {self.refine}; allowed: 0 or more")
        if self.refine and self.recover not in GUARDED:
            faults.append(
                f"`refine` is {self.refine} and `recover` is {self.recover}; refine works with "
                f"{', '.join(GUARDED)}"
            )
        if not 0.0 <= self.ridge < float("inf"):
            faults.append(f"`ridge` is {self.ridge}; allowed: 0 or a positive number")
        for item in fields(self):
            if "choices" in item.metadata:
                value, allowed = getattr(self, item.name), item.metadata["choices"]()
                if item.name == "select" and is_own(value):
                    faults += own_name_fault(value)
                elif value not in allowed:
                    faults.append(str(unknown_name(item.name, value, allowed)).rstrip("."))
        if faults:
            raise GhostlayersError("; ".join(faults) + ".")

    @property
    def refine_steps(self) -> int:
        """Steps of the refinement: what `refine` says, or the method's default."""
        return REFINED_STEPS.get(self.recover, 0) if self.refine is None else self.refine

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return asdict(self)
