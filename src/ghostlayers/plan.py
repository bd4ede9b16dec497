"""Which layers go, and the boundaries that their removal leaves.

Layer indices are 0-based positions in the dense model. A boundary ``[start, stop)`` is a maximal
run of removed layers: its operator maps hidden state ``start`` (what enters layer ``start``) to
hidden state ``stop``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from .errors import PlanError


@dataclass(frozen=True, order=True)
class Boundary:
    """A maximal run of removed layers, half-open.

    Attributes:
        start: First removed layer.
        stop: First kept layer after the run, or the depth L when the run ends the model.
    """

    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True)
class PruningPlan:
    """The layers to remove from a dense model.

    Attributes:
        num_layers: Depth L of the dense model.
        removed: Removed layers, ascending.
    """

    num_layers: int
    removed: tuple[int, ...]

    def __post_init__(self) -> None:
        removed = tuple(sorted(set(self.removed)))
        if len(removed) != len(self.removed):
            raise PlanError(f"`layers` names a layer twice: {list(self.removed)}. Name each once.")
        object.__setattr__(self, "removed", removed)
        wrong = [layer for layer in removed if not 0 <= layer < self.num_layers]
        if wrong:
            raise PlanError(
                f"`layers` names {wrong}, outside the model's {self.num_layers} layers. "
                f"Allowed: 0 to {self.num_layers - 1}."
            )
        if len(removed) >= self.num_layers:
            raise PlanError(
                f"`layers` removes all {self.num_layers} layers. At least one layer must stay."
            )

    @property
    def kept(self) -> tuple[int, ...]:
        """Kept layers, ascending, as indices of the dense model."""
        gone = set(self.removed)
        return tuple(layer for layer in range(self.num_layers) if layer not in gone)

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The maximal runs of removed layers, from the input side."""
        runs: list[Boundary] = []
        for layer in self.removed:
            if runs and runs[-1].stop == layer:
                runs[-1] = Boundary(runs[-1].start, layer + 1)
            else:
                runs.append(Boundary(layer, layer + 1))
        return tuple(runs)

    def operator_site(self, boundary: Boundary) -> tuple[int, str]:
        """Say where a boundary's operator sits in the pruned model.

        Returns:
            Index of the layer in the pruned model, and ``"input"`` (applied to what enters that
            layer) or ``"output"`` (applied to what leaves it: the run ends the model).
        """
        if boundary.stop == self.num_layers:
            return len(self.kept) - 1, "output"
        return self.kept.index(boundary.stop), "input"


def parse_layers(text: str, num_layers: int | None = None) -> tuple[int, ...]:
    """Read a list of layers such as ``12-18,21``; ranges include both ends.

    Args:
        text: Comma-separated 0-based indices and ranges.
        num_layers: Depth of the model, when known; indices are then checked against it.

    Returns:
        The layers, ascending.

    Raises:
        PlanError: If the text is not such a list, is empty, or names a layer outside the model.
    """
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise PlanError(
                f"`layers` has the part {part.strip()!r}. Allowed: 0-based indices and ranges such "
                "as 12-18,21 (both ends included)."
            )
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise PlanError(f"`layers` has the empty range {part.strip()!r}. Write {high}-{low}.")
        if num_layers is not None and high >= num_layers:
            raise PlanError(
                f"`layers` names layer {high}, outside the model's {num_layers} layers. "
                f"Allowed: 0 to {num_layers - 1}."
            )
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))


def format_layers(layers: Sequence[int]) -> str:
    """Write layers the way `parse_layers` reads them, for example ``12-18,21``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def layers_text(layers: object) -> str:
    """Return the text that names some layers: a text as it is, a sequence of indices written.

    Raises:
        PlanError: If it is neither, or an index is negative.
    """
    if isinstance(layers, str):
        return layers
    found = list(layers) if isinstance(layers, Iterable) else []
    if not found or not all(_is_index(layer) for layer in found):
        raise PlanError(
            f"`layers` is {layers!r}. Allowed: a text such as 12-18,21 (both ends included), or a "
            "list of 0-based indices."
        )
    return format_layers([int(layer) for layer in found])


def _is_index(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def removable_layers(
    num_layers: int,
    *,
    protect_first: int = 1,
    protect_last: int = 1,
    protected: Iterable[int] = (),
) -> tuple[int, ...]:
    """List the layers that a selector may remove.

    Args:
        num_layers: Depth L.
        protect_first: Number of layers kept at the input side.
        protect_last: Number of layers kept at the output side.
        protected: Further layers that must stay, such as a hybrid model's last attention layer.

    Returns:
        Candidate layers, ascending.
    """
    keep = set(protected)
    return tuple(
        layer for layer in range(protect_first, num_layers - protect_last) if layer not in keep
    )


def check_num_remove(num_remove: int, num_layers: int, allowed: Sequence[int]) -> None:
    """Check a budget against the layers that may be removed.

    Raises:
        PlanError: If `num_remove` is below 1, not below the depth, or above the number of layers
            that are not protected.
    """
    if num_remove < 1:
        raise PlanError(
            f"`num_remove` is {num_remove}. Allowed: 1 to {len(allowed)}; nothing would be removed."
        )
    if num_remove >= num_layers:
        raise PlanError(
            f"`num_remove` is {num_remove} and the model has {num_layers} layers. Allowed: 1 to "
            f"{min(len(allowed), num_layers - 1)}; at least one layer must stay."
        )
    if num_remove > len(allowed):
        raise PlanError(
            f"`num_remove` is {num_remove} but only {len(allowed)} of the {num_layers} layers may "
            f"be removed. Lower it, protect fewer layers, or name the layers with `layers`."
        )
