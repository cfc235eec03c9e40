"""To a user of empty_shared(): the same bits as of private tensors, and no leaks."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from helpers import contract
from helpers.leftovers import open_files
from helpers.outcomes import error_of
from helpers.shm_rig import BY_PYTHON, PAGE_SLOTS, any_slots, inputs_of, numels, shared, start

import torchmpi as mpi
from torchmpi import errors
from torchmpi.session import runtime
from torchmpi.shared_memory.kernels import records

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3)]

# --- tensors in shared memory


WHO = ("all", "the first", "the last", "all but the first")
"""The ranks that pass shared tensors; the others pass private ones."""


def ranks_of(number: int) -> Sequence[int]:
    """The ranks of an element of `WHO`."""
    size = mpi.size()
    return (range(size), [0], [size - 1], range(1, size))[number]


@pytest.mark.parametrize("number", range(4), ids=WHO)
def test_shared_tensors_have_the_bits_of_others(slots, agree, number):
    """Dtypes alternate, so that each is used on both sides of each limit."""
    rank, size, chosen = mpi.rank(), mpi.size(), ranks_of(number)
    for place, (dtype, op) in enumerate(((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int8, "max"))):
        for numel in numels(dtype.itemsize, slots)[-12:][(number + place) % 3 :: 3]:
            inputs = inputs_of((numel,), dtype)
            expected, case = contract.reduced(inputs, op), f"{numel} {dtype} {op}"

            def mine(inputs=inputs):
                return shared(inputs[rank], rank + 1) if rank in chosen else inputs[rank].clone()

            result = mpi.allreduce(mine(), op=op, backend=BY_PYTHON)
            agree.bits(result, expected, f"allreduce of {case}")
            result = mpi.allreduce_async(mine(), op=op, backend=BY_PYTHON).wait()
            agree.bits(result, expected, f"allreduce_async of {case}")
            root = size - 1
            result = mpi.reduce(mine(), root, op=op, backend=BY_PYTHON)
            agree.bits(result, expected if rank == root else inputs[rank], f"reduce of {case}")


def test_shared_memory_beside_a_view_is_unchanged(slots, agree):
    numel = 3 * slots
    for kind in ("allreduce", "reduce"):
        memory = mpi.empty_shared(numel + 20).fill_(-1.0)
        view = memory[7 : 7 + numel].fill_(1.0)
        getattr(mpi, kind)(view, backend=BY_PYTHON)
        wanted = float(mpi.size()) if kind == "allreduce" or mpi.rank() == 0 else 1.0
        agree.equal(view, torch.full((numel,), wanted), kind)
        agree.equal(memory[:7].tolist() + memory[7 + numel :].tolist(), [-1.0] * 20, kind)


def calls_of(inputs: list[torch.Tensor], bring) -> dict[str, tuple]:
    """Every collective on the result of `bring` for a tensor: the call, and the expected result."""
    rank, size, out = mpi.rank(), mpi.size(), torch.cat(inputs)
    mine, last = inputs[rank], size - 1
    parts = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
    gathered = out if rank == last else None
    return {
        "broadcast": (lambda: mpi.broadcast(bring(mine), last), inputs[-1]),
        "allgather": (lambda: mpi.allgather(bring(mine)), out),
        "allgather into": (lambda: mpi.allgather(bring(mine), shared(out * 0, 5)), out),
        "gather": (lambda: mpi.gather(bring(mine), last), gathered),
        "reduce_scatter": (
            lambda: mpi.reduce_scatter(bring(mine)),
            contract.rows(contract.reduced(inputs, "sum"), rank, size),
        ),
        "scatter": (lambda: mpi.scatter(bring(mine) if rank == 0 else None), contract.rows(inputs[0], rank, size)),
        "alltoall": (lambda: mpi.alltoall(bring(mine)), parts),
        "allreduce": (lambda: mpi.allreduce(bring(mine).t()).t(), contract.reduced(inputs, "sum")),
    }


@pytest.mark.parametrize("number", range(4), ids=WHO)
def test_shared_tensors_in_every_collective(slots, agree, number):
    """Dtypes alternate, so that each is used with each length."""
    rank, size, chosen = mpi.rank(), mpi.size(), ranks_of(number)

    def bring(values: torch.Tensor) -> torch.Tensor:
        return shared(values, rank + 1) if rank in chosen else values.clone()

    for length, num_rows in enumerate((1, 2 * size + 1, slots + 3)):
        dtype = (torch.float32, torch.bfloat16, torch.int8)[(number + length) % 3]
        calls = calls_of(inputs_of((num_rows, 6), dtype), bring)
        for name, (call, expected) in calls.items():
            for _ in range(2):
                result, case = call(), f"{name} of {num_rows} rows of {dtype}"
                agree(result is None) if expected is None else agree.bits(result, expected, case)


def chunks_of(call) -> int:
    """The number of chunks of a call: one if tensors are accessed in place, for any length."""
    mpi.barrier()
    fields = runtime.current().world.shared.record.cells
    before = int(fields[records.GroupRecord.chunks])
    call()
    return int(fields[records.GroupRecord.chunks]) - before


def test_shared_tensors_do_not_use_slots(slots, agree):
    inputs, rank = inputs_of((8 * slots, 2), torch.float32), mpi.rank()
    for name, (call, _) in calls_of(inputs, shared).items():
        if name not in ("scatter", "allreduce"):  # scatter has no direct transfer; allreduce copies transposed tensors
            agree.equal(chunks_of(call), 1, name)
    if mpi.size() > 1:
        calls = calls_of(inputs, lambda tensor: shared(tensor) if rank else tensor.clone())
        for name in ("broadcast", "reduce_scatter"):  # other ranks may read the private tensor too
            agree(chunks_of(calls[name][0]) > 1, f"{name} of a private tensor and shared ones")


def test_lengths_that_differ_between_shared_tensors(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    inputs = [contract.values((slots + 5 * other, 3), torch.float32, other, 0) for other in range(size)]
    agree.bits(mpi.allgather(shared(inputs[rank])), torch.cat(inputs), "allgather")
    parts = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
    agree.bits(mpi.alltoall(shared(inputs[rank])), parts, "alltoall")


@any_slots
def test_a_long_broadcast_writes_only_its_target(slots, agree):
    """The root writes into the other ranks' tensors: the first part of each with non-temporal stores."""
    numel, rank, size = (5 << 20) // 4 + 77, mpi.rank(), mpi.size()
    for root in range(size):
        memory = mpi.empty_shared(numel + 50).fill_(-1.0)
        view = memory[rank + 13 : rank + 13 + numel].copy_(torch.arange(numel) + rank)
        mpi.broadcast(view, root)
        agree.bits(view, torch.arange(numel) + root * 1.0, f"from {root}")
        around = torch.cat([memory[: rank + 13], memory[rank + 13 + numel :]])
        agree(bool((around == -1.0).all()), f"beside the tensor, from {root}")


