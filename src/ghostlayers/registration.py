"""Make checkpoints with operators known to transformers, without importing it.

`import ghostlayers` must not import torch, yet `AutoModelForCausalLM.from_pretrained(OUT)`
must work after it. If transformers' auto classes are loaded already, the model type is registered
at once; otherwise when they are first imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Register the model type of checkpoints with operators; may be called any number of times."""
    if f"{__package__}.modeling_ghostlayers" in sys.modules:
        return  # it registers itself at the end of its import
    import_module(".modeling_ghostlayers", __package__)


class _RegisterAfterImport(MetaPathFinder):
    """Finds transformers' auto classes as usual, and registers once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_CLASSES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def arrange_registration() -> None:
    """Register now if the auto classes are loaded, else right after their first import."""
    if AUTO_CLASSES in sys.modules:
        register()
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())
