"""Measure what a sender gains that is some calls ahead of the comparison of its calls, by plain messages of mpi4py.

    mpirun --hostfile hosts -n 2 python benchmarks/calls_ahead.py [--sizes 1024,32768]

Rank 0 sends the data, rank 1 answers each message with 16 bytes, and rank 0 waits for the answer to the message so many
calls before: 0 calls ahead is a call that is compared before it returns. The times are medians of batches, in the
order of the table by turns, over that of MPI_Bcast from rank 0 in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

AHEAD = (0, 1, 2, 8, 31)
CALLS, BATCHES, EVERY = 100, 25, 16
Way = Callable[["Comm", "np.ndarray[Any, Any]"], None]


def ahead(calls: int, comm: Comm, data: np.ndarray) -> None:
    """Make a batch of calls, each with its answer; the sender is at most so many calls ahead of these."""
    answers = [np.empty(16, np.uint8) for _ in range(CALLS)]
    for number in range(CALLS + calls):
        if comm.rank == 0 and number < CALLS:
            request = comm.Isend(data, 1)
        if comm.rank == 0 and number >= calls:
            comm.Recv(answers[number - calls], 1)
        if comm.rank == 0 and number < CALLS:
            request.Wait()
        if comm.rank == 1 and number < CALLS:
            comm.Recv(data, 0)
            comm.Send(answers[number], 0)


def sometimes(comm: Comm, data: np.ndarray) -> None:
    """Make a batch of calls, and compare each EVERY calls."""
    answer = np.empty(16, np.uint8)
    for number in range(1, CALLS + 1):
        if comm.rank == 0:
            comm.Send(data, 1)
        else:
            comm.Recv(data, 0)
        if number % EVERY == 0:
            comm.Sendrecv(answer.copy(), 1 - comm.rank, recvbuf=answer, source=1 - comm.rank)


def broadcasts(in_turn: bool, comm: Comm, data: np.ndarray) -> None:
    """Make a batch of calls of MPI_Bcast."""
    for number in range(CALLS):
        comm.Bcast(data, number % 2 if in_turn else 0)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(each) for each in text.split(",")], default=[1024, 32768])
    options = parser.parse_args()
    from mpi4py import MPI  # which initializes MPI

    comm = MPI.COMM_WORLD
    if comm.size != 2:
        parser.error(f"{comm.size} ranks. Start two, on two hosts.")
    ways: dict[str, Way] = {f"{calls} ahead": partial(ahead, calls) for calls in AHEAD}
    ways |= {f"compared at every {EVERY}th call": sometimes, "MPI_Bcast, roots in turn": partial(broadcasts, True)}
    ways["MPI_Bcast"] = partial(broadcasts, False)
    times: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in options.sizes}
    for (way, size), measured in BATCHES * list(times.items()):
        data = np.zeros(size, np.uint8)
        comm.Barrier()
        begin = time.perf_counter()
        ways[way](comm, data)
        comm.Barrier()
        measured.append(time.perf_counter() - begin)
    if comm.rank == 0:
        print("| |", " | ".join(f"{size >> 10} KB" for size in options.sizes), "|")
        print("|---|" + len(options.sizes) * "---|")
        for way in ways:
            ratios = [
                statistics.median(times[way, size]) / statistics.median(times["MPI_Bcast", size])
                for size in options.sizes
            ]
            print(f"| {way} |", " | ".join(f"{ratio:.1f}" for ratio in ratios), "|")


if __name__ == "__main__":
    main()
