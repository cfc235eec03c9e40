"""Settings of Hypothesis, of the threads of torch, and of the garbage collector."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest
import torch
from helpers.checks import pytest_runtest_call  # noqa: F401, a hook

# Without a deadline, which an example could exceed on a busy machine. The same examples in each run, so that a change
# is judged by what it changes; HYPOTHESIS_PROFILE=search looks for others.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
# A second thread does not help these small tensors, and waits for a core that another suite may have.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Exempt the objects of imported modules from collection; gc.collect() in a test then takes milliseconds."""
    gc.collect()
    gc.freeze()


def is_without_arguments(config: pytest.Config) -> bool:
    """Return whether pytest has no files, folders or markers."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    if is_without_arguments(config) and config.option.durations is None:
        config.option.durations = 10


def pytest_report_header(config: pytest.Config) -> str | None:
    if not is_without_arguments(config):
        return None
    return "two to three minutes, without the tests that are marked slow; those too: pytest tests/unit"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_without_arguments(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
