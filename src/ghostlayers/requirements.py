"""Which releases of transformers this package works with; imports neither it nor torch.

The oldest release is the first that finds weight conversions (fused experts) by class name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

OLDEST, BELOW = "5.9", "6"  # as in pyproject.toml
ALLOWED = f"transformers>={OLDEST},<{BELOW}"


def check_transformers() -> None:
    """Compare the installed transformers with the allowed releases; fine if there is none.

    Raises:
        RequirementError: If it is too old or too new; an ImportError.
    """
    from importlib import metadata

    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return
    if not _release(OLDEST) <= _release(found) < _release(BELOW):
        raise _error(f"transformers {found} is installed")


@contextmanager
def needing_transformers() -> Iterator[None]:
    """Run a block that may import transformers.

    Raises:
        RequirementError: If transformers is not installed; an ImportError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise _error("transformers is not installed") from error


def _release(version: str) -> tuple[int, int]:
    """Major and minor number; pre-releases count as the release they lead to."""
    major, minor = [*re.findall(r"\d+", version), "0"][:2]
    return int(major), int(minor)


def _error(found: str) -> ImportError:
    from .errors import RequirementError

    return RequirementError(
        f"ghostlayers works with {ALLOWED}; {found}. Run: python -m pip install '{ALLOWED}'"
    )
