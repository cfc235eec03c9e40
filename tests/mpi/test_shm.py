"""To a user of one host: collectives through slots, here so small that all paths are taken, have the right bits."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import contract
from helpers.outcomes import error_of
from helpers.shm_rig import BY_PYTHON, inputs_of, numels, shared, start

import torchmpi as mpi
from torchmpi.shared_memory import memory_layout

pytestmark = [pytest.mark.quick, pytest.mark.any_mpi, pytest.mark.ranks(1, 3)]

# --- every collective, for lengths on both sides of every limit


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "sum"),
        (torch.bfloat16, "avg"),
        (torch.float64, "max"),
        (torch.complex128, "prod"),
        (torch.int8, "sum"),
        (torch.bool, "lor"),
    ],
    ids=str,
)
def test_reductions_of_every_length(slots, agree, dtype, op):
    rank, size = mpi.rank(), mpi.size()
    for number, numel in enumerate(numels(dtype.itemsize, slots)):
        inputs, root = inputs_of((numel,), dtype), number % size
        mine, expected, case = inputs[rank], contract.reduced(inputs, op), f"{numel} {dtype} {op}"
        result = mpi.allreduce(mine.clone(), op=op, backend=BY_PYTHON)
        agree.bits(result, expected, f"allreduce of {case}")
        result = mpi.reduce(mine.clone(), root, op=op, backend=BY_PYTHON)
        agree.bits(result, expected if rank == root else mine, f"reduce of {case}, root {root}")
        result = mpi.reduce_scatter(mine.clone(), op=op, backend=BY_PYTHON)
        agree.bits(result, contract.rows(expected, rank, size), f"reduce_scatter of {case}")


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float16, torch.complex128), ids=str)
def test_movements_of_every_length(slots, agree, dtype):
    rank, size = mpi.rank(), mpi.size()
    for number, numel in enumerate(numels(dtype.itemsize, slots)):
        inputs, root = inputs_of((numel,), dtype), number % size
        mine, everything = inputs[rank], torch.cat(inputs)
        result = mpi.allgather(mine, backend=BY_PYTHON)
        agree.bits(result, everything, f"allgather of {numel}")
        result = mpi.alltoall(mine, backend=BY_PYTHON)
        wanted = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(result, wanted, f"alltoall of {numel}")
        result = mpi.broadcast(mine.clone(), root, backend=BY_PYTHON)
        agree.bits(result, inputs[root], f"broadcast of {numel}, root {root}")
        result = mpi.gather(mine, root, backend=BY_PYTHON)
        fits = result is None if rank != root else contract.same_bits(result, everything)
        agree(fits, f"gather of {numel}, root {root}")
        result = mpi.scatter(mine if rank == root else None, root, backend=BY_PYTHON)
        agree.bits(result, contract.rows(inputs[root], rank, size), f"scatter of {numel} by {root}")


def test_short_lengths_that_differ_again_and_again(agree, stopped):
    """Regression: the first rank to detect the difference read another slot than the one the other rank had used."""
    start()
    rank, size = mpi.rank(), mpi.size()
    wrong = []
    for number in range(60):
        for collective, unit in (("allgather", 1), ("alltoall", size), ("allgather", 3000)):
            numbers = [(100 + (other + number) % 3) * unit for other in range(size)]
            inputs = [torch.arange(float(numbers[other])) + 1000 * other + number for other in range(size)]
            everything = torch.cat(inputs)
            if collective == "alltoall":
                everything = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
            if not torch.equal(getattr(mpi, collective)(inputs[rank], backend=BY_PYTHON), everything):
                wrong.append((number, collective, unit))
    agree.equal(wrong, [], "calls with wrong numbers")


def test_rows_of_odd_length(slots, agree):
    """A row of 3 elements crosses the boundaries of slots and of cache lines."""
    rank, size = mpi.rank(), mpi.size()
    for num_rows in (1, 2, size + 1, 500, slots // 4 + 1):
        inputs = inputs_of((num_rows, 3), torch.float32)
        expected = contract.reduced(inputs, "sum")
        result = mpi.reduce_scatter(inputs[rank].clone(), backend=BY_PYTHON)
        agree.bits(result, contract.rows(expected, rank, size), f"reduce_scatter of {num_rows} rows")
        result = mpi.alltoall(inputs[rank], backend=BY_PYTHON)
        wanted = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(result, wanted, f"alltoall of {num_rows} rows")
        result = mpi.scatter(inputs[rank] if rank == 0 else None, 0, backend=BY_PYTHON)
        agree.bits(result, contract.rows(inputs[0], rank, size), f"scatter of {num_rows} rows")


def test_ranks_with_different_lengths(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    lengths = [
        [3 * r for r in range(size)],
        [slots // 8 * (size - r) + r for r in range(size)],
        [0] * (size - 1) + [slots],
        [5 * slots] + [1] * (size - 1),
    ]
    for numbers in lengths:
        inputs = [contract.values((numbers[r], 2), torch.float32, r) for r in range(size)]
        everything = torch.cat(inputs)
        result = mpi.allgather(inputs[rank], backend=BY_PYTHON)
        agree.bits(result, everything, f"allgather of {numbers} rows")
        result = mpi.alltoall(inputs[rank], backend=BY_PYTHON)
        wanted = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(result, wanted, f"alltoall of {numbers} rows")
        for root in range(size):
            result = mpi.gather(inputs[rank], root, backend=BY_PYTHON)
            fits = result is None if rank != root else contract.same_bits(result, everything)
            agree(fits, f"gather of {numbers} rows, root {root}")


def test_a_scatter_of_more_dimensions_than_can_be_announced_is_refused_on_all_ranks(slots, agree):
    tensor = torch.ones((1,) * 13)
    error = error_of(mpi.scatter, tensor if mpi.rank() == 0 else None, 0, backend=BY_PYTHON)
    agree(error and ("13 dimensions" in error) == (mpi.rank() == 0), error or "accepted")
    agree.equal(mpi.allreduce(1), mpi.size(), "the next call")


def test_settings_of_any_slot_size(stopped, agree):
    """Regression: chunks are whole cache lines, and overflowed slots that are not."""
    for slot_bytes in (1, 5000, 12_345):
        start(slot_bytes=slot_bytes)
        for numel in (2500, 2501, 10_000):
            inputs = inputs_of((numel,), torch.float32)
            result = mpi.allreduce(inputs[mpi.rank()].clone(), backend=BY_PYTHON)
            agree.bits(result, contract.reduced(inputs, "sum"), f"{numel} with slots of {slot_bytes}")
        mpi.stop()


# --- the same bits by all transfers


@pytest.mark.parametrize("dtype", contract.FLOATS, ids=str)
def test_bits_do_not_depend_on_transfer_or_length(slots, agree, dtype):
    inputs = contract.values((5 * slots // dtype.itemsize + 11,), dtype, mpi.rank(), seed=3)
    for op in ("sum", "avg", "prod"):
        expected = mpi.allreduce(inputs.clone(), op=op, backend="mpi")
        pieces = inputs.clone().split([1, 2, 28, 29, 1000, inputs.numel() - 1060])
        results = {
            "shm": mpi.allreduce(inputs.clone(), op=op, backend=BY_PYTHON),
            "async": mpi.allreduce_async(inputs.clone(), op=op, backend=BY_PYTHON).wait(),
            "shared": mpi.allreduce(shared(inputs), op=op, backend=BY_PYTHON),
            "pieces": torch.cat([mpi.allreduce(piece.clone(), op=op, backend=BY_PYTHON) for piece in pieces]),
            "many": torch.cat(list(mpi.allreduce_many([piece.clone() for piece in pieces], op=op))),
            "scattered": mpi.allgather(mpi.reduce_scatter(inputs.clone(), op=op, backend=BY_PYTHON)),
        }
        for way, result in results.items():
            agree.bits(result, expected, f"{op}, {way}")


def test_memory_that_overlaps(slots, agree):
    size = mpi.size()
    base = torch.arange(float(slots * (size + 1)))
    result = mpi.allgather(base[5 : 5 + slots], base[: slots * size], backend=BY_PYTHON)
    agree.equal(result, torch.arange(5.0, 5.0 + slots).repeat(size), "allgather")
    base = torch.arange(float(2 * slots))
    result = mpi.allreduce(base[: slots + 1], base[1 : slots + 2], backend=BY_PYTHON)
    agree.equal(result, torch.arange(float(slots + 1)) * size, "allreduce")


# --- how data goes into the slots


@pytest.mark.parametrize("who", ("all", "one"))
def test_non_temporal_copies_give_the_same_bits(agree, slots, who):
    """Each rank decides from its own measurements; the decision is forced here, for any machine."""
    rank, size = mpi.rank(), mpi.size()
    group = mpi.communicator().intra
    for numel in (5_003, 70_001):
        inputs = [contract.values((numel,), torch.float32, r) for r in range(size)]
        expected = contract.reduced(inputs, "sum")
        group.status_board.set(rank, memory_layout.Block.fetches_slowly, int(who == "all" or rank == 0))
        agree.bits(mpi.allreduce(inputs[rank].clone(), backend=BY_PYTHON), expected, f"allreduce {numel}")
        agree.bits(mpi.broadcast(inputs[rank].clone(), size - 1, backend=BY_PYTHON), inputs[-1], "broadcast")
        agree.bits(mpi.allgather(inputs[rank], backend=BY_PYTHON), torch.cat(inputs), f"allgather {numel}")
        mine = contract.rows(expected, rank, size)
        agree.bits(mpi.reduce_scatter(inputs[rank].clone(), backend=BY_PYTHON), mine, "reduce_scatter")
        group.status_board.set(rank, memory_layout.Block.fetches_slowly, 0)


def test_ranks_that_change_the_transfer_during_calls(agree, slots):
    """Results are in the slots of other ranks or in those of the rank, changing from chunk to chunk."""
    rank, size = mpi.rank(), mpi.size()
    status_board, over = mpi.communicator().intra.status_board, threading.Event()

    def change() -> None:
        way = random.Random(rank)
        while not over.wait(0.0002):
            status_board.set(rank, memory_layout.Block.fetches_slowly, way.randrange(2))

    inputs = [contract.values((5 * slots + 1,), torch.float32, r) for r in range(size)]  # twenty slots
    expected = contract.reduced(inputs, "sum")
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            results = [mpi.allreduce(inputs[rank].clone(), backend=BY_PYTHON) for _ in range(200)]
        finally:
            over.set()
        changing.result()
    status_board.set(rank, memory_layout.Block.fetches_slowly, 0)
    agree(all(contract.same_bits(result, expected) for result in results), "allreduce")


@pytest.mark.parametrize("slow", (0, 7))
def test_long_streams_by_either_transfer(agree, stopped, slow):
    """With the usual slots: longer than all caches of a core, and not in whole lines."""
    start()
    rank, size = mpi.rank(), mpi.size()
    numel = (4 << 20) // 8 + 3
    inputs = [torch.arange(numel, dtype=torch.int64) * size + r for r in range(size)]
    root = size - 1
    if mpi.communicator().intra.status_board is not None:
        mpi.communicator().intra.status_board.set(rank, memory_layout.Block.fetches_slowly, slow)
    agree.bits(mpi.broadcast(inputs[rank].clone(), root, backend=BY_PYTHON), inputs[root], "broadcast")
    agree.bits(mpi.allgather(inputs[rank], backend=BY_PYTHON), torch.cat(inputs), "allgather")
    room = torch.zeros(numel * size + 2, dtype=torch.int64)
    mpi.allgather(inputs[rank], room[1:-1], backend=BY_PYTHON)
    nothing = torch.zeros(1, dtype=torch.int64)
    agree.bits(room, torch.cat([nothing, *inputs, nothing]), "allgather to an odd place")
    parts = [contract.rows(source, rank, size) for source in inputs]
    agree.bits(mpi.alltoall(inputs[rank], backend=BY_PYTHON), torch.cat(parts), "alltoall")
    if size == 2:  # parts that are long too
        longer = [torch.arange(2 * numel + 1, dtype=torch.int64) * size + r for r in range(size)]
        parts = [contract.rows(source, rank, size) for source in longer]
        agree.bits(mpi.alltoall(longer[rank], backend=BY_PYTHON), torch.cat(parts), "alltoall of long parts")
    uneven = mpi.allgather(inputs[rank][rank:], backend=BY_PYTHON)
    agree.bits(uneven, torch.cat([part[r:] for r, part in enumerate(inputs)]), "uneven allgather")
    gathered = mpi.gather(inputs[rank], root, backend=BY_PYTHON)
    agree.bits(gathered if rank == root else torch.cat(inputs), torch.cat(inputs), "gather")
    agree.bits(mpi.allreduce(inputs[rank].clone(), backend=BY_PYTHON), contract.reduced(inputs, "sum"), "allreduce")
