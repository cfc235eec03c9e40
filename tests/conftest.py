"""For the tests of all folders: the report of a failed test says how to repeat it; tests of a release are skipped."""

from __future__ import annotations

import os

import pytest
from helpers.failures import pytest_runtest_makereport, pytest_runtest_setup  # noqa: F401, hooks

IS_COMPLETE = bool(os.environ.get("TORCHMPI_TEST_COMPLETE"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_COMPLETE:
        return
    reason = "before a release: scripts/test_cpu.sh --complete, or TORCHMPI_TEST_COMPLETE=1"
    for item in items:
        if item.get_closest_marker("release"):
            item.add_marker(pytest.mark.skip(reason=reason))
