"""A user's own selector, named as ``module:function``.

The function takes a `ModelContext` and returns the layers to remove. The module may lie in the
working directory or anywhere on the Python path.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import GhostlayersError, PlanError

if TYPE_CHECKING:
    from . import Choice, ModelContext


def is_own(name: str) -> bool:
    """Whether a name of a selector is meant as ``module:function``."""
    return ":" in name


def own_name_fault(name: str) -> list[str]:
    """Return what is wrong with a name of the form ``module:function``; empty if nothing is."""
    module, _, function = name.partition(":")
    if all(part.isidentifier() for part in (*module.split("."), function)):
        return []
    return [
        f"`select` is {name!r}; a selector of your own is named module:function, "
        "such as my_selectors:pick"
    ]


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Let modules be found in the working directory, behind everything that is installed."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]


def import_own(name: str) -> Callable[[ModelContext], Iterable[int]]:
    """Import a user's function.

    Raises:
        GhostlayersError: If there is no such module or function, or importing it raises.
    """
    place, function = name.split(":")
    try:
        with _working_directory_on_path():
            module = import_module(place)
    except Exception as error:  # user code: anything may happen
        missing = isinstance(error, ModuleNotFoundError) and place.startswith(str(error.name))
        what = (
            f"there is no module {error.name!r} in the working directory or on the Python path"
            if isinstance(error, ModuleNotFoundError) and missing
            else f"importing {place} raised {type(error).__name__}: {_first_line(error)}"
        )
        raise GhostlayersError(f"`select` {name!r}: {what}.") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise GhostlayersError(
            f"`select` {name!r}: {place} has no function {function!r}. It must be a function of "
            "one argument, a ModelContext, that returns the layers to remove."
        )
    chosen: Callable[[ModelContext], Iterable[int]] = found
    return chosen


def own_selector(name: str) -> Callable[[ModelContext], Choice]:
    """Wrap a user's function: what it returns is checked.

    Raises:
        GhostlayersError: If it cannot be imported.
    """
    function = import_own(name)

    def select(context: ModelContext) -> Choice:
        from . import Choice

        try:
            answer = function(context)
        except GhostlayersError:
            raise
        except Exception as error:  # user code: anything may happen
            raise PlanError(
                f"`select` {name!r} raised {type(error).__name__}: {_first_line(error)}. --debug "
                "shows where."
            ) from error
        return Choice(checked_layers(name, answer, context.num_remove, context.allowed))

    return select


def checked_layers(
    name: str, answer: Any, num_remove: int, allowed: tuple[int, ...]
) -> tuple[int, ...]:
    """Check what a user's selector returned.

    Returns:
        The layers, ascending.

    Raises:
        PlanError: If it is no list of `num_remove` different integers out of `allowed`.
    """
    try:
        if isinstance(answer, str | bytes | dict):
            raise TypeError
        values = list(answer)
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        layers = [operator.index(value) for value in values]
    except TypeError as error:
        raise PlanError(
            f"`select` {name!r} returned {_shown(answer)}. Allowed: a list of {num_remove} layer "
            "indices (integers)."
        ) from error
    if len(set(layers)) != len(layers) or len(layers) != num_remove:
        raise PlanError(
            f"`select` {name!r} returned {_shown(layers)}. Allowed: {num_remove} different layers "
            "(`num_remove`)."
        )
    outside = sorted(set(layers) - set(allowed))
    if outside:
        raise PlanError(
            f"`select` {name!r} returned layers that may not be removed: {outside}. Allowed: those "
            f"in `context.allowed`, {list(allowed)}."
        )
    return tuple(sorted(layers))


def _shown(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")
