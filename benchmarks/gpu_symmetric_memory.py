"""Measure the allreduce of PyTorch's symmetric memory among ranks that share a GPU, beside staging by hand with mpi4py.

    mpirun -n 2 python benchmarks/gpu_symmetric_memory.py

Its kernel waits on the GPU for the kernels of the other ranks, which `ipc` never does (docs/design/gpu.md). "kernel":
`one_shot_all_reduce` of a tensor in symmetric memory. "copy, kernel": of any other tensor. "mpi4py": with page-locked
memory. Medians of the slowest rank, in microseconds. Run it under the Multi-Process Service.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore

from torchmpi.cli.bench.options import short_size
from torchmpi.cli.formatting import table

_REPEATS, _BYTES_OF_A_BATCH = 50, 256 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="batches of each side (default 12)")
    parser.add_argument("--sizes", default="4096,65536,1048576,4194304,67108864", help="bytes, separated by commas")
    options = parser.parse_args()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # several ranks on one GPU
    import torch.distributed._symmetric_memory as symmetric_memory
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.cuda.set_device(0)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    store = FileStore(f"{folder}/store", comm.size)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    group = torch.distributed.group.WORLD
    assert group is not None
    lines = [["bytes"]]
    for num_bytes in map(int, options.sizes.split(",")):
        shared = symmetric_memory.empty([num_bytes // 4], dtype=torch.float32, device=torch.device("cuda", 0))
        symmetric_memory.rendezvous(shared, group.group_name)
        shared.fill_(comm.rank + 1)
        torch.cuda.synchronize()
        comm.Barrier()
        result = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)
        assert bool((result == comm.size * (comm.size + 1) / 2).all())
        times = measure(comm, sides(comm, shared, group.group_name), num_bytes, options.rounds)
        if len(lines) == 1:
            lines[0] += [*times, "mpi4py / copy, kernel"]
        ratio = times["mpi4py"] / times["copy, kernel"]
        lines.append([short_size(num_bytes), *(f"{value:.1f}" for value in times.values()), f"{ratio:.1f}"])
    if comm.rank == 0:
        print(f"{comm.size} ranks, torch {torch.__version__}, {torch.cuda.get_device_name()}")
        print("\n".join(table(lines)))
    torch.distributed.destroy_process_group()


def sides(comm: Any, shared: torch.Tensor, group_name: str) -> dict[str, Callable[[], object]]:
    """Return the calls to measure."""
    from mpi4py import MPI

    tensor, host = torch.ones_like(shared), torch.zeros(shared.shape, pin_memory=True)
    array = host.numpy()

    def kernel(out: torch.Tensor = torch.empty_like(shared)) -> None:  # noqa: B008 - one tensor for all calls
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group_name, out)

    def copy_kernel() -> None:
        shared.copy_(tensor)
        kernel(tensor)

    def by_hand() -> None:
        host.copy_(tensor)
        comm.Allreduce(MPI.IN_PLACE, array)
        tensor.copy_(host)

    return {"kernel": kernel, "copy, kernel": copy_kernel, "mpi4py": by_hand}


def measure(comm: Any, calls: dict[str, Callable[[], object]], num_bytes: int, rounds: int) -> dict[str, float]:
    """Return the median time of each call in microseconds. Collective."""
    from mpi4py import MPI

    repeats = max(1, min(_REPEATS, _BYTES_OF_A_BATCH // num_bytes))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
            seconds = comm.allreduce(time.perf_counter() - begin, MPI.MAX)
            if number:  # the first round warms up
                found[name].append(seconds / repeats * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
