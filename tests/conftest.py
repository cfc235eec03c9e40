"""For the tests of all folders: one without a check fails, a report says how to repeat its case, releases have more."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from helpers.checks import pytest_runtest_call  # noqa: F401, a hook
from helpers.failures import pytest_runtest_makereport, pytest_runtest_setup  # noqa: F401, hooks

IS_COMPLETE = bool(os.environ.get("TORCHMPI_TEST_COMPLETE"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_COMPLETE:
        return
    reason = "before a release: scripts/test_cpu.sh --complete, or TORCHMPI_TEST_COMPLETE=1"
    for item in items:
        if item.get_closest_marker("release"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the logger of torchmpi has said in this test.

    Without pytest's plugin for logging (setup.cfg), which visits all loggers of torch: a millisecond of each test.
    """
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("torchmpi")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)
