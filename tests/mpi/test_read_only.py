"""To whoever passes memory that cannot be written: refused where a call would write to it, sent where it reads."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.errors import ArgumentError
from torchmpi.session import runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("world")]


LENGTHS = {"short": 10, "medium": 3000, "long": 300_007}
"""MPICH writes to the root's buffer of a broadcast of some lengths."""


@pytest.fixture(params=LENGTHS)
def mapped(request, tmp_path) -> torch.Tensor:
    """Ones in a file that is mapped for reading."""
    path = tmp_path / "values"
    np.ones(LENGTHS[request.param], np.float32).tofile(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: the array is not writable
        return torch.from_numpy(np.memmap(path, mode="r", dtype=np.float32))


@pytest.fixture
def comm():
    """A new communicator, for which no call runs in machine code yet."""
    with mpi.group(range(mpi.size())) as group:
        yield group


def test_calls_that_write_are_refused(agree, mapped, comm):
    plain, rank, size = torch.ones(mapped.shape), mpi.rank(), mpi.size()
    server, left = ps.init(plain), (rank - 1) % size
    send = mpi.send_async(plain, (rank + 1) % size, comm=comm)
    mpi.recv_async(torch.empty_like(plain), left, comm=comm).wait()  # the next one is like an earlier call
    send.wait()
    calls = {
        "allreduce": lambda: mpi.allreduce(mapped, comm=comm),
        "allreduce of every second": lambda: mpi.allreduce(mapped[::2], comm=comm),
        "allreduce_async": lambda: mpi.allreduce_async(mapped, comm=comm),
        "allreduce: out": lambda: mpi.allreduce(plain, mapped, comm=comm),
        "allreduce_many": lambda: mpi.allreduce_many([plain, mapped], comm=comm),
        "allgather: out": lambda: mpi.allgather(plain[: mapped.numel() // size], mapped, comm=comm),
        "recv": lambda: mpi.recv(mapped, (rank + 1) % size),
        "recv_async": lambda: mpi.recv_async(mapped, left, comm=comm),
        "parameterserver.receive": lambda: ps.receive(server, mapped),
    }
    for name, call in calls.items():
        if size > 1 or name != "recv":
            call_name = name.split(" ")[0].removesuffix("_async").removesuffix("_many")
            words = f"rank {rank}", call_name, "memory that cannot be written, as of np.memmap(mode='r')"
            agree.raises(ArgumentError, call, *words)
    if size > 1:
        # On the ranks that write; the others make no call, which would wait.
        if rank == 1:
            agree.raises(ArgumentError, lambda: mpi.broadcast(mapped, comm=comm), "broadcast: the tensor is in memory")
        if rank == 0:
            agree.raises(ArgumentError, lambda: mpi.reduce(mapped, comm=comm), "reduce: the tensor is in memory")
    mpi.barrier()
    ps.free_all()


@pytest.mark.parametrize("backend", ("default", "mpi", "by messages"))
def test_calls_that_read_are_not(agree, mapped, backend):
    """Regression: MPI_Bcast of MPICH writes to the root's buffer in shared memory."""
    is_root, ones = mpi.rank() == 0, torch.ones(mapped.shape)
    if backend == "by messages":
        mpi.stop()
        mpi.start(config=dataclasses.replace(mpi.Config.from_environment(), verbose=False, slot_bytes=0))
    name = "mpi" if backend == "mpi" else None
    for _ in range(2):
        for root in range(mpi.size()):
            given = mapped if mpi.rank() == root else torch.zeros(mapped.shape)
            agree.equal(mpi.broadcast(given, root, backend=name), ones, f"broadcast of rank {root}")
            agree.equal(mpi.broadcast(given[::2], root, backend=name), ones[::2], "every second")
        given = torch.zeros(mapped.shape) if is_root else mapped
        result = mpi.reduce(given, backend=name)
        agree.equal(result, (mpi.size() - 1.0) * ones if is_root else ones, "reduce")
        agree.equal(mpi.allreduce(mapped, torch.empty(mapped.shape), backend=name), mpi.size() * ones, "allreduce out")
        agree.equal(mpi.allgather(mapped, backend=name), torch.ones(mpi.size() * mapped.numel()), "allgather")
    if backend == "by messages":
        mpi.stop()
        mpi.start()
    agree(runtime.is_running())
