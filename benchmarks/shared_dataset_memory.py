"""Measure the memory of shared_dataset(): `mpirun -n 8 python benchmarks/shared_dataset_memory.py --check`.

The sum of the proportional set sizes (Pss) of all processes is the memory that they use together: the system divides
each page by the number of processes that have mapped it. Workers of `spawn` are measured against as many workers that
have other data, since each takes memory for Python and torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import torchmpi as mpi

MOST = 1.05


class Reading(Dataset[float]):
    """Reads all of a tensor for each of its samples."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return float(self.data[::1024].sum())  # each page has 1024 numbers


def pss(process: int) -> int:
    """The proportional set size of a process, in bytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def total(processes: list[int]) -> int:
    """The memory of processes of all ranks, on rank 0, while none of them does anything."""
    everywhere = mpi.allgather_object([os.getpid(), *processes])
    found = sum(pss(process) for each in everywhere for process in each) if mpi.rank() == 0 else 0
    mpi.barrier()
    return found


def workers(data: torch.Tensor) -> tuple[DataLoader[float], list[int]]:
    """A loader whose two workers have read the data, and their numbers."""
    earlier = set(multiprocessing.active_children())
    loader = DataLoader(Reading(data), num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
    list(loader)
    return loader, [each.pid or 0 for each in set(multiprocessing.active_children()) - earlier]


def main() -> int:
    """Measure, print, and return whether the memory is more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the data")
    parser.add_argument("--without-workers", action="store_true", help="measure the ranks only")
    parser.add_argument("--check", action="store_true", help=f"fail above {MOST} times the size of the data")
    options = parser.parse_args()
    size = options.megabytes * 10**6
    mpi.start()
    before = total([])
    data = mpi.shared_dataset(lambda: torch.ones(size // 4))
    small = mpi.shared_dataset(lambda: torch.ones(1024))
    Reading(data)[0]
    results = {f"{mpi.size()} ranks": total([]) - before}
    if not options.without_workers:
        with_data = before + results[f"{mpi.size()} ranks"]
        _first, processes = workers(small)
        others = total(processes) - with_data
        _second, more = workers(data)
        results[f"{mpi.size()} ranks with {2 * mpi.size()} workers of spawn"] = (
            total(processes + more) - before - 2 * others
        )
    if mpi.rank() == 0:
        for name, used in results.items():
            print(f"{name:<40} {used / 1e6:8.0f} MB for {options.megabytes} MB of data: {used / size:.3f}")
    is_more = mpi.broadcast(max(results.values()) > MOST * size)
    mpi.stop()
    return int(options.check and is_more)


if __name__ == "__main__":
    sys.exit(main())
