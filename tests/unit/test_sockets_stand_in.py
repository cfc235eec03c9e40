"""What stands in MPI's place: that it has all names that torchmpi uses, and that it is taken."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import torchmpi
from torchmpi.distributed import sockets
from torchmpi.errors import LaunchError
from torchmpi.session import mpi_library

PACKAGE = Path(torchmpi.__file__).parent
# What only the code does that starts the library itself.
ONLY_IN_A_LIBRARY = {"Init_thread", "__file__"}


@pytest.fixture
def MPI():
    MPI = sockets.connect(dist.HashStore(), 0, 1, timeout_seconds=1)
    mpi_library.adopt(MPI)
    yield MPI
    mpi_library.adopt(None)
    MPI.close()


def uses_of(*objects):
    """Attributes that the package asks of variables and members with these names, and where."""
    for path in PACKAGE.rglob("*.py"):
        if "sockets" in path.parts or "bench" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = getattr(owner, "id", "") or getattr(owner, "attr", "")
                if name in objects:
                    yield node.attr, f"{path.name}:{node.lineno}"


def test_it_has_every_name_that_is_used_of_the_module(MPI):
    found = dict(uses_of("MPI", "_MPI"))
    assert {"BYTE", "COMM_WORLD", "Status", "Exception", "Request"} <= found.keys(), "the search finds nothing"
    missing = {name: where for name, where in found.items() if not hasattr(MPI, name)}
    assert missing.keys() <= ONLY_IN_A_LIBRARY, missing


def test_it_has_every_name_that_is_used_of_communicators(MPI):
    # Capital letters and what mpi4py has for objects: `comm` is also the name of torchmpi's own communicators.
    lower = {"send", "isend", "recv", "iprobe", "bcast", "allgather", "allreduce", "gather", "scatter", "alltoall"}
    found = {
        name: where
        for name, where in uses_of("comm", "_comm", "side_comm", "near_comm", "world", "_base", "COMM_WORLD")
        if name[0].isupper() or name in lower
    }
    assert {"Isend", "Recv", "Split", "Barrier", "allgather"} <= found.keys(), "the search finds nothing"
    assert {name: where for name, where in found.items() if not hasattr(MPI.COMM_WORLD, name)} == {}


def test_it_has_every_type_and_operation_by_name(MPI):
    for name in ("FLOAT", "DOUBLE", "C_DOUBLE_COMPLEX", "UINT64_T", "SUM", "LXOR"):
        assert getattr(MPI, name) is getattr(MPI, name)
    with pytest.raises(AttributeError, match=r"no MPI\.BFLOAT16"):
        _ = MPI.BFLOAT16


def test_it_is_taken_for_the_library(MPI):
    assert mpi_library.load() is MPI and mpi_library.initialise() == (MPI, False)
    assert mpi_library.thread_level(MPI) == "MULTIPLE" and not mpi_library.is_cuda_aware()
    assert mpi_library.short_version(MPI) == f"torchmpi sockets {torchmpi.__version__}"
    total = np.ones(3)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, (total, MPI.DOUBLE), MPI.SUM)
    assert total.tolist() == [1.0] * 3


def test_when_it_is_closed_that_is_said(MPI):
    MPI.close()
    with pytest.raises(LaunchError, match="Connect again, and adopt"):
        mpi_library.initialise()
    with pytest.raises(MPI.Exception, match="closed"):
        MPI.COMM_WORLD.Barrier()
