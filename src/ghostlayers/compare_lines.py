"""The lines of a comparison's file, one class for each kind. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class RunLine:
    """What is compared; the first line, and one more where the grid or a release changed.

    Attributes:
        model: `name`, `architecture`, `num_layers`, `hidden_size`, `parameters`, `dtype`, and
            `fingerprint` (`config_sha256`, `weights_sha256`).
        versions: Of Python and the packages that numbers depend on.
        created: When the run began, ISO 8601, UTC.
        settings: Every setting of the comparison.
        machine: `cpu`, `gpu` (None without), `threads`.
        title: What a configuration file says that it reproduces; None without.
        expected: Numbers that a configuration file expects, with their source; None without.
        planned: What that file asks for before flags change it: `model`, `settings`, the short
            names `calibrations` and `texts`, and whether the run is at `smoke` size; None without.
        commit: Commit of the source tree that ran, if it is one.
        command: Arguments of the command line.
    """

    kind: ClassVar[str] = "run"
    model: dict[str, Any]
    versions: dict[str, str]
    created: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    title: str | None = None
    expected: Any = None
    planned: dict[str, Any] | None = None
    commit: str | None = None
    command: list[str] | None = None


@dataclass(frozen=True)
class CalibrationLine:
    """One calibration text at one number of windows, and the first sweep over it.

    Attributes:
        name: Short name of the text; cuts and cells refer to it.
        num_windows: Windows asked for; cuts and cells refer to it.
        hash: SHA-256 of the token ids.
        window: Tokens a window.
        tokens: Tokens in all windows.
        calibration: The record of the windows, as in a checkpoint.
        similarity: (L+1) rows of L+1 mean cosine similarities of the hidden states.
        rls: Representation Locality Score.
        locality: `localized`, `intermediate` or `distributed`.
        num_clusters: Clusters that `lorp` uses.
        clusters: Cluster of each of the L layers, in the order of depth.
        block_influence: 1 − S[i, i+1] of each of the L layers.
        seconds: Wall time of the sweep.
    """

    kind: ClassVar[str] = "calibration"
    name: str
    num_windows: int
    hash: str
    window: int
    tokens: int
    calibration: dict[str, Any]
    similarity: list[list[float]]
    rls: float
    locality: str
    num_clusters: int
    clusters: list[int]
    block_influence: list[float]
    seconds: float = 0.0


@dataclass(frozen=True)
class DenseLine:
    """The dense model's quality and speed.

    Attributes:
        perplexity: By short name of the text: `perplexity`, `standard_error` (that of the mean loss
            over the windows times the perplexity; None for one window), `loss`, `window_losses`,
            and the record of the windows: `source`, `windows`, `window`, `tokens`, `ids_sha256`.
        tasks: JSON values of `TaskResults`; None if not asked for.
        speed: JSON values of `SpeedResult`; None if not asked for.
        task_items: By task: `items` and `values`, with which cells are compared item by item.
        seconds: Wall time.
    """

    kind: ClassVar[str] = "dense"
    perplexity: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None
    task_items: dict[str, Any] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class CutLine:
    """What one selector removes.

    Attributes:
        calibration: Short name of the text.
        num_windows: Windows asked for.
        selector: Name of the selector, or `layers`.
        num_remove: Budget.
        layers: Removed layers, ascending; empty if refused.
        clusters: Clusters of `lorp`, each a list of layers, by first layer; None for another.
        merged: Whether kept layers have new weights (`laco`): its cells carry the selector's name.
        selection: What the selector or its search measured, JSON values; None if nothing.
        seconds: Wall time.
        refused: Why there is no cut; None if there is one.
    """

    kind: ClassVar[str] = "cut"
    calibration: str
    num_windows: int
    selector: str
    num_remove: int
    layers: list[int] = field(default_factory=list)
    clusters: list[list[int]] | None = None
    merged: bool = False
    selection: dict[str, Any] | None = None
    seconds: float = 0.0
    refused: str | None = None


@dataclass(frozen=True)
class CellLine:
    """One cut with one operator.

    Attributes:
        calibration: Short name of the text.
        num_windows: Windows asked for.
        layers: Removed layers, ascending.
        operator: What was asked for, such as `ghost`.
        fit: `dense` or `sequential`.
        selector: The selector whose merged weights these are; None for a plain cut.
        used: Operator at each boundary after the guard; `none` where there is none.
        boundaries: What a checkpoint's record says of each boundary: errors before and after, ...
        guard: What a checkpoint's record says of the guard; None without.
        refinement: What a checkpoint's record says of the refinement; None without.
        perplexity: As in `DenseLine`, and `ratio` to the dense model, `log_ratio` and its
            `log_ratio_standard_error` over pairs of windows.
        tasks: As in `DenseLine`, compared with the dense model item by item.
        speed: As in `DenseLine`, with `promised_speedup` and `speedup`.
        parameters: Parameters of the model.
        warnings: One line each.
        seconds: Wall time.
        refused: Why there is no result; None if there is one.
    """

    kind: ClassVar[str] = "cell"
    calibration: str
    num_windows: int
    layers: list[int]
    operator: str
    fit: str = "dense"
    selector: str | None = None
    used: list[str] = field(default_factory=list)
    boundaries: list[dict[str, Any]] = field(default_factory=list)
    guard: dict[str, Any] | None = None
    refinement: dict[str, Any] | None = None
    perplexity: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None
    parameters: int | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    refused: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells a cell from all others."""
        place = self.calibration, self.num_windows, tuple(self.layers)
        return (*place, self.operator, self.fit, self.selector)


Line = RunLine | CalibrationLine | DenseLine | CutLine | CellLine
KINDS: dict[str, type[Any]] = {
    line.kind: line for line in (RunLine, CalibrationLine, DenseLine, CutLine, CellLine)
}

__all__ = ["KINDS", "CalibrationLine", "CellLine", "CutLine", "DenseLine", "Line", "RunLine"]
