"""Measure the calls around the collectives: objects, numbers, lists, strided tensors, groups, Horovod's and nn's.

    mpirun --bind-to core -n 2 python benchmarks/small_calls.py [--only PART]

Prints the least and the median time of the rounds in microseconds, of the slowest rank, each beside what does the same
with less: mpi4py, or the native call on a contiguous tensor. The sides of a row alternate. For another checkout, set
``PYTHONPATH`` to it; for a comparison of two, alternate them and compare the least times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import torchmpi as mpi
import torchmpi.horovod as hvd
import torchmpi.nn as mpinn

_WARM_UP = 20
Call = Callable[[], object]
Row = tuple[str, Call, str, Call, int]
"""Our call, what it is compared with, both with their names, and how many calls a round has."""


def object_rows(comm: Any) -> list[Row]:
    """Objects and numbers, against mpi4py."""
    value, long = {"a": 1, "b": [1, 2, 3], "c": "x" * 200}, "x" * 20_000
    return [
        ("broadcast_object, a dict", lambda: mpi.broadcast_object(value), "bcast", lambda: comm.bcast(value), 200),
        ("allgather_object", lambda: mpi.allgather_object(value), "allgather", lambda: comm.allgather(value), 200),
        ("broadcast_object, 20 KB", lambda: mpi.broadcast_object(long), "bcast", lambda: comm.bcast(long), 100),
        ("allgather_object, 20 KB", lambda: mpi.allgather_object(long), "allgather", lambda: comm.allgather(long), 100),
        ("allreduce of a float", lambda: mpi.allreduce(3.5), "allreduce", lambda: comm.allreduce(3.5), 200),
        ("allreduce of an int", lambda: mpi.allreduce(3), "allreduce", lambda: comm.allreduce(3), 200),
        ("broadcast of a float", lambda: mpi.broadcast(3.5), "bcast", lambda: comm.bcast(3.5), 200),
        ("allgather of a float", lambda: mpi.allgather(3.5), "allgather", lambda: comm.allgather(3.5), 200),
    ]


def tensor_rows(comm: Any) -> list[Row]:
    """Results in new memory, strided tensors and lists."""
    x, size = torch.ones(256), mpi.size()
    rows, array, everything = torch.ones(size * 128), x.numpy(), torch.empty(size * 256)
    gathered = everything.numpy() if mpi.rank() == 0 else None
    strided, contiguous = torch.ones(64, 64)[:, ::2], torch.ones(64, 32)
    many, flat = [torch.ones(64) for _ in range(50)], torch.ones(50 * 64)
    return [
        ("gather, 1 KB", lambda: mpi.gather(x), "Gather", lambda: comm.Gather(array, gathered), 300),
        ("allgather, 1 KB", lambda: mpi.allgather(x), "with out", lambda: mpi.allgather(x, everything), 300),
        ("alltoall, 1 KB", lambda: mpi.alltoall(rows), "with out", lambda: mpi.alltoall(rows, rows.clone()), 300),
        (
            "allreduce, 8 KB, strided",
            lambda: mpi.allreduce(strided),
            "contiguous",
            lambda: mpi.allreduce(contiguous),
            200,
        ),
        ("allreduce_many, 50 of 64", lambda: mpi.allreduce_many(many), "flat", lambda: mpi.allreduce(flat), 100),
    ]


def group_rows(comm: Any) -> list[Row]:
    """Groups, against those of MPI."""
    everyone = list(range(mpi.size()))
    return [
        (
            "group and free",
            lambda: mpi.group(everyone).free(),
            "Split and Free",
            lambda: comm.Split(0, comm.rank).Free(),
            20,
        )
    ]


def wrapped_rows(_: Any) -> list[Row]:
    """Horovod's interface and nn, against the native calls."""
    hvd.init()
    x, net = torch.ones(256), torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 10))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    values = [parameter.detach() for parameter in net.parameters()]

    def native() -> None:
        for value in values:
            mpi.broadcast(value)

    return [
        ("hvd.allreduce_, 1 KB", lambda: hvd.allreduce_(x), "allreduce", lambda: mpi.allreduce(x, op="avg"), 200),
        ("hvd.allreduce, 1 KB", lambda: hvd.allreduce(x), "allreduce", lambda: mpi.allreduce(x.clone(), op="avg"), 200),
        ("hvd.broadcast_, 1 KB", lambda: hvd.broadcast_(x, 0), "broadcast", lambda: mpi.broadcast(x), 200),
        ("hvd.allgather, 1 KB", lambda: hvd.allgather(x), "allgather", lambda: mpi.allgather(x), 200),
        (
            "synchronize_gradients of 4",
            lambda: mpinn.synchronize_gradients(net),
            "allreduce_many",
            lambda: mpi.allreduce_many(gradients, op="avg"),
            100,
        ),
        ("synchronize_parameters of 4", lambda: mpinn.synchronize_parameters(net), "broadcast", native, 50),
    ]


PARTS = {"objects": object_rows, "tensors": tensor_rows, "groups": group_rows, "wrapped": wrapped_rows}


def measured(row: Row, rounds: int) -> list[list[float]]:
    """Return the times of both sides in microseconds, of the slowest rank in each round."""
    _, ours, _, theirs, calls = row
    times: list[list[float]] = [[], []]
    for call in (ours, theirs):
        for _ in range(_WARM_UP):
            call()
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            call = (ours, theirs)[side]
            mpi.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            own = (time.perf_counter() - begin) / calls * 1e6
            times[side].append(mpi.allreduce(own, op="max"))
    return times


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of the table; may be repeated")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each side, default %(default)s")
    arguments = parser.parse_args()
    mpi.start()
    from mpi4py import MPI  # after start(), which loads the library

    comm = MPI.COMM_WORLD.Dup()
    if mpi.rank() == 0:
        print(f"{mpi.size()} ranks, us: least (median)")
    for part in arguments.only or PARTS:
        for row in PARTS[part](comm):
            ours, theirs = ([min(times), statistics.median(times)] for times in measured(row, arguments.rounds))
            if mpi.rank() == 0:
                print(
                    f"{row[0]:28} {ours[0]:8.1f} ({ours[1]:8.1f})   {row[2]:>15} {theirs[0]:8.1f} ({theirs[1]:8.1f})",
                    flush=True,
                )
    comm.Free()
    mpi.stop()


if __name__ == "__main__":
    main()
