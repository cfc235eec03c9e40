"""Measure the bytes that each host sends for one allreduce, as a multiple of the payload, for several backends.

    mpirun -n 8 python benchmarks/link_bytes.py [--mib 4,64] [--repeats 5] [--interface eth0] [--busy]

The counters are those of the network interfaces, and include headers and all other traffic of the host: measure on an
idle cluster. The lower bound is 2 (H - 1) / H payloads among H hosts. Without --interface, all interfaces but the
loopback are counted. With --busy, calls run in the background, while the main thread runs Python.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

import torchmpi as mpi
from torchmpi.config import BackendName


def sent_bytes(interface: str | None) -> int:
    """Return the bytes sent by this host so far, from /proc/net/dev: /sys may show another network namespace."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface or (interface is None and name.strip() != "lo"):
            total += int(numbers.split()[8])
    return total


def measure(
    call: Callable[[torch.Tensor], object], numel: int, repeats: int, interface: str | None
) -> tuple[float, float]:
    """Return the seconds (median over the slowest rank) and the payloads sent by this host for one call."""
    rank, size = mpi.rank(), mpi.size()
    seconds, sent = [], 0
    for repeat in range(repeats + 1):
        tensor = torch.full((numel,), float(rank + 1))
        mpi.barrier()
        before = sent_bytes(interface)
        mpi.barrier()  # no rank sends before all have read the counters
        start = time.perf_counter()
        call(tensor)
        duration = time.perf_counter() - start
        mpi.barrier()
        after = sent_bytes(interface)
        slowest = mpi.allreduce(duration, op="max")
        right = bool((tensor == size * (size + 1) / 2).all())
        if not mpi.allreduce(int(right), op="min"):
            raise SystemExit(f"rank {rank}: wrong result: {tensor}")
        if repeat > 0:  # the first one opens the connections
            seconds.append(slowest)
            sent += after - before
    return statistics.median(seconds), sent / repeats / (numel * 4)


def in_background(call: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """Return a function that runs a call in another thread, while this one runs Python."""

    def run(tensor: torch.Tensor) -> None:
        thread = threading.Thread(target=call, args=(tensor,))
        thread.start()
        while thread.is_alive():
            sum(range(1000))
        thread.join()

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", default="4,64", help="sizes of the payload in MiB, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="measured calls of each kind")
    parser.add_argument("--interface", help="count this network interface only")
    parser.add_argument(
        "--backends", default="bare,mpi,p2p,hierarchical", help="backends to measure; bare is mpi4py without torchmpi"
    )
    parser.add_argument(
        "--busy", action="store_true", help="run calls in the background, while the main thread runs Python"
    )
    options = parser.parse_args()
    with mpi.started():
        from mpi4py import MPI  # after start(), which loads the library

        bare = MPI.COMM_WORLD.Dup()

        def call_of(name: str) -> Callable[[torch.Tensor], object]:
            if name == "bare":
                return lambda tensor: bare.Allreduce(MPI.IN_PLACE, tensor.numpy())
            return lambda tensor: mpi.allreduce(tensor, backend=cast(BackendName, name))

        num_hosts = mpi.num_nodes_in_communicator()
        for mib in map(float, options.mib.split(",")):
            for name in options.backends.split(","):
                call = in_background(call_of(name)) if options.busy else call_of(name)
                seconds, payloads = measure(call, int(mib * 2**18), options.repeats, options.interface)
                by_host = dict(mpi.allgather_object((mpi.host_name(), payloads)))
                if mpi.rank() == 0:
                    sent = "  ".join(f"{host} {value:.2f}" for host, value in sorted(by_host.items()))
                    least = 2 * (num_hosts - 1) / num_hosts
                    print(
                        f"{mib:6g} MiB  {name:12}  {seconds * 1e3:9.2f} ms  sent: {sent}  (least {least:.2f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
