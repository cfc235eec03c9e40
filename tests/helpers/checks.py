"""The number of checks that have been made, so that a test which makes none can fail.

A test without checks passes whatever the code does: after an early return, or a loop over nothing. Counted are assert
statements, ``pytest.raises`` and ``pytest.warns``, the comparisons of torch and NumPy, and calls of :func:`note` by
helpers that check by other means. ``tests/conftest.py`` takes over :func:`pytest_runtest_call`; the conftest of
``tests/mpi`` adds the checks of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.assertion import rewrite

number = 0
"""The number of checks of this process."""


def note() -> None:
    """Count a check."""
    global number
    number += 1


def count(module: Any, *names: str) -> None:
    """Count the calls of functions of a module that check something."""
    for name in names:
        setattr(module, name, _counting(getattr(module, name)))


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*arguments: Any, **named: Any) -> Any:
        note()
        return function(*arguments, **named)

    return counted


def _count_assertion() -> bool:
    """In place of pytest's question, after an assertion that holds, whether a plugin wants an explanation of it."""
    note()
    return False


if not rewrite.PYC_TAIL.startswith(".counted"):
    # pytest asks only in files that were compiled with enable_assertion_pass_hook (setup.cfg).
    rewrite.PYC_TAIL = ".counted" + rewrite.PYC_TAIL
    rewrite._check_if_assertion_pass_impl = _count_assertion
    count(pytest, "raises", "warns", "fail")
    count(torch.testing, "assert_close")
    count(np.testing, "assert_array_equal", "assert_allclose", "assert_equal")


def refuse_no_checks(item: pytest.Item, num_checks: int) -> None:
    """Fail a test that has made no check."""
    if num_checks == 0:
        raise AssertionError(
            f"{item.nodeid} has checked nothing. Let it check something, or not run here: skipif, or the marker ranks."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that has made no check; with drawn examples, chance may decide whether one is made."""
    before = number
    result = yield
    is_of_ranks = item.get_closest_marker("mpi") is not None  # of which one may have nothing to check
    if not is_of_ranks and not hasattr(getattr(item, "function", None), "hypothesis"):
        refuse_no_checks(item, number - before)
    return result