@pytest.mark.ranks(3)
@any_slots
@pytest.mark.parametrize("collective", ("allreduce", "broadcast", "reduce", "allgather"))
@pytest.mark.parametrize("backend", (None, "shm"), ids=("gate", "python"))
def test_an_interrupt_during_the_first_mapping_ends_the_call_on_all_ranks(slots, agree, collective, backend):
    """Regression: a kernel had returned to map a segment, and other ranks waited for a rank that had left the call."""
    from mpi4py import MPI

    rank, size = mpi.rank(), mpi.size()
    out = torch.empty(size * 9 * slots) if collective == "allgather" else None

    def call(tensor: torch.Tensor) -> None:
        getattr(mpi, collective)(tensor, **({"out": out} if collective == "allgather" else {}), backend=backend)

    for _ in range(2):  # the calls are cached now
        call(torch.ones(9 * slots))
    fresh, raised = mpi.empty_shared(9 * slots).fill_(1.0), None
    world, main = mpi.communicator(0).intra, threading.get_ident()

    def interrupt() -> None:
        while world.call_log.current is None:
            time.sleep(0.001)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGUSR2)
        MPI.COMM_WORLD.Barrier()

    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    mpi.barrier()
    interrupter = threading.Thread(target=interrupt if rank else MPI.COMM_WORLD.Barrier)
    interrupter.start()
    if rank == 0:
        interrupter.join()  # rank 0 arrives when all others have been interrupted
    try:
        call(fresh)
    except (KeyboardInterrupt, errors.MismatchError) as error:
        raised = type(error)
    interrupter.join()
    signal.signal(signal.SIGUSR2, before)
    agree.equal(raised, errors.MismatchError if rank == 0 else KeyboardInterrupt, "the call")
    del fresh
    gc.collect()
    agree.equal(mpi.allreduce(torch.ones(3)), torch.full((3,), float(size)), "the next one")


