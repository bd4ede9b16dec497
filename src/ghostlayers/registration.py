"""Make checkpoints with operators known to transformers, without importing it.

`import ghostlayers` must not import torch, yet `AutoModelForCausalLM.from_pretrained(OUT)`
must work after it. If transformers' auto classes are loaded already, the model type is registered
at once; otherwise right after the import that first brings them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Register the model type of checkpoints with operators; may be called any number of times."""
    if f"{__package__}.modeling_ghostlayers" in sys.modules:
        return  # it registers itself at the end of its import
    import_module(".modeling_ghostlayers", __package__)


class _RegisterAfterImport(MetaPathFinder):
    """Finds transformers' modules as usual; registers when an import leaves the auto classes.

    transformers' modules import one another in circles, so the modeling file can be imported only
    once no module of theirs is half done: after the outermost of them.
    """

    def __init__(self) -> None:
        self.running = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = partial(self._execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        depth = getattr(self.running, "depth", 0)
        self.running.depth = depth + 1
        try:
            execute(module)
        finally:
            self.running.depth = depth
        if not depth and AUTO_CLASSES in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            register()


def arrange_registration() -> None:
    """Register now if the auto classes are loaded, else right after their first import."""
    if AUTO_CLASSES in sys.modules:
        register()
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())
