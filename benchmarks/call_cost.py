"""Measure the overhead of a call: mpi.allreduce against Allreduce of mpi4py on tensor.numpy(), in one job.

    mpirun -n 2 python benchmarks/call_cost.py

Both alternate in short batches, in both orders, on a tensor that is written before each batch; medians are reported.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch

import torchmpi as mpi

SIZES = {"4 B": (1, 300), "4 KB": (1 << 10, 200), "1 MB": (1 << 18, 10), "16 MB": (1 << 22, 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="batches of each side (default 60)")
    rounds = parser.parse_args().rounds
    mpi.start()
    from mpi4py import MPI  # after start(), which loads the library

    comm = MPI.COMM_WORLD.Dup()
    if mpi.rank() == 0:
        library = " ".join(map(str, MPI.get_vendor()))
        print(f"{mpi.size()} ranks, {library}, torch {torch.__version__}, {platform.machine()}")
        print(f"{'float32 sum':>12} {'mpi4py us':>10} {'torchmpi us':>12} {'ratio':>6}")
    for name, (numel, repeats) in SIZES.items():
        tensor = torch.empty(numel)

        def bare(tensor: torch.Tensor = tensor) -> None:
            comm.Allreduce(MPI.IN_PLACE, tensor.numpy())

        def ours(tensor: torch.Tensor = tensor) -> None:
            mpi.allreduce(tensor)

        times: dict[str, list[float]] = {"bare": [], "ours": []}
        for number in range(rounds):
            for call in (bare, ours) if number % 2 else (ours, bare):
                tensor.fill_(0)
                comm.Barrier()
                begin = time.perf_counter()
                for _ in range(repeats):
                    call()
                times[call.__name__].append((time.perf_counter() - begin) / repeats * 1e6)
        medians = {side: statistics.median(values) for side, values in times.items()}
        if mpi.rank() == 0:
            print(
                f"{name:>12} {medians['bare']:10.1f} {medians['ours']:12.1f} {medians['ours'] / medians['bare']:6.2f}"
            )
    mpi.stop()


if __name__ == "__main__":
    main()