def test_allgather_in_place(slots, agree):
    rank, size, inputs = mpi.rank(), mpi.size(), inputs_of((3 * slots,), torch.float32)
    out = shared(torch.zeros(3 * slots * size))
    mine = out[rank * 3 * slots : (rank + 1) * 3 * slots].copy_(inputs[rank])
    agree.bits(mpi.allgather(mine, out), torch.cat(inputs), "allgather in place")


@any_slots
def test_shapes_of_shared_tensors(slots, agree):
    for shape, dtype in (((), torch.float64), ((0,), torch.int8), ((2, 0, 3), torch.bool), ((3, 5), torch.bfloat16)):
        tensor = mpi.empty_shared(*shape, dtype=dtype)
        agree.equal((tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()), (shape, dtype, True))
    agree.equal(tuple(mpi.empty_shared((2, 3)).shape), (2, 3))
    agree.equal(mpi.empty_shared(2).dtype, torch.get_default_dtype())
    for wrong in (-1, (3, -2), 2.5, "3"):
        agree(error_of(mpi.empty_shared, wrong), f"a shape of {wrong!r} was accepted")


def open_segments() -> tuple[int, int]:
    """Descriptors of this process, and mappings of shared tensors."""
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("torchmpi-tensor" in line for line in file)
    return open_files(), mapped


@any_slots
def test_freed_shared_tensors_leave_nothing_behind(slots, agree):
    def use(times: int) -> None:
        for index in range(times):
            tensor = mpi.empty_shared(slots + index).fill_(1.0)
            mpi.allreduce(tensor, backend=BY_PYTHON)
            agree(bool((tensor == mpi.size()).all()), f"wrong sum in round {index}")

    use(100)
    before = open_segments()
    use(100)
    after = open_segments()
    agree(after[0] <= before[0], f"descriptors {before[0]} -> {after[0]}")
    agree(after[1] <= before[1], f"mappings {before[1]} -> {after[1]}")


@any_slots
def test_more_shared_tensors_than_a_group_remembers(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    tensors = [mpi.empty_shared(slots) for _ in range(70)]
    for _ in range(2):
        for index, tensor in enumerate(tensors):
            mpi.allreduce(tensor.fill_(rank + index), backend=BY_PYTHON)
    for index, tensor in enumerate(tensors):
        agree(bool((tensor == sum(range(size)) + size * index).all()), f"tensor {index}")


def test_shared_tensors_outlive_stop(stopped, agree):
    start(slot_bytes=PAGE_SLOTS)
    old = mpi.empty_shared(5000).fill_(2.0)
    mpi.allreduce(old)
    mpi.stop()
    agree.equal(old[0].item(), 2.0 * mpi_size())
    old.fill_(3.0)
    start(slot_bytes=PAGE_SLOTS)
    new = mpi.empty_shared(5000).fill_(1.0)
    mpi.allreduce(old)
    mpi.allreduce(new)
    agree(bool((old == 3 * mpi.size()).all()), "the old tensor")
    agree(bool((new == mpi.size()).all()), "a new one")
    before = open_segments()[1]
    del old, new
    agree(open_segments()[1] < before, "their memory was not released")


def mpi_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size
