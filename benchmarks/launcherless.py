"""Measure torch.distributed without an MPI launcher: all_reduce, and send with recv, against gloo in the same job.

    torchrun --nproc-per-node 2 benchmarks/launcherless.py
    mpirun -n 2 python benchmarks/launcherless.py    # the same over MPI
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500 python benchmarks/launcherless.py    # and RANK=1 on node1

With `--backends p2p,gloo` all_reduce is measured with these backends of torchmpi too, on one host or several.
The backends alternate in short batches, in both orders. Printed are medians over the batches of the slowest rank, in
microseconds for one all_reduce, and for half of a round trip between the first and the last rank. To compare two
versions of torchmpi, run this script several times for each, in turns, with PYTHONPATH set to their checkouts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torchmpi as mpi
import torchmpi.distributed

SIZES = {"4": (1, 100), "64K": (1 << 14, 50), "1M": (1 << 18, 10), "64M": (1 << 24, 1)}


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum in place over all ranks."""
    dist.all_reduce(tensor, group=group)


def round_trip(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send from the first rank to the last, and back."""
    first, last, rank = 0, dist.get_world_size() - 1, dist.get_rank()
    if rank == first:
        dist.send(tensor, last, group=group)
        dist.recv(tensor, last, group=group)
    elif rank == last:
        dist.recv(tensor, first, group=group)
        dist.send(tensor, first, group=group)


def batch_us(call: Callable[[], None], repeats: int, clock: dist.ProcessGroup) -> float:
    """Return the microseconds of a call on the slowest rank."""
    dist.barrier(group=clock)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = torch.tensor([(time.perf_counter() - begin) / repeats * 1e6], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX, group=clock)
    return spent.item()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="batches for each figure (default %(default)s)")
    parser.add_argument("--backends", default="", help="backends of torchmpi to measure as well, such as p2p,gloo")
    options = parser.parse_args()
    torchmpi.distributed.register()
    dist.init_process_group("torchmpi")
    groups: dict[str, Any] = {"torchmpi": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    clock: Any = dist.new_group(backend="gloo")
    all_reduces = {name: partial(all_reduce, group=group) for name, group in groups.items()}
    for backend in filter(None, options.backends.split(",")):
        all_reduces[f"by {backend}"] = partial(mpi.allreduce, backend=backend)
    round_trips = {name: partial(round_trip, group=group) for name, group in groups.items()}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}, from {torchmpi.__file__}; microseconds")
        print(" " * 22, *(f"{name:>12}" for name in all_reduces))
    for operation, contestants, num_parts in (("all_reduce", all_reduces, 1), ("round_trip", round_trips, 2)):
        for name, (numel, repeats) in SIZES.items():
            tensor = torch.zeros(numel)
            times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
            for number in range(options.rounds + 1):
                for contestant in contestants if number % 2 else reversed(contestants):
                    spent = batch_us(partial(contestants[contestant], tensor), repeats, clock)
                    if number:  # the first batch connects the ranks
                        times[contestant].append(spent / num_parts)
            if dist.get_rank() == 0:
                medians = (f"{statistics.median(times[contestant]):12.0f}" for contestant in contestants)
                print(f"{operation + ' ' + name:>22}", *medians, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
