"""Pre-quantized checkpoints: what can be done with them, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import UnsupportedModelError
from .operators import NO_OPERATOR

if TYPE_CHECKING:
    from .config import PruneConfig


def is_quantized(config: Any) -> bool:
    """Say whether a config describes low-bit weights."""
    return getattr(config, "quantization_config", None) is not None


def check_quantized(config: PruneConfig, model_config: Any) -> None:
    """Refuse what would need a low-bit weight to be written, or a map beside one.

    Raises:
        UnsupportedModelError: If operators are asked for on a quantized model.
    """
    if not is_quantized(model_config):
        return
    settings = model_config.quantization_config
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    if config.dtype != "auto":
        raise UnsupportedModelError(
            f"the model is quantized ({method}) and `dtype` is {config.dtype!r}: its tensors are "
            "only copied as they are. Use `dtype` auto."
        )
    if config.recover != NO_OPERATOR:
        raise UnsupportedModelError(
            f"the model is quantized ({method}) and `recover` is {config.recover!r}: a reload "
            "would quantize the operators as well. Prune the unquantized model (a GGUF file is one "
            "where `ghostlayers.load_model` opens it), or use `recover` none."
        )
