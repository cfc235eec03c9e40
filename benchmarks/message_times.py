"""Measure messages between two ranks, natively and through torch.distributed, against MPI in the same run.

    mpirun --bind-to core -n 2 python benchmarks/message_times.py

Prints medians of the rounds in microseconds. A round trip is a message there and one back; an exchange is one in each
direction at the same time. Of fresh data, each rank has written the values that it sends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import torchmpi as mpi
from torchmpi.session import runtime

_WARM_UP = 20


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    rank, other = mpi.rank(), 1 - mpi.rank()
    world, x, y = runtime.current().MPI.COMM_WORLD, torch.ones(numel), torch.empty(numel)
    given, received = x.numpy(), y.numpy()

    def round_trip(send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], object]:
        first, then = (send, receive) if rank == 0 else (receive, send)
        return lambda: (first(), then())

    def fresh(send: Callable[[], object]) -> Callable[[], object]:
        return lambda: (x.fill_(1.0), send())

    def wait(work: dist.Work | None) -> None:
        assert work is not None
        work.wait()

    def batch(order: int) -> Callable[[], object]:
        operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)][::order]
        return lambda: [work.wait() for work in dist.batch_isend_irecv(operations)]

    return {
        "round trip: MPI": round_trip(lambda: world.Send(given, other), lambda: world.Recv(received, other)),
        "round trip: send, recv": round_trip(lambda: mpi.send(x, other), lambda: mpi.recv(y, other)),
        "round trip: send_async, recv_async": round_trip(
            lambda: mpi.send_async(x, other).wait(), lambda: mpi.recv_async(y, other).wait()
        ),
        "round trip: dist.send, dist.recv": round_trip(lambda: dist.send(x, other), lambda: dist.recv(y, other)),
        "round trip: dist.isend, dist.irecv": round_trip(
            lambda: wait(dist.isend(x, other)), lambda: wait(dist.irecv(y, other))
        ),
        "round trip: dist.recv from any": round_trip(lambda: dist.send(x, other), lambda: dist.recv(y)),
        "fresh: MPI": round_trip(fresh(lambda: world.Send(given, other)), lambda: world.Recv(received, other)),
        "fresh: send, recv": round_trip(fresh(lambda: mpi.send(x, other)), lambda: mpi.recv(y, other)),
        "exchange: MPI_Sendrecv": lambda: world.Sendrecv(given, other, 0, received, other, 0),
        "exchange: MPI_Sendrecv_replace": lambda: world.Sendrecv_replace(given, other, 0, other, 0),
        "exchange: sendreceive": lambda: mpi.sendreceive(x, other, other),
        "exchange: batch_isend_irecv": batch(1),
        "exchange: the same, receive first": batch(-1),
    }


def measured(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Return the median of the rounds in microseconds per call."""
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(rounds):
        mpi.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024,32768,1048576", help="bytes, default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each message, default %(default)s")
    arguments = parser.parse_args()
    mpi.start()
    if mpi.size() != 2:
        raise SystemExit("messages are measured between two ranks: mpirun -n 2")
    dist.init_process_group("torchmpi")
    sizes = [int(size) for size in arguments.sizes.split(",")]
    columns = [
        {
            name: measured(call, 200 if size < 1 << 18 else 30, arguments.rounds)
            for name, call in contestants(size // 4).items()
        }
        for size in sizes
    ]
    if mpi.rank() == 0:
        print(f"| us | {' | '.join(f'{size} bytes' for size in sizes)} |")
        print(f"|---|{'---|' * len(sizes)}")
        for name in columns[0]:
            print(f"| {name} | {' | '.join(f'{column[name]:.1f}' for column in columns)} |")
    dist.destroy_process_group()
    mpi.stop()


if __name__ == "__main__":
    main()
