"""The tests of `test_reference` on the other real model: in a file of its own, to run beside it.

Its vocabulary of 262,144 makes every perplexity dear: they are slow tests.
"""

from __future__ import annotations

import pytest

from test_reference import *  # noqa: F403
from test_reference import (
    SELECTORS,
    check_dense_perplexity,
    check_linearpatch,
    check_recovered_perplexity,
    measured_on_all_cores,
)


@pytest.fixture(scope="module", params=["gemma3"])
def measured(request, shared):
    yield from measured_on_all_cores(request.param, shared)


@pytest.mark.slow
def test_dense_perplexity(measured):
    check_dense_perplexity(measured)


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_pruned_and_recovered_perplexity(measured, selector):
    check_recovered_perplexity(measured, selector)


@pytest.mark.slow
def test_linearpatch(measured):
    check_linearpatch(measured)
