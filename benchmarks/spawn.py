"""Measure start and end of processes of ``torch.multiprocessing.spawn`` with torchmpi and with gloo.

The program is that of PyTorch's tutorials on DDP: env://, no launcher. Backends alternate; the line of a phase has the
median over all starts of the slowest rank. A start that fails is counted, and is not part of the medians: before Python
3.14, a thread of PyTorch that waits for the interpreter lock while Python ends may call std::terminate().
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, spawn
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("gloo", "torchmpi")
PHASES = ("imports", "init_process_group", "ten steps", "destroy_process_group", "end of the process", "together")


def train(rank: int, size: int, backend: str, port: int, results: SimpleQueue[list[float]]) -> None:
    """Run one rank, and report the times at the ends of its phases."""
    times = [time.monotonic()]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=size)
    times.append(time.monotonic())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(20, 10)).square().mean().backward()
        optimizer.step()
    times.append(time.monotonic())
    dist.destroy_process_group()
    times.append(time.monotonic())
    results.put(times)


def one_start(backend: str, size: int) -> list[float]:
    """Return the seconds of each phase."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results: SimpleQueue[list[float]] = multiprocessing.get_context("spawn").SimpleQueue()
    begin = time.monotonic()
    spawn(train, args=(size, backend, port, results), nprocs=size)
    end = time.monotonic()
    slowest = [max(times) for times in zip(*(results.get() for _ in range(size)), strict=True)]
    moments = [begin, *slowest, end]
    return [after - before for before, after in itertools.pairwise(moments)] + [end - begin]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5, help="number of starts of each backend (default: %(default)s)")
    parser.add_argument("-n", dest="size", type=int, default=2, help="number of processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    for backend in BACKENDS:  # the first start compiles, and reads the files
        one_start(backend, options.size)
    measured: dict[str, list[list[float]]] = {backend: [] for backend in BACKENDS}
    failed = dict.fromkeys(BACKENDS, 0)
    for number in range(options.count):
        for backend in BACKENDS if number % 2 else BACKENDS[::-1]:
            try:
                measured[backend].append(one_start(backend, options.size))
            except ProcessExitedException as failure:
                failed[backend] += 1
                print(f"{backend}: {failure}", file=sys.stderr)
    print(f"torch {torch.__version__}, {options.size} processes, medians of {options.count} starts, seconds")
    print(f"{'':24}" + "".join(f"{backend:>10}" for backend in BACKENDS))
    for index, phase in enumerate(PHASES):
        medians = [statistics.median(times[index] for times in measured[backend]) for backend in BACKENDS]
        print(f"{phase:24}" + "".join(f"{median:10.2f}" for median in medians))
    print(f"{'failed starts':24}" + "".join(f"{failed[backend]:10}" for backend in BACKENDS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
