"""Types of settings, as their classes annotate them: checks of values that come from files."""

from __future__ import annotations

from typing import Any


def kind_name(kind: str) -> str:
    """Name a type for users."""
    if kind.startswith("tuple"):
        return "a list of whole numbers" if "int" in kind else "a list of texts"
    words = {"int": "a whole number", "float": "a number", "str": "a text"}
    words |= {"bool": "true or false", "None": "null"}
    return " or ".join(words[part] for part in kind.split(" | "))


def is_of(kind: str, value: Any) -> bool:
    """Say whether a value has the type that an annotation such as `int | None` names."""
    if kind.startswith("tuple"):
        wanted: type = int if "int" in kind else str
        return all(isinstance(v, wanted) and not isinstance(v, bool) for v in value)
    allowed: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    allowed["None"] = type(None)
    parts = [allowed[part] for part in kind.split(" | ")]
    if isinstance(value, bool) and "bool" not in kind:
        return False
    return any(isinstance(value, part) for part in parts)


__all__ = ["is_of", "kind_name"]
