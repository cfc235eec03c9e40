"""Measure calls of torch.distributed with lists and splits, against the native calls that move the same bytes.

    mpirun --bind-to core -n 2 python benchmarks/list_calls.py

Prints medians of the rounds in microseconds, and behind them what torch's own functions take around a call that does
nothing. A size is that of all parts together that a rank passes or, of gathers, receives from each rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import torchmpi as mpi
from torchmpi.distributed.work import COMPLETED

_METHODS = ("allgather", "gather", "scatter", "reduce_scatter", "alltoall", "all_to_all_single", "send", "recv")
_WARM_UP = 20


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


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    rank, size = mpi.rank(), mpi.size()
    part, rest = numel // size, numel // size // 2
    whole, given, received = torch.ones(numel), torch.ones(numel), torch.empty(part)
    gathered, rows = [torch.empty(numel) for _ in range(size)], torch.empty(size * numel)
    parts, outputs = [torch.ones(part) for _ in range(size)], [torch.empty(part) for _ in range(size)]
    root_parts, root_gathered = (parts, gathered) if rank == 0 else (None, None)
    # Each rank keeps a half more of its own part, and its neighbor gets less.
    sent = [part + rest * ((other == rank) - (other == (rank + 1) % size)) for other in range(size)]
    expected = [part + rest * ((other == rank) - (other == (rank - 1) % size)) for other in range(size)]
    uneven = torch.empty(sum(expected))
    sources, targets = list(torch.ones(sum(sent)).split(sent)), list(torch.empty(sum(expected)).split(expected))
    return {
        "mpi.allgather": lambda: mpi.allgather(given, rows),
        "all_gather, list": lambda: dist.all_gather(gathered, given),
        "all_gather, list, async_op": lambda: dist.all_gather(gathered, given, async_op=True).wait(),
        "mpi.gather": lambda: mpi.gather(given, out=rows if rank == 0 else None),
        "gather, list": lambda: dist.gather(given, root_gathered),
        "mpi.scatter": lambda: mpi.scatter(given if rank == 0 else None, out=received),
        "scatter, list": lambda: dist.scatter(received, root_parts),
        "mpi.reduce_scatter": lambda: mpi.reduce_scatter(given, received),
        "reduce_scatter, list": lambda: dist.reduce_scatter(received, parts),
        "mpi.alltoall": lambda: mpi.alltoall(given, whole),
        "all_to_all, list": lambda: dist.all_to_all(outputs, parts),
        "all_to_all, list of unequal lengths": lambda: dist.all_to_all(targets, sources),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, given),
        "all_to_all_single, even splits": lambda: dist.all_to_all_single(whole, given, [part] * size, [part] * size),
        "all_to_all_single, uneven splits": lambda: dist.all_to_all_single(uneven, given, expected, sent),
        "barrier": dist.barrier,
    }


def without_work(rounds: int) -> dict[str, float]:
    """Return what torch's functions take around methods that return at once."""
    kind = type(dist.group.WORLD)
    kept = {name: getattr(kind, name) for name in _METHODS}
    calls = {name: call for name, call in contestants(256).items() if not name.startswith("mpi.")}
    other, tensor = (mpi.rank() + 1) % mpi.size(), torch.ones(256)
    if mpi.size() > 1:
        calls |= {"send": lambda: dist.send(tensor, other), "recv": lambda: dist.recv(tensor, other)}
    for name in _METHODS:
        setattr(kind, name, lambda *_, **__: COMPLETED)
    try:
        return {name: measured(call, 500, rounds) for name, call in calls.items() if name != "barrier"}
    finally:
        for name, method in kept.items():
            setattr(kind, name, method)


def main() -> None:
    """Print the tables on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024,32768,1048576", help="bytes, default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each call, default %(default)s")
    arguments = parser.parse_args()
    mpi.start()
    dist.init_process_group("torchmpi")
    sizes = [int(size) for size in arguments.sizes.split(",")]
    columns = [
        {
            name: measured(call, 200 if size < 1 << 18 else 30, arguments.rounds)
            for name, call in contestants(size // 4).items()
        }
        for size in sizes
    ]
    columns.append(without_work(arguments.rounds))
    if mpi.rank() == 0:
        print(f"| us | {' | '.join(f'{size} bytes' for size in sizes)} | torch alone |")
        print(f"|---|{'---|' * len(columns)}")
        for name in dict.fromkeys(name for column in columns for name in column):
            print(f"| {name} | {' | '.join(f'{column[name]:.1f}' if name in column else '' for column in columns)} |")
    dist.destroy_process_group()
    mpi.stop()


if __name__ == "__main__":
    main()
