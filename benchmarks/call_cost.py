"""Measure the overhead of a call: mpi.allreduce against Allreduce of mpi4py on tensor.numpy(), in one job.

    mpirun -n 2 python benchmarks/call_cost.py
    mpirun --hostfile hosts -n 4 python benchmarks/call_cost.py --sizes 4,1024,65536

All sides alternate in short batches, in both orders, on a tensor that is written before each batch. Reported are
medians of the slowest rank, the lowest and the highest tenth of its batches, and the ratios of the medians and of the
lowest tenths. With several hosts there is a third side: the same call on a communicator whose calls are not compared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch

import torchmpi as mpi
from torchmpi.communicators.group import Group
from torchmpi.session import runtime

SIZES = (4, 4 << 10, 1 << 20, 16 << 20)
_BATCH_BYTES, _MOST_REPEATS = 16 << 20, 300


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="batches of each side (default 60)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument("--repeats", type=int, default=_MOST_REPEATS, help="calls of a batch, at most (default 300)")
    options = parser.parse_args()
    mpi.start()
    from mpi4py import MPI  # after start(), which loads the library

    comm = MPI.COMM_WORLD.Dup()
    world = runtime.current().world
    num_hosts = len(world.hosts)
    unchecked = Group(comm.Dup(), "unchecked", world.world_ranks, world.context, check="off")
    sides = ["mpi4py", "torchmpi", *(["not compared"] if num_hosts > 1 else [])]
    if mpi.rank() == 0:
        library = " ".join(map(str, MPI.get_vendor()))
        print(
            f"{mpi.size()} ranks on {num_hosts} hosts, {library}, torch {torch.__version__}, {platform.machine()}; "
            "us, with the tenths"
        )
        print(
            f"{'float32 sum':>12}" + "".join(f" {side:>24}" for side in sides) + f" {'to mpi4py':>10} {'lowest':>8}",
            flush=True,
        )
    for num_bytes in map(int, options.sizes.split(",")):
        tensor = torch.empty(num_bytes // 4)
        repeats = max(1, min(options.repeats, _BATCH_BYTES // num_bytes))

        def bare(tensor: torch.Tensor = tensor) -> None:
            comm.Allreduce(MPI.IN_PLACE, tensor.numpy())

        def ours(tensor: torch.Tensor = tensor) -> None:
            mpi.allreduce(tensor)

        def not_compared(tensor: torch.Tensor = tensor) -> None:
            mpi.allreduce(tensor, comm=unchecked)

        calls = dict(zip(sides, (bare, ours, not_compared), strict=False))
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in sides if number % 2 else sides[::-1]:
                tensor.fill_(0)
                comm.Barrier()
                begin = time.perf_counter()
                for _ in range(repeats):
                    calls[side]()
                own = (time.perf_counter() - begin) / repeats * 1e6
                times[side].append(comm.allreduce(own, MPI.MAX))

        def ratio(figures: dict[str, float]) -> str:
            return f"{figures['torchmpi'] / figures['mpi4py']:9.2f}"

        medians = {side: statistics.median(values) for side, values in times.items()}
        if mpi.rank() == 0:
            columns, lows = "", {}
            for side in sides:
                low, *_, high = statistics.quantiles(times[side], n=10)
                lows[side] = low
                columns += f" {medians[side]:10.1f} {f'({low:.1f}, {high:.1f})':>13}"
            print(f"{num_bytes:>10} B{columns} {ratio(medians)} {ratio(lows)}", flush=True)
    mpi.stop()


if __name__ == "__main__":
    main()
