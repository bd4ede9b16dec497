"""Where a model's weights go when they do not fit: devices, main memory, disk."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import GhostlayersError

if TYPE_CHECKING:
    from torch import nn

PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", re.IGNORECASE)
FLAGS = {
    "device_map": "where the weights go, in place of --device: auto, or JSON (a file or the text "
    "itself) from module names to cuda numbers, cpu or disk",
    "max_memory": "most that the weights take of each device with --device-map auto, e.g. "
    "0=20GiB,cpu=30GiB; the rest goes to disk",
    "offload_folder": "folder for weights on disk that cannot be read from the checkpoint's own "
    "files as they are (default: a temporary one)",
    "spill_folder": "folder for hidden states in flight (default: main memory, 2 GiB at most)",
}


@dataclass(frozen=True)
class Placement:
    """Where weights and states in flight live.

    Attributes:
        device_map: A plan of accelerate (`auto`, ...), or places by module name; None puts the
            whole model on one device.
        max_memory: Most bytes by GPU number or `cpu`, for a plan.
        offload_folder: Folder for weights that must be written anew to be read one by one.
        spill_folder: Folder for hidden states; None keeps them in main memory.
    """

    device_map: str | Mapping[str, int | str] | None = None
    max_memory: Mapping[int | str, int] | None = None
    offload_folder: str | None = None
    spill_folder: str | None = None

    @classmethod
    def parse(
        cls,
        device_map: str | None = None,
        max_memory: str | None = None,
        offload_folder: str | None = None,
        spill_folder: str | None = None,
        *,
        device: str = "auto",
    ) -> Placement:
        """Read the values of the command line.

        Raises:
            GhostlayersError: If one is malformed, or needs another that is not given.
        """
        if device_map is None:
            for name, value in (("max_memory", max_memory), ("offload_folder", offload_folder)):
                if value is not None:
                    raise GhostlayersError(
                        f"`{name}` is {value!r} without `device_map`. Add `device_map` auto."
                    )
        elif device != "auto":
            raise GhostlayersError(
                f"`device` is {device!r} and `device_map` is given: the map says where each part "
                "goes. Give one of the two."
            )
        places = None if device_map is None else parse_device_map(device_map)
        if max_memory is not None and not isinstance(places, str):
            raise GhostlayersError(
                f"`max_memory` is {max_memory!r} and `device_map` names every place. Use it with "
                "`device_map` auto."
            )
        for name, folder in (("offload_folder", offload_folder), ("spill_folder", spill_folder)):
            if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
                raise GhostlayersError(f"`{name}` {folder!r} is a file. Give a folder.")
        limits = None if max_memory is None else parse_max_memory(max_memory)
        return cls(places, limits, offload_folder, spill_folder)

    @property
    def spill_path(self) -> Path | None:
        """The spill folder."""
        return None if self.spill_folder is None else Path(self.spill_folder).expanduser()

    def keywords(self) -> dict[str, Any]:
        """Return keyword arguments of `from_pretrained`; makes a temporary folder if none is named.

        Raises:
            GhostlayersError: If the offload folder cannot be made.
        """
        if self.device_map is None:
            return {}
        if self.offload_folder is None:
            folder = tempfile.mkdtemp(prefix="ghostlayers-offload-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        else:
            folder = str(Path(self.offload_folder).expanduser())
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise GhostlayersError(
                    f"`offload_folder` {self.offload_folder!r} cannot be made ({error.strerror})."
                ) from error
        places = self.device_map if isinstance(self.device_map, str) else dict(self.device_map)
        limits = None if self.max_memory is None else dict(self.max_memory)
        return {"device_map": places, "max_memory": limits, "offload_folder": folder}


def placement_of(model: nn.Module) -> Placement:
    """Return how a model was loaded by `load_model`; of another model the default."""
    found: Placement = vars(model).get("_ghostlayers_placement", Placement())
    return found


def place_(model: nn.Module, placement: Placement) -> None:
    """Remember a placement with a model and the copies that will be made of it."""
    vars(model)["_ghostlayers_placement"] = placement


def parse_device_map(text: str) -> str | dict[str, int | str]:
    """Read `auto`, a JSON object, or a file that holds one.

    Raises:
        GhostlayersError: If it is none of them, or a place has another form.
    """
    if text in PLANS:
        return text
    allowed = f'Allowed: {", ".join(PLANS)}, a JSON file, or JSON such as {{"": "cpu"}}.'
    source = text
    if not text.lstrip().startswith("{"):
        try:
            source = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GhostlayersError(
                f"`device_map` {text!r} is no plan and no file that can be read. {allowed}"
            ) from error
    try:
        value = json.loads(source)
    except ValueError as error:
        raise GhostlayersError(f"`device_map` {text!r} is not JSON ({error}). {allowed}") from error
    if not isinstance(value, dict) or not value:
        raise GhostlayersError(f"`device_map` {text!r} holds no places by module name. {allowed}")
    for name, place in value.items():
        if isinstance(place, bool) or not isinstance(place, int | str):
            raise GhostlayersError(
                f"`device_map` puts {name!r} on {place!r}. Allowed: a GPU number, a device such as "
                "'cuda:1' or 'cpu', or 'disk'."
            )
    _check_overlap(value)
    return value


def _check_overlap(places: Mapping[str, int | str]) -> None:
    """Refuse a place for a module beside one for a part of it, where weights are offloaded."""
    for outer in places if "disk" in places.values() else ():
        for name in places:
            if name != outer and (not outer or name.startswith(f"{outer}.")):
                raise GhostlayersError(
                    f"`device_map` names {outer!r} and {name!r}, which is inside it. With parts on "
                    "disk, name every part once."
                )


def parse_max_memory(text: str) -> dict[int | str, int]:
    """Read limits such as `0=20GiB,cpu=30GiB`.

    Raises:
        GhostlayersError: If a part is no `device=size`, or names a device twice.
    """
    found: dict[int | str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        match = SIZE.fullmatch(size)
        if match is None or not (name.isdecimal() or name in ("cpu", "mps")):
            raise GhostlayersError(
                f"`max_memory` has {part.strip()!r}. Allowed: a GPU number or cpu, =, and a size, "
                "split by commas, such as 0=20GiB,cpu=30GiB."
            )
        key = int(name) if name.isdecimal() else name
        if key in found:
            raise GhostlayersError(f"`max_memory` names {name!r} twice. Give it one size.")
        found[key] = int(float(match[1]) * UNITS[(match[2] or "B").upper()])
    return found


def check_places(placement: Placement) -> None:
    """Check that every device that a placement names is there.

    Raises:
        GhostlayersError: If one is not.
    """
    from .devices import resolve_device

    places = placement.device_map
    named = [] if places is None or isinstance(places, str) else list(places.values())
    named += [name for name in placement.max_memory or () if isinstance(name, int)]
    for place in dict.fromkeys(named):
        if place != "disk":
            name = f"cuda:{place}" if isinstance(place, int) else place
            resolve_device(name, option="device_map")


def check_parts(model: nn.Module, placement: Placement) -> None:
    """Check that every name in a device map is a part of the model.

    Raises:
        GhostlayersError: If one is not.
    """
    places = placement.device_map
    if places is None or isinstance(places, str):
        return
    known = {name for name, _ in model.named_modules()} | set(model.state_dict())
    unknown = sorted(set(places) - known)
    if unknown:
        raise GhostlayersError(
            f"`device_map` names {unknown[0]!r}, which is no part of the model. Allowed: names "
            f"such as {next(name for name in known if name.count('.') == 2)!r}."
        )


__all__ = [
    "FLAGS",
    "Placement",
    "check_parts",
    "check_places",
    "parse_device_map",
    "parse_max_memory",
    "place_",
    "placement_of",
]
