"""Settings of Hypothesis, torch, MPI and the garbage collector; what `pytest` without arguments runs."""

from __future__ import annotations

import gc
import os

import hypothesis
import mpi4py
import pytest
import torch

# Without a deadline, which an example could exceed on a busy machine. The same examples in each run, so that a change
# is judged by what it changes; HYPOTHESIS_PROFILE=search looks for others.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
# A second thread does not help these small tensors, and waits for a core that another suite may have.
torch.set_num_threads(1)
# A module that imports MPI does not start it, and with it handlers of signals and sockets, in the process of all tests.
mpi4py.rc.initialize = False

_MOST_WORKERS = 4  # each one imports torch and collects the tests, which takes seconds
# In the environment of the workers themselves, which also run this file, and of ranks.
_STARTED = ("PYTEST_XDIST_WORKER", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Exempt the objects of imported modules from collection; gc.collect() in a test then takes milliseconds."""
    gc.collect()
    gc.freeze()


def is_without_arguments(config: pytest.Config) -> bool:
    """Return whether pytest has no files, folders or markers."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Without arguments: leave out slow tests, and run the others on several cores."""
    if not is_without_arguments(config):
        return
    config.stash[_header] = "Under a minute on two free cores; with tests that are marked slow: pytest tests/unit"
    config.option.markexpr = "not slow"
    if config.option.durations is None:
        config.option.durations = 10
    cores = len(os.sched_getaffinity(0))
    if may_start_workers(config) and cores > 1:
        config.option.numprocesses, config.option.dist = min(cores, _MOST_WORKERS), "worksteal"


def may_start_workers(config: pytest.Config) -> bool:
    """Return whether pytest-xdist is there, nobody has chosen how it works, and this is neither a worker nor a rank."""
    if not config.pluginmanager.hasplugin("xdist") or any(name in os.environ for name in _STARTED):
        return False
    options = config.option
    return options.numprocesses is None and not (options.tx or options.usepdb or options.collectonly)


_header = pytest.StashKey[str]()


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(_header, None)
