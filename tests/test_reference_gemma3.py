"""The tests of `test_reference` on the other real model: in a file of its own, to run beside it."""

from __future__ import annotations

import pytest

from test_reference import *  # noqa: F403
from test_reference import measured_on_all_cores


@pytest.fixture(scope="module", params=["gemma3"])
def measured(request, shared):
    yield from measured_on_all_cores(request.param, shared)
