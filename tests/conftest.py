"""For the tests of all folders: the report of a failed test says how to repeat it."""

from helpers.failures import pytest_runtest_makereport, pytest_runtest_setup  # noqa: F401, hooks
