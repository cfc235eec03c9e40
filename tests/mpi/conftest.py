"""Tests that run inside a job: ``mpirun -n N python -m pytest --with-mpi tests/mpi``.

Every rank runs every test. A rank that fails before a collective would leave the others waiting, so a test makes all
its calls first and compares afterwards; a failure on one rank is then reported on all, with the rank named.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import checks, contract, failures
from helpers.shm_rig import slots, stopped  # noqa: F401, fixtures

import torchmpi as mpi
import torchmpi.nn
from torchmpi.launch import launcher

# A test that hangs must end with a failure that names the missing ranks, well before the limit of the runner.
os.environ.setdefault("TORCHMPI_STALL_WARNING_SECONDS", "20")
os.environ.setdefault("TORCHMPI_STALL_ABORT_SECONDS", "60")
# The error of a rank whose call differs contains the call of the other rank, which the watchdog of that rank tells.
os.environ.setdefault("TORCHMPI_WATCHDOG_PERIOD_SECONDS", "0.05")
# Huge pages, where the system has them, for tensors of gigabytes: small ones take longer to map than all calls on them.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
NUMBERS_OF_RANKS = (1, 2, 3)
"""Those of tests without the marker ranks."""
MARKS_OF_FILE = re.compile(r"^pytestmark = .*?^(?=\S)", re.MULTILINE | re.DOTALL)
checks.count(mpi.nn, "check_with_allreduce")
SIZE = launcher.detect().num_ranks or 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which scripts/test_cpu.sh selects no test, which takes seconds on each rank."""
    selected = re.fullmatch(r"(quick and |not any_mpi and )?n(\d)", config.option.markexpr)
    if selected is None or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    statement = MARKS_OF_FILE.search(text)
    marks = statement[0] if statement else ""
    # Single tests may have other numbers, or more markers, than the file.
    is_wanted = any(selected[2] in ranks for ranks in re.findall(r"\.ranks\(([^)]*)\)", text))
    is_wanted |= ".ranks(" not in marks and int(selected[2]) in NUMBERS_OF_RANKS
    match selected[1]:
        case "quick and ":
            is_wanted &= ".quick" in text
        case "not any_mpi and ":
            is_wanted &= ".any_mpi" not in marks
    return None if is_wanted else True


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        item.add_marker(pytest.mark.mpi)
        ranks, least = item.get_closest_marker("ranks"), 1
        if (marker := item.get_closest_marker("min_ranks")) is not None:
            (least,) = marker.args
            item.add_marker(pytest.mark.skipif(least > SIZE, reason=f"needs {least} ranks, to check anything"))
        for number in NUMBERS_OF_RANKS if ranks is None else ranks.args:
            if number >= least:
                item.add_marker(f"n{number}")


def pytest_collection_finish() -> None:
    gc.freeze()  # otherwise each collection visits the objects of all imported modules, for half a second


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    """torchmpi, started."""
    mpi.start()
    yield
    mpi.stop()


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    """``init_process_group("torchmpi")``, as in a user's script, with or without torchmpi running already."""
    torch.distributed.init_process_group("torchmpi")
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, world: None) -> torch.device:
    """The device of the tensors of a test, which runs once per device; skipped if there is no GPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False here")
    return mpi.device()


class Agreement:
    """Collects the failures of this rank; the ranks exchange them when the test function has ended."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, condition: object, message: str = "condition does not hold") -> None:
        checks.note()
        if not condition:
            self.problems.append(message)

    def equal(self, actual: object, expected: object, message: str = "") -> None:
        """Exact equality; tensors compare in dtype, shape and every bit but the sign of zero."""
        checks.note()
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            same = actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)
        else:
            same = bool(actual == expected)
        # Formatting tensors takes longer than most calls under test: only for failures.
        if not same:
            self(False, f"{message}: got {actual!r}, expected {expected!r}")

    def bits(self, actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
        """The same dtype, shape and every bit."""
        checks.note()
        if not contract.same_bits(actual, expected):
            self(False, f"{message}: got {actual!r}, expected {expected!r}")

    def raises(self, kind: type[Exception], call: Callable[[], object], *words: str) -> None:
        """The call raises exactly this class, with these words in the message."""
        checks.note()
        try:
            result = call()
        except kind as error:
            self(type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}")
            for text in words:
                self(text in str(error), f"{text!r} is missing in: {error}")
        else:
            self(False, f"accepted instead of {kind.__name__}: {result!r}")

    def close(self, actual: torch.Tensor, expected: torch.Tensor, message: str = "", **tolerances: float) -> None:
        """``torch.testing.assert_close``."""
        try:
            torch.testing.assert_close(actual, expected, **tolerances)
        except AssertionError as error:
            self.problems.append(f"{message}: {error}")


_agreements: dict[str, Agreement] = {}


@pytest.fixture
def agree(request: pytest.FixtureRequest) -> Agreement:
    """``agree(condition, message)``, and ``agree.equal``, ``bits``, ``close`` and ``raises``."""
    agreement = _agreements[request.node.nodeid] = Agreement()
    return agreement


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    from mpi4py import MPI

    problems: list[str] = []
    outcome: object = None
    num_before = checks.number
    try:
        outcome = yield
    except Exception as error:
        problems.append("".join(traceback.format_exception(error, limit=-4)))
        # If the other ranks wait in a call, this is the only output.
        print(problems[-1], failures.how_to_repeat(pyfuncitem), sep="\n", file=sys.__stderr__, flush=True)
    agreement = _agreements.pop(pyfuncitem.nodeid, None)
    problems += agreement.problems if agreement is not None else []
    # mpi4py keeps no reference to the memory of a request.
    own, most = array("i", [len(problems), checks.number - num_before]), array("i", [0, 0])
    request = MPI.COMM_WORLD.Iallreduce(own, most, MPI.MAX)
    pause = 0.0002
    while not request.Test():
        time.sleep(pause)  # in Wait() under MPICH, this rank would keep the core that a later one needs
        pause = min(1.3 * pause, 0.003)
    everywhere = MPI.COMM_WORLD.allgather(problems) if most[0] else []
    failed = [f"rank {rank}: {problem}" for rank, theirs in enumerate(everywhere) for problem in theirs]
    if failed:
        raise AssertionError("\n".join(failed))
    checks.refuse_no_checks(pyfuncitem, most[1])
    return outcome
