"""Measure short allreduces of torchmpi, of DeepSpeed's shared-memory operation and of gloo in one job.

    mpirun -n 2 python benchmarks/deepspeed_allreduce.py

Needs DeepSpeed, which compiles its operation at the first start. The three alternate in batches of calls; the median of
the batches on rank 0 is printed, in microseconds for a call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CALLS = 50


def seconds(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Return the time of a call, the mean of a batch; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call(tensor)
    return (time.perf_counter() - begin) / CALLS


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=30, help="of 50 calls each (default: %(default)s)")
    batches = parser.parse_args().batches
    # Not at the top: the tests import this module without DeepSpeed, and without initializing MPI.
    import deepspeed
    from mpi4py import MPI

    # DeepSpeed's launcher sets it; without it the operation crashes (csrc/cpu/comm/shm_interface.cpp).
    os.environ.setdefault("LOCAL_SIZE", str(MPI.COMM_WORLD.size))
    deepspeed.init_distributed("torchmpi")
    size = dist.get_world_size()
    gloo: Any = dist.new_group(backend="gloo")
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "torchmpi": dist.all_reduce,
        "DeepSpeed": deepspeed.comm.inference_all_reduce,
        "gloo": lambda tensor: dist.all_reduce(tensor, group=gloo),
    }
    if dist.get_rank() == 0:
        print(f"| bytes, {size} ranks | {' | '.join(calls)} |\n|---|---|---|---|", flush=True)
    for kilobytes in (8, 16, 32, 64, 128, 256):
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in calls.items():
            tensor = torch.ones(kilobytes * 256)
            call(tensor)
            assert (tensor == size).all(), name
        tensor = torch.zeros(kilobytes * 256)
        for number in range(batches):
            for name in calls if number % 2 == 0 else reversed(calls):
                times[name].append(seconds(calls[name], tensor))
        if dist.get_rank() == 0:
            medians = " | ".join(f"{statistics.median(each) * 1e6:.1f}" for each in times.values())
            print(f"| {kilobytes} KB | {medians} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
