"""Attacks of another user of the host: most need root, and are skipped with the reason elsewhere."""

from helpers.checks import pytest_runtest_call  # noqa: F401, a hook
