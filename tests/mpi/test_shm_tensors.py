"""Tensors that live in shared memory: the bits of others, and nothing left when they go."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

import torchmpi as mpi

sys.path.insert(0, str(Path(__file__).parent))
import contract
from shm_rig import PAGE_SLOTS, inputs_of, numels, shared, start

# --- tensors in shared memory


@pytest.mark.parametrize("who", ("all", "the first", "the last", "all but the first"))
def test_shared_tensors_have_the_bits_of_others(slots, agree, who):
    rank, size = mpi.rank(), mpi.size()
    chosen = {"all": range(size), "the first": [0], "the last": [size - 1], "all but the first": range(1, size)}[who]
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int8, "max")):
        for numel in numels(dtype.itemsize, slots)[-12:]:
            inputs = inputs_of((numel,), dtype)
            expected, case = contract.reduced(inputs, op), f"{numel} {dtype} {op}"

            def mine(inputs=inputs):
                return shared(inputs[rank], rank + 1) if rank in chosen else inputs[rank].clone()

            result = mpi.allreduce(mine(), op=op, backend="shm")
            agree.bits(result, expected, f"allreduce of {case}")
            result = mpi.allreduce_async(mine(), op=op, backend="shm").wait()
            agree.bits(result, expected, f"allreduce_async of {case}")
            root = size - 1
            result = mpi.reduce(mine(), root, op=op, backend="shm")
            agree.bits(result, expected if rank == root else inputs[rank], f"reduce of {case}")


def test_shared_memory_beside_a_view_is_left_alone(slots, agree):
    numel = 3 * slots
    for kind in ("allreduce", "reduce"):
        memory = mpi.empty_shared(numel + 20).fill_(-1.0)
        view = memory[7 : 7 + numel].fill_(1.0)
        getattr(mpi, kind)(view, backend="shm")
        wanted = float(mpi.size()) if kind == "allreduce" or mpi.rank() == 0 else 1.0
        agree.equal(view, torch.full((numel,), wanted), kind)
        agree.equal(memory[:7].tolist() + memory[7 + numel :].tolist(), [-1.0] * 20, kind)


def test_shared_tensors_in_every_verb(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    inputs = inputs_of((slots, 2), torch.float32)
    results = [
        (mpi.broadcast(shared(inputs[rank]), size - 1), inputs[-1]),
        (mpi.allgather(shared(inputs[rank]), shared(torch.cat(inputs) * 0)), torch.cat(inputs)),
        (mpi.reduce_scatter(shared(inputs[rank])), contract.rows(contract.reduced(inputs, "sum"), rank, size)),
        (mpi.scatter(shared(inputs[rank]) if rank == 0 else None), contract.rows(inputs[0], rank, size)),
        (mpi.alltoall(shared(inputs[rank])), torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])),
        (mpi.allreduce(shared(inputs[rank]).t()).t(), contract.reduced(inputs, "sum")),
    ]
    for index, (actual, expected) in enumerate(results):
        agree.bits(actual, expected, f"result {index}")


def test_shapes_of_shared_tensors(slots, agree):
    for shape, dtype in (((), torch.float64), ((0,), torch.int8), ((2, 0, 3), torch.bool), ((3, 5), torch.bfloat16)):
        tensor = mpi.empty_shared(*shape, dtype=dtype)
        agree.equal((tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()), (shape, dtype, True))
    agree.equal(tuple(mpi.empty_shared((2, 3)).shape), (2, 3))
    agree.equal(mpi.empty_shared(2).dtype, torch.get_default_dtype())
    for wrong in (-1, (3, -2), 2.5, "3"):
        try:
            tensor = mpi.empty_shared(wrong)
        except (TypeError, ValueError, RuntimeError):
            pass
        else:
            agree(False, f"a shape of {wrong!r} was accepted: {tuple(tensor.shape)}")


def open_segments() -> tuple[int, int]:
    """Descriptors of this process, and mappings of shared tensors."""
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("torchmpi-tensor" in line for line in file)
    return len(os.listdir("/proc/self/fd")), mapped


def test_shared_tensors_that_come_and_go_leave_nothing(slots, agree):
    def use(times: int) -> None:
        for index in range(times):
            tensor = mpi.empty_shared(slots + index).fill_(1.0)
            mpi.allreduce(tensor, backend="shm")
            agree(bool((tensor == mpi.size()).all()), f"wrong sum in round {index}")

    use(20)
    before = open_segments()
    use(100)
    after = open_segments()
    agree(after[0] <= before[0], f"descriptors {before[0]} -> {after[0]}")
    agree(after[1] <= before[1], f"mappings {before[1]} -> {after[1]}")


def test_more_shared_tensors_than_a_group_remembers(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    tensors = [mpi.empty_shared(slots) for _ in range(70)]
    for _ in range(2):
        for index, tensor in enumerate(tensors):
            mpi.allreduce(tensor.fill_(rank + index), backend="shm")
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
    agree(open_segments()[1] < before, "their memory was not given back")


def mpi_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size
