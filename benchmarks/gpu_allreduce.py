"""Measure allreduce of CUDA tensors by each backend, beside staging by hand with mpi4py and a copy within the device.

    mpirun -n 2 python benchmarks/gpu_allreduce.py
    mpirun -n 4 python benchmarks/gpu_allreduce.py --sizes 1048576,268435456

All sides alternate in short batches, in both orders, on a tensor that is written before each batch; a batch ends when
the device has finished. Reported are medians of the slowest rank, in microseconds. "enqueue": five operations from
Python (copy, publish, await, add, publish), which show how fast the processor is in this run: each rank by itself and
without a collective around them. "launch" is the time until allreduce_async() has returned. "memory": the time in which
all ranks together copy the bytes that `ipc` reads and writes, at the speed of the copy of this run, over the time of
`ipc`. "to mpi4py": how many times as fast `ipc` is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import torchmpi as mpi
from torchmpi.backends.ipc import chunk_plan, staged_group
from torchmpi.backends.ipc.stream_memory import StreamOperations
from torchmpi.cli.bench.options import short_size
from torchmpi.cli.formatting import table

SIZES = tuple(4 << shift for shift in range(10, 27, 2))
_BATCH_SECONDS, _MOST_REPEATS = 3e-3, 100


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="batches of each side (default 20)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    options = parser.parse_args()
    mpi.start(with_cuda=True)
    from mpi4py import MPI  # after start(), which loads the library

    comm = MPI.COMM_WORLD.Dup()
    is_first, lines = mpi.rank() == 0, [["bytes"]]
    if is_first:
        library = " ".join(map(str, MPI.get_vendor()))
        print(f"{mpi.size()} ranks, {library}, torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for num_bytes in map(int, options.sizes.split(",")):
        tensor = torch.zeros(num_bytes // 4, device=mpi.device())
        times = measure(comm, sides(comm, tensor), tensor, options.rounds)
        if len(lines) == 1:
            lines[0] += [*times, "memory", "to mpi4py"]
        bound = times["copy"] * bytes_by_ipc(tensor) / (2 * tensor.nbytes * mpi.size())
        figures = [f"{value:.1f}" for value in times.values()]
        ratios = (
            [f"{bound / times['ipc']:.0%}", f"{times['mpi4py'] / times['ipc']:.2f}"] if "ipc" in times else ["", ""]
        )
        lines.append([short_size(num_bytes), *figures, *ratios])
        if is_first:
            print(f"{short_size(num_bytes)} measured", flush=True)
    if is_first:
        print("\n".join(table(lines)))
    mpi.stop()


def sides(comm: Any, tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return the calls to measure; a handle is waited for at the end of a batch."""
    host, copied, added = torch.zeros(tensor.shape, pin_memory=True), torch.empty_like(tensor), torch.empty_like(tensor)
    array = host.numpy()

    def by_hand() -> None:
        host.copy_(tensor)
        comm.Allreduce(mpi_in_place(), array)
        tensor.copy_(host)

    number = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    publish = StreamOperations([number.data_ptr()], [])
    wait = StreamOperations([], [number.data_ptr()])

    def enqueue(_: torch.Tensor = number) -> None:  # keeps the memory, of which the operations have the address
        stream = torch.cuda.current_stream().cuda_stream
        copied.copy_(tensor)
        publish(stream, 1)
        wait(stream, 1)
        torch.add(copied, copied, out=added)
        publish(stream, 1)

    calls: dict[str, Callable[[], Any]] = {"copy": lambda: copied.copy_(tensor), "enqueue": enqueue}
    available = mpi.collective_availability()
    for name in ("nccl", "ipc", "shm"):
        if available[name, "allreduce", "cuda", "sync"].startswith("available"):
            calls[name] = lambda name=name: mpi.allreduce(tensor, backend=name)  # type: ignore[misc]
    return calls | {"launch": lambda: mpi.allreduce_async(tensor), "mpi4py": by_hand}


def mpi_in_place() -> Any:
    """Return MPI's constant for a call in place."""
    from mpi4py import MPI

    return MPI.IN_PLACE


def measure(comm: Any, calls: dict[str, Callable[[], Any]], tensor: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return the median time of each call in microseconds. Collective."""

    def batch(name: str, repeats: int) -> float:
        tensor.zero_()
        torch.cuda.synchronize()
        mpi.barrier()
        begin = time.perf_counter()
        results = [calls[name]() for _ in range(repeats)]
        if name != "launch":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        for handle in results if name == "launch" else ():
            handle.wait()
        torch.cuda.synchronize()
        longest: float = mpi.allreduce(seconds, op="max")
        return longest / repeats

    repeats = {}
    for name in calls:
        batch(name, 2)
        repeats[name] = max(1, min(_MOST_REPEATS, int(_BATCH_SECONDS / batch(name, 3))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 else reversed(calls):
            found[name].append(batch(name, repeats[name]) * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def bytes_by_ipc(tensor: torch.Tensor) -> int:
    """Return the bytes that all ranks read and write on their GPU in an allreduce by `ipc`."""
    size, numel, itemsize = mpi.size(), tensor.numel(), tensor.element_size()
    half = chunk_plan.half_bytes(mpi.Config.from_environment().staging_bytes, size) // itemsize
    shots = staged_group.shots(size, tensor.nbytes, has_kernel=True)
    accesses = 0
    for rank in range(size):
        for step in (each for steps in chunk_plan.allreduce(rank, size, numel, half, shots=shots) for each in steps):
            if isinstance(step, chunk_plan.Fill | chunk_plan.Take):
                accesses += 2 * step.numel
            elif isinstance(step, chunk_plan.ReduceAreas):  # a kernel reads all areas and writes once
                accesses += (size + 1) * step.numel
    return accesses * itemsize


if __name__ == "__main__":
    main()
