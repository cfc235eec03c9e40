"""Measure torch.distributed without an MPI launcher: all_reduce, and send with recv, against gloo in the same job.

    torchrun --nproc-per-node 2 benchmarks/launcherless.py
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500 python benchmarks/launcherless.py    # and RANK=1 on node1

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

import torch
import torch.distributed as dist

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
    options = parser.parse_args()
    torchmpi.distributed.register()
    dist.init_process_group("torchmpi")
    groups = {"torchmpi": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    clock = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}, from {torchmpi.__file__}")
        print(f"{'':>22} {'torchmpi us':>12} {'gloo us':>10}")
    for operation, num_parts in ((all_reduce, 1), (round_trip, 2)):
        for name, (numel, repeats) in SIZES.items():
            tensor = torch.zeros(numel)
            times: dict[str, list[float]] = {backend: [] for backend in groups}
            for number in range(options.rounds + 1):
                for backend in groups if number % 2 else reversed(groups):
                    spent = batch_us(partial(operation, tensor, groups[backend]), repeats, clock)
                    if number:  # the first batch connects the ranks
                        times[backend].append(spent / num_parts)
            ours, theirs = (statistics.median(times[backend]) for backend in groups)
            if dist.get_rank() == 0:
                print(f"{operation.__name__ + ' ' + name:>22} {ours:12.0f} {theirs:10.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
