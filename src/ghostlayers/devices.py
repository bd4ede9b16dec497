"""Which device a run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import GhostlayersError, one_line

if TYPE_CHECKING:
    import torch


def resolve_device(
    name: str, *, option: str = "device", dtype: torch.dtype | None = None
) -> torch.device:
    """Choose the device; `auto` takes CUDA if there is one, else the CPU.

    Args:
        name: As for the command line.
        option: What to call it in an error.
        dtype: A dtype that it must have.

    Raises:
        GhostlayersError: If the device does not exist here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device, dtype=dtype).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        line = one_line(f"`{option}` {name!r} cannot be used", error)
        raise GhostlayersError(f"{line} Devices here: {', '.join(_devices())}.") from error
    return device


def _devices() -> list[str]:
    """List the devices of this machine that can be named."""
    import torch

    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found
