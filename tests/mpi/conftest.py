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
from fnmatch import fnmatch
from pathlib import Path

import contract
import pytest
import torch
from shm_rig import slots, stopped  # noqa: F401, fixtures

import torchmpi as mpi

# A test that hangs must end with a failure that names the missing ranks, well before the limit of the runner.
os.environ.setdefault("TORCHMPI_STALL_WARNING_SECONDS", "20")
os.environ.setdefault("TORCHMPI_STALL_ABORT_SECONDS", "60")
# Huge pages, where the system has them, for tensors of gigabytes: small ones take longer to map than all calls on them.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# Files and single tests that reach MPI only through calls which the others test under every MPI, with the numbers of
# ranks on which scripts/test_cpu.sh runs them, each under one MPI. An even and an odd number show faults in what ranks
# exchange; two are enough for what uses such exchanges. One rank: calls return early, or have a fast path. Four:
# several groups of several ranks, such as grids of 2 x 2. The first entry that has a test counts.
ONCE = {
    (2, 4): (
        "test_comparison.py",
        *(f"test_selector.py::test_{name}" for name in ("over_several_hosts*", "queued_calls_keep_their_backend")),
    ),
    (2,): (
        *("test_large.py", "test_preparing.py", "test_selector.py"),
        "test_training_recipes.py",  # combinations of what the files of each interface test
        "test_groups.py::test_thousands_of_groups_fit",  # the limit of MPICH is that of a process
        "test_ipc.py::test_a_wait_for_a_missing_rank_ends_with_the_timeout",
    ),
    (4,): ("test_two_level.py::test_compressors_are_used_between_hosts_only",),
    (3,): ("test_shm_tensors.py::test_an_interrupt_during_the_first_mapping_ends_the_call_on_all_ranks",),
    (1, 2): (
        *("test_flight_record.py", "test_timeline.py"),
        *(f"test_engine_{name}.py" for name in ("allreduce", "fit", "meters", "validation")),
        *(f"test_nn_{name}.py" for name in ("async", "clipping", "closures", "compression", "error_feedback")),
        *(f"test_nn_{name}.py" for name in ("blocksequential", "gradient_checks", "optimizer")),
        *(f"test_distributed_{name}.py" for name in ("buckets", "compile", "data", "functional", "hooks")),
    ),
    (2, 3): (
        *("test_direct_reads.py", "test_nccl_over_gloo.py", "test_shm_calls.py", "test_shm_tensors.py"),
        "test_torch_groups.py",
        "test_profiler.py",
        *(f"test_groups.py::test_{name}_on_a_group" for name in ("functions_of_nn", "join_and_the_optimizer")),
    ),
    (1, 2, 3): (
        *("test_alltoall_splits.py", "test_ipc.py", "test_many.py", "test_metrics.py"),
        *("test_engine_checkpoint.py", "test_fast_path.py", "test_horovod.py", "test_parameterserver*", "test_shm.py"),
        *("test_nn_sync*", *(f"test_nn_{name}.py" for name in ("functional", "join", "replica_check", "sampler"))),
        *(f"test_distributed_{name}.py" for name in ("collectives", "ddp", "sharded", "works")),
    ),
    (1, 4): ("test_nn_model_parallel.py", *(f"test_distributed_{name}.py" for name in ("fsdp", "pipeline", "stack"))),
    (1, 3, 4): ("test_distributed_groups.py", "test_nn_sharding.py"),
}


def ranks_of_once(item: pytest.Function) -> tuple[int, ...]:
    """The numbers of ranks of a test that runs under one MPI; empty for all others."""
    names = item.path.name, f"{item.path.name}::{item.function.__name__}"
    for ranks, patterns in ONCE.items():
        if any(fnmatch(name, pattern) for name in names for pattern in patterns):
            return ranks
    return (1, 2, 3, 4) if item.get_closest_marker("once") else ()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which scripts/test_cpu.sh selects no test, which takes seconds on each rank."""
    selected = re.fullmatch("not once(?: or n([1-4]))?", config.option.markexpr)
    found = [
        (ranks, pattern)
        for ranks, patterns in ONCE.items()
        for pattern in patterns
        if fnmatch(collection_path.name, pattern.partition("::")[0])
    ]
    is_once = any("::" not in pattern for _, pattern in found)
    if selected and is_once and not any(int(selected[1] or 0) in ranks for ranks, _ in found):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        item.add_marker(pytest.mark.mpi)
        if ranks := ranks_of_once(item):
            item.add_marker("once")
            for number in ranks:
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
        if not condition:
            self.problems.append(message)

    def equal(self, actual: object, expected: object, message: str = "") -> None:
        """Exact equality; tensors compare in dtype, shape and every bit but the sign of zero."""
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            same = actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)
        else:
            same = bool(actual == expected)
        # Formatting tensors takes longer than most calls under test: only for failures.
        if not same:
            self(False, f"{message}: got {actual!r}, expected {expected!r}")

    def bits(self, actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
        """The same dtype, shape and every bit."""
        if not contract.same_bits(actual, expected):
            self(False, f"{message}: got {actual!r}, expected {expected!r}")

    def raises(self, kind: type[Exception], call: Callable[[], object], *words: str) -> None:
        """The call raises exactly this class, with these words in the message."""
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
    try:
        outcome = yield
    except Exception as error:
        problems.append("".join(traceback.format_exception(error, limit=-4)))
        # If the other ranks wait in a call, this is the only output.
        print(problems[-1], file=sys.__stderr__, flush=True)
    agreement = _agreements.pop(pyfuncitem.nodeid, None)
    problems += agreement.problems if agreement is not None else []
    most = array("i", [0])
    request = MPI.COMM_WORLD.Iallreduce(array("i", [len(problems)]), most, MPI.MAX)
    while not request.Test():
        time.sleep(0.0002)  # in Wait() under MPICH, this rank would keep the core that a later one needs
    everywhere = MPI.COMM_WORLD.allgather(problems) if most[0] else []
    failed = [f"rank {rank}: {problem}" for rank, theirs in enumerate(everywhere) for problem in theirs]
    if failed:
        raise AssertionError("\n".join(failed))
    return outcome
