"""`FinetuneConfig`: the one source of defaults of `finetune`, for the API and the command line."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from .config import _option, batch_option, device_option, text_option
from .errors import GhostlayersError, unknown_name

TRAINED = ("operators", "lora")
PRECISIONS = ("auto", "no", "bf16")
COUNTS = (
    "top_k",
    "batch_size",
    "accumulation",
    "eval_every",
    "patience",
    "lora_rank",
    "lora_alpha",
)
DEFAULT_WINDOW = 256


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of one distillation. Every field is also a flag of `ghostlayers finetune`.

    Raises:
        GhostlayersError: At construction, with every fault in one message.
    """

    train: str = _option(
        "operators",
        "what is trained: the operators at the cuts, or low-rank adapters of the decoder layers' "
        "linear maps as well (merged into the weights at the end; needs peft)",
        choices=lambda: TRAINED,
    )
    top_k: int = _option(50, "teacher logits kept per position")
    epochs: float = _option(3.0, "passes over the windows that are trained on")
    steps: int | None = _option(None, "optimizer steps (default: what `epochs` makes)")
    learning_rate: float = _option(3e-4, "peak learning rate of AdamW")
    weight_decay: float = _option(0.0, "decoupled weight decay of AdamW")
    warmup: float = _option(0.1, "share of the steps in which the learning rate rises from 0")
    max_grad_norm: float = _option(1.0, "gradients are scaled down to this L2 norm")
    batch_size: int = batch_option()
    accumulation: int = _option(4, "forward passes per optimizer step and process")
    eval_every: int = _option(10, "steps between two measurements on the held-out windows")
    patience: int = _option(5, "measurements without a new best one after which training stops")
    mixed_precision: str = _option(
        "auto",
        "autocast of the forward pass; auto = bf16 on CUDA devices that have it, else no",
        choices=lambda: PRECISIONS,
    )
    lora_rank: int = _option(16, "rank of the adapters of `train` lora")
    lora_alpha: int = _option(32, "the adapters' product is scaled by lora_alpha / lora_rank")
    calibration: str = text_option("text to train on", "the teacher")
    num_windows: int = _option(96, "windows; every fourth is held out from training")
    window: int | None = _option(
        None, f"tokens per window (default: {DEFAULT_WINDOW}, or the model's maximum if shorter)"
    )
    device: str = device_option()
    seed: int = _option(0, "seed of the order of windows, of adapters and of sampled text")

    def __post_init__(self) -> None:
        faults = []
        lowest: dict[str, tuple[float, str]] = dict.fromkeys(COUNTS, (1, "1 or more"))
        lowest |= {
            "num_windows": (2, "2 or more, to hold some out"),
            "seed": (0, "0 to 2**32 - 1"),
            "weight_decay": (0, "0 or a positive number"),
        }
        if self.steps is not None:
            lowest["steps"] = (1, "1 or more")
        if self.window is not None:
            lowest["window"] = (2, "2 or more tokens")
        for name, (low, allowed) in lowest.items():
            value = getattr(self, name)
            if not low <= value < math.inf or (name == "seed" and value >= 2**32):
                faults.append(f"`{name}` is {value}; allowed: {allowed}")
        for name in ("epochs", "learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                faults.append(f"`{name}` is {getattr(self, name)}; allowed: a positive number")
        if self.learning_rate > 1:
            faults.append(f"`learning_rate` is {self.learning_rate}; allowed: up to 1")
        if not 0 <= self.warmup < 1:
            faults.append(f"`warmup` is {self.warmup}; allowed: 0 or more, below 1")
        for item in fields(self):
            if "choices" in item.metadata:
                value, known = getattr(self, item.name), item.metadata["choices"]()
                if value not in known:
                    faults.append(str(unknown_name(item.name, value, known)).rstrip("."))
        if faults:
            raise GhostlayersError("; ".join(faults) + ".")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return asdict(self)
