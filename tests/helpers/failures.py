"""What the report of a failed test says beside the traceback: ranks, MPI, seed, and the command that repeats the case.

``tests/conftest.py`` takes over the hooks. The generators of Python, NumPy and torch begin each test with the same
seed, so that a test gets the same numbers alone as after others; TORCHMPI_TEST_SEED is another seed.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SEED = int(os.environ.get("TORCHMPI_TEST_SEED", "1"))
SETTINGS = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("TORCHMPI_", "HYPOTHESIS_"))}
SETTINGS.pop("TORCHMPI_TUNING_FILE")  # set by this package
"""Of the environment in which pytest was started; conftest files add some."""
jobs: list[list[str]] = []
"""The commands of the jobs that the running test has started."""


def _generators() -> dict[str, tuple[Any, Any]]:
    """The state of each generator that a test may use without a seed, and the state after the last seed."""
    states = {"Python": (random.getstate(), random.Random(SEED).getstate())}
    if (np := sys.modules.get("numpy")) is not None:
        own, fresh = (each.get_state() for each in (np.random, np.random.RandomState(SEED)))
        states["NumPy"] = tuple((bytes(words), place) for _, words, place, *_ in (own, fresh))
    if (torch := sys.modules.get("torch")) is not None:
        fresh = torch.Generator().manual_seed(torch.initial_seed())
        states["torch"] = bytes(torch.get_rng_state().numpy()), bytes(fresh.get_state().numpy())
    return states


def seed_generators() -> None:
    """Begin with the seed."""
    random.seed(SEED)
    if (np := sys.modules.get("numpy")) is not None:
        np.random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        # manual_seed() takes a millisecond to note its stack for devices that are not there.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(SEED)


def seeds() -> str:
    """Return the seed of each generator of which numbers were drawn."""
    used = [name for name, (now, fresh) in _generators().items() if now != fresh]
    texts = [f"{SEED} ({name})" for name in used if name != "torch"]
    if "torch" in used:
        texts.append(f"{sys.modules['torch'].initial_seed()} (torch)")
    return ", ".join(texts)


@cache
def mpi_version(program: str = "mpirun") -> str:
    """Return the name and the version of the MPI of this process, or else that of a launcher."""
    if (module := sys.modules.get("mpi4py.MPI")) is not None and module.Is_initialized():
        return " ".join(module.Get_library_version().replace(",", "\n").replace("\0", "").splitlines()[0].split())
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    except OSError:
        return "none"
    lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
    words = [line for line in lines if "Version:" in line or "Open MPI" in line]
    return " ".join((words or lines or ["unknown"])[0].split())


def _launcher() -> str:
    """Return the mpirun of this environment, or else of the system."""
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "mpirun"


def command(nodeid: str, num_ranks: int = 0, marker: str = "") -> str:
    """Return the command that repeats a test, of a job with `num_ranks` unless that is 0, selected by a marker.

    >>> command("tests/unit/test_config.py::test_x[a b]")
    "python -m pytest 'tests/unit/test_config.py::test_x[a b]'"
    """
    words, options = ["python", "-m", "pytest"], []
    if num_ranks:
        words[:0] = ["mpirun", *(["--oversubscribe"] if "Open MPI" in mpi_version() else []), "-n", str(num_ranks)]
        options = ["--with-mpi", "-p", "no:cacheprovider", *(["-m", marker] if marker else [])]
    settings = [f"{name}={shlex.quote(value)}" for name, value in SETTINGS.items()]
    return " ".join([*settings, shlex.join([*words, *options, nodeid])])


def how_to_repeat(item: pytest.Item) -> str:
    """Return the lines about a failed test."""
    folder, num_ranks, marker, lines = item.path.parent.name, 0, "", []
    if folder == "mpi":
        from torchmpi.launch import launcher

        place = launcher.detect()
        num_ranks = place.num_ranks or 1
        marker = f"n{num_ranks}" if item.get_closest_marker(f"n{num_ranks}") else ""
        lines = [f"ranks:     {num_ranks}", f"MPI:       {mpi_version()}"]
    elif folder in ("jobs", "hosts", "security"):
        lines = [f"job:       {shlex.join(each)[:300]}" for each in jobs] + [f"MPI:       {mpi_version(_launcher())}"]
    else:
        lines = ["ranks:     1, without MPI"]
    if drawn := seeds():
        lines.append(f"seed:      {drawn}")
    repeating = command(item.nodeid, num_ranks, marker)
    if folder == "hosts":
        name = "openmpi" if "Open MPI" in mpi_version(_launcher()) else "mpich"
        repeating = f"scripts/test_hosts.sh --faults --mpi {name} -k {getattr(item, 'originalname', item.name)}"
    return "\n".join([*lines, f"to repeat: {repeating}"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin each test, with its fixtures, in the same state."""
    jobs.clear()
    seed_generators()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the lines to the report of a failure."""
    report = yield
    if report.failed:
        report.sections.append(("this case", how_to_repeat(item)))
    return report
