"""To a user of large tensors: ranks that read each other's memory get the same bits as through slots."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from helpers import contract
from helpers.shm_rig import BY_PYTHON, inputs_of, start, stopped

import torchmpi as mpi
from torchmpi.session import runtime
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.kernels import records

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3)]

__all__ = ["stopped"]
SLOTS, DIRECTLY = 0, 1


def fields() -> np.ndarray:
    """The fields of the kernels for the world."""
    mpi.barrier()
    return np.frombuffer(runtime.current().world.shared.record.cells, np.int64)


def prefer(way: int) -> None:
    """Make this rank prefer one transfer, except in the trial calls."""
    known = fields()[records.GroupRecord.allgather_paces : records.GroupRecord.spent_before]
    known[way::3], known[1 - way :: 3], known[2::3] = 1, 1 << 40, 1000  # calls


def chunks_in(call) -> tuple[torch.Tensor, int]:
    """Return the result, and the number of chunks counted: one for a direct call of any length."""
    before = int(fields()[records.GroupRecord.chunks])
    result = call()
    return result, int(fields()[records.GroupRecord.chunks]) - before


def often(call) -> set[int]:
    """Repeat a call so often that not all of the calls can be trials."""
    return {chunks_in(call)[1] for _ in range(4)}


@pytest.fixture
def reads(stopped):
    start(slot_bytes=64 << 10)
    if not fields()[records.GroupRecord.processes]:
        pytest.skip("this system lets no process read another one's memory")
    prefer(DIRECTLY)


CASES = (
    (torch.float64, 32 << 10), (torch.bfloat16, 50_000), (torch.uint8, 256 << 10), (torch.float64, 1_500_000),
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "num_bytes"), (*CASES, (torch.bfloat16, (8 << 20) + 64)))
def test_every_rank_gets_all_rows(reads, agree, dtype, num_bytes):
    inputs = inputs_of((num_bytes // dtype.itemsize,), dtype)
    for _ in range(3):
        agree.bits(mpi.allgather(inputs[mpi.rank()], backend=BY_PYTHON), torch.cat(inputs), f"{num_bytes} {dtype}")
    agree(1 in often(lambda: mpi.allgather(inputs[mpi.rank()])), "one chunk is counted")


@pytest.mark.parametrize(("dtype", "num_bytes"), ((torch.float64, 33_000), *CASES[1:]))
def test_every_rank_gets_its_rows(reads, agree, dtype, num_bytes):
    rank, size = mpi.rank(), mpi.size()
    num_rows = num_bytes * size // dtype.itemsize // 3 + size - 1  # not as many for each rank
    inputs = inputs_of((num_rows, 3), dtype)
    expected = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
    for _ in range(3):
        agree.bits(mpi.alltoall(inputs[rank], backend=BY_PYTHON), expected, f"{num_bytes} {dtype}")
    agree(1 in often(lambda: mpi.alltoall(inputs[rank])), "one chunk is counted")
    agree.bits(mpi.alltoall(inputs[rank]), expected, "after that")


def test_allgather_in_place(reads, agree):
    rank, inputs = mpi.rank(), inputs_of((30_000,), torch.float32)
    out = torch.zeros(30_000 * mpi.size())
    out[rank * 30_000 : (rank + 1) * 30_000] = inputs[rank]
    result = mpi.allgather(out[rank * 30_000 : (rank + 1) * 30_000], out)
    agree.bits(result, torch.cat(inputs), "in place")


def test_allgather_of_different_lengths(reads, agree):
    rank, inputs = mpi.rank(), inputs_of((100_000,), torch.float32)
    for shortest in (0, 10, 40_000):
        expected = torch.cat([each[shortest if other == 0 else 0 :] for other, each in enumerate(inputs)])
        for _ in range(3):
            agree.bits(mpi.allgather(inputs[rank][shortest if rank == 0 else 0 :]), expected, f"{shortest} fewer")


@pytest.mark.parametrize("num_bytes", (32 << 10, 50_000, 1_500_000))
def test_the_root_alone_decides(reads, agree, num_bytes):
    """For gather and scatter, whose other ranks only send or receive, and may prefer either transfer."""
    rank, size, inputs = mpi.rank(), mpi.size(), inputs_of((num_bytes,), torch.uint8)
    rows = inputs_of((num_bytes * size + size - 1,), torch.uint8)
    for root in range(size):
        for way in (DIRECTLY, SLOTS, DIRECTLY):
            prefer(way if rank == root else 1 - way)
            gathered, scattered = set(), set()
            for _ in range(4):
                result, num_chunks = chunks_in(partial(mpi.gather, inputs[rank], root))
                agree.bits(result, torch.cat(inputs), f"gather to {root}") if rank == root else agree(result is None)
                gathered.add(num_chunks)
                result, num_chunks = chunks_in(partial(mpi.scatter, rows[root] if rank == root else None, root))
                agree.bits(result, contract.rows(rows[root], rank, size), f"scatter from {root}")
                scattered.add(num_chunks)
            if way == DIRECTLY:
                agree(1 in gathered and 1 in scattered, f"one chunk is counted, root {root}")
            elif size > 1 and num_bytes > 1 << 20:
                agree(max(gathered) > 1 and max(scattered) > 1, f"through the slots, root {root}")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("collective", ("gather", "scatter"))
def test_memory_that_cannot_be_read_is_sent_through_the_slots(reads, agree, collective):
    rank, size = mpi.rank(), mpi.size()
    inputs, rows = inputs_of((100_000,), torch.float32), inputs_of((100_000 * size,), torch.float32)
    # The root of a gather reads from all, and from the root of a scatter all read.
    if rank == (0 if collective == "gather" else size - 1):
        runtime.current().world.shared._processes[:] = -1
    for _ in range(6):
        if collective == "gather":
            result = mpi.gather(inputs[rank], 0)
            agree.bits(result, torch.cat(inputs), "gathered") if rank == 0 else agree(result is None)
        else:
            result = mpi.scatter(rows[0] if rank == 0 else None, 0)
            agree.bits(result, contract.rows(rows[0], rank, size), "scattered")
        agree.bits(mpi.allreduce(inputs[rank].clone(), op="max"), torch.stack(inputs).amax(0), "the slots are in order")


def test_measurements_of_gather_do_not_apply_to_allgather(reads, agree):
    """Regression: a rank that transfers no data needs half the time, and prevented the others from reading."""
    known = slice(records.GroupRecord.allgather_paces, records.GroupRecord.alltoall_paces)
    before = fields()[known].copy()
    for root in range(mpi.size()):
        mpi.gather(inputs_of((100_000,), torch.float32)[mpi.rank()], root)
    agree(np.array_equal(before, fields()[known]), "nothing is noted")
    mpi.allgather(inputs_of((100_000,), torch.float32)[mpi.rank()])
    agree(not np.array_equal(before, fields()[known]), "of an allgather it is")


def test_all_ranks_read_or_none(reads, agree):
    """Each rank has its own measurements, so the decisions may differ."""
    inputs = inputs_of((100_000,), torch.float32)
    for turn in range(3 * mpi.size()):
        prefer(SLOTS if turn % mpi.size() == mpi.rank() else DIRECTLY)
        result, num_chunks = chunks_in(lambda: mpi.allgather(inputs[mpi.rank()]))
        agree.bits(result, torch.cat(inputs), f"rank {turn % mpi.size()} is against it")
        agree(num_chunks > 0, "counted")
    if mpi.size() > 1:
        agree(max(often(lambda: mpi.allgather(inputs[mpi.rank()]))) > 1, "not directly")


@pytest.mark.min_ranks(2)
def test_a_rank_that_may_not_read_sends_all_through_the_slots(reads, agree):
    """The result of the trial at start may change: by system settings, or for memory that only its owner can read."""
    rank, inputs = mpi.rank(), inputs_of((100_000,), torch.float32)
    if rank == mpi.size() - 1:
        runtime.current().world.shared._processes[0] = -1
    for _ in range(6):
        result, num_chunks = chunks_in(lambda: mpi.allgather(inputs[rank]))
        agree.bits(result, torch.cat(inputs), "all the same")
        agree(num_chunks > 1, "through the slots")
    known = fields()
    agree(
        (known[records.GroupRecord.processes] == 0) == (rank == mpi.size() - 1),
        "the one that could not is against it now",
    )
    for numel in (8 << 10, 100_000):  # of one round, and of several
        runtime.current().world.shared.record.cells[records.GroupRecord.processes] = (
            runtime.current().world.shared._processes.ctypes.data
        )
        agree.bits(mpi.allgather(inputs[rank][:numel]), torch.cat([each[:numel] for each in inputs]), f"{numel} again")
        total = mpi.allreduce(inputs[rank].clone(), op="max")
        agree.bits(total, torch.stack(inputs).amax(0), "and the slots are in order")
        agree.bits(mpi.broadcast(inputs[rank].clone(), mpi.size() - 1), inputs[-1], "for all verbs")
    assert runtime.current().world.log_board.get(rank, memory_layout.Block.refused) == 0


def test_direct_reads_can_be_disabled(stopped, agree):
    start(read_directly=False)
    agree(fields()[records.GroupRecord.processes] == 0, "not even tried")
    inputs = inputs_of((100_000,), torch.float32)
    agree.bits(mpi.allgather(inputs[mpi.rank()]), torch.cat(inputs), "through the slots")
