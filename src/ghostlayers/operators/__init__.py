"""Operators: the map put at a boundary. One file per method, one table of names.

An operator is a function from the boundary's moments to an `OperatorFit`. To add one: write it in
its own file and add a line to `OPERATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import GhostlayersError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from ..layer_probe import FoldSite


NO_OPERATOR = "none"
OPERATORS: dict[str, str] = {
    "ghost": "ghost:fit_ghost",
    "ghost-robust": "ghost_robust:fit_ghost_robust",
    "ghost-norm": "ghost_norm:fit_ghost_norm",
    "linearpatch-diag": "linearpatch:fit_linearpatch",
    "linearpatch-rotate": "linearpatch:fit_linearpatch",
    "replaceme-lstsq": "replaceme:fit_lstsq",
    "replaceme-cosine": "replaceme:fit_cosine",
    "fold": "fold:fit_fold",
    "fold+ghost": "fold_ghost:fit_fold_ghost",
}
# Operators that treat massive tokens apart: they need the norms of all states.
ROBUST = ("ghost-robust", "fold+ghost")
# Methods that change weights of the layer before a cut, that attach a module, and that are kept
# only as far as the guard finds them to help.
FOLDING = ("fold", "fold+ghost", "replaceme-lstsq", "replaceme-cosine")
LINEARPATCH = ("linearpatch-diag", "linearpatch-rotate")
ATTACHING = ("ghost", "ghost-robust", "ghost-norm", "fold+ghost", *LINEARPATCH)
GUARDED = ("ghost-robust", "ghost-norm", "fold", "fold+ghost")
# Operators of which the guard may choose the ridge.
RIDGED = ("ghost-robust", "ghost-norm")
# Steps by which a method is refined unless `refine` says otherwise.
REFINED_STEPS = {"fold": 96, "fold+ghost": 96}
# Ends the name of a repair that was refined.
REFINED = "-refined"
# Methods that transform the MLP output of the layer before a cut; they are neither guarded nor
# exchanged for another one where that is not possible.
REPLACING = ("replaceme-lstsq", "replaceme-cosine")
# Operators that may be of lower rank.
RANKED = ("ghost", "ghost-robust", "ghost-norm")


@dataclass(frozen=True)
class OperatorFit:
    """A fitted operator: its tensors and how well it fits.

    Attributes:
        name: Method, as in `OPERATORS`.
        tensors: Parameters by name; empty if nothing is attached. `m` is (C, C) in the row
            convention: the operator is x + xM, or x + x·`down`·`up` with (C, r) and (r, C).
            (`nn.Linear` stores the transpose.) The others are named as in `GhostOperator`.
        diagnostics: JSON values: N, C, relative errors before and after on calibration and on
            held-out windows, and what the method adds.
        warnings: One line each; shown to the user and stored.
        spec: What the module needs to know beside its tensors; keys of an operator's spec.
        fit_part: The tensors of the same fit without the held-out windows; for the guard.
        weights: New weights of the layer before the boundary, by path inside it; empty if it stays.
        weights_part: The same without the held-out windows.
        sites: Maps of that layer, by path of their weight: every changed one that a norm stands
            behind is among them.
    """

    name: str
    tensors: dict[str, Tensor]
    diagnostics: dict[str, Any]
    warnings: tuple[str, ...] = field(default=())
    spec: dict[str, Any] = field(default_factory=dict)
    fit_part: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    weights_part: dict[str, Tensor] = field(default_factory=dict)
    sites: dict[str, FoldSite] = field(default_factory=dict)


def check_size(rank: int | None, hidden_size: int) -> None:
    """Check, before any weight is loaded, that an operator exists for a hidden size.

    Raises:
        GhostlayersError: If the rank exceeds it.
    """
    if rank is not None and rank > hidden_size:
        raise GhostlayersError(
            f"`rank` is {rank} and the model's hidden size is {hidden_size}. Allowed: 1 to "
            f"{hidden_size}."
        )


OperatorFitter = Callable[..., OperatorFit]


def operator_names() -> tuple[str, ...]:
    """Return the names that `recover` accepts."""
    return (*OPERATORS, NO_OPERATOR)


def get_operator(name: str) -> OperatorFitter:
    """Import an operator's fitting function by name.

    Raises:
        GhostlayersError: If no operator has that name; the nearest name is suggested.
    """
    if name not in OPERATORS:
        raise unknown_name("operator", name, operator_names())
    module, function = OPERATORS[name].split(":")
    fitter: OperatorFitter = getattr(import_module(f".{module}", __name__), function)
    return fitter
