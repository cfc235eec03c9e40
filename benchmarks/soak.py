"""Train, use a parameter server, catch errors, stop and start again, for a time; fail if resources of a rank grow.

    mpirun -n 3 python benchmarks/soak.py 600

`scripts/soak.sh` starts it and compares /dev/shm before and after.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from usage import usage

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.errors import MismatchError, StallError

_WARM_UP = 1 / 5  # of the time: allocators and caches grow until every kind of call has been made
_NUM_LINES = 20
_STEPS, _SENDS, _FAULTS = 50, 20, 4  # in one cycle
_MAX_GROWTH = {"resident MB": 24.0, "shared MB": 4.0, "descriptors": 4, "threads": 2, "mapped /dev/shm": 0}
"""After warming up, on any rank."""


def resources() -> dict[str, float]:
    """Return what this rank uses while torchmpi is stopped."""
    gc.collect()
    found, maps = usage(), Path("/proc/self/maps").read_text().splitlines()
    return {
        "resident MB": round(found["resident_bytes"] / 2**20, 1),
        "shared MB": round(found["segment_bytes"] / 2**20, 1),
        "descriptors": found["descriptors"],
        "threads": found["threads"],
        "mapped /dev/shm": len({line.split()[4] for line in maps if "/dev/shm/" in line}),
    }


def train(seed: int) -> None:
    """Train a net, with its gradients averaged while the backward pass runs, and compare the ranks at the end."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    mpinn.synchronize_parameters(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    mpinn.register_async_backward(net)
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        optimizer.zero_grad()
        net(torch.randn(16, 64, generator=generator)).square().mean().backward()
        mpinn.synchronize_gradients_async(net)
        optimizer.step()
    mpinn.check_with_allreduce(net)
    mpinn.unregister_async_backward(net)


def serve(seed: int) -> None:
    """Add to a parameter server from all ranks; the sum must be exact."""
    server = ps.init(torch.zeros(50_000))
    mpi.barrier()
    for number in range(_SENDS):
        ps.send(server, torch.full((50_000,), float(number)), "add").wait()
    mpi.barrier()
    received = torch.empty(50_000)
    ps.receive(server, received).wait()
    expected = mpi.size() * sum(range(_SENDS))
    if not bool((received == expected).all()):
        raise AssertionError(f"the server has {received[0]} instead of {expected}")
    mpi.barrier()
    ps.free(server)


def fail(seed: int) -> None:
    """Make calls that differ between the ranks, which all must refuse, and go on."""
    for number in range(_FAULTS):
        tensor = torch.ones(100 + (mpi.rank() == number % mpi.size()))
        try:
            mpi.allreduce(tensor)
        except (MismatchError, StallError):
            pass
        else:
            if mpi.size() > 1:
                raise AssertionError("calls that differ were not refused")
        if float(mpi.allreduce(1.0)) != mpi.size():
            raise AssertionError("wrong sum after a call that was refused")


def collect(seed: int) -> None:
    """Make other collectives, also on communicators of their own, and asynchronously."""
    world = mpi.size()
    with mpi.group(range(world)) as everyone:
        handles = [mpi.allreduce_async(torch.ones(10 ** (k % 6)), comm=everyone) for k in range(12)]
        gathered = mpi.allgather(torch.full((3,), mpi.rank()), comm=everyone)
        for handle in handles:
            if float(handle.wait()[0]) != world:
                raise AssertionError("wrong sum")
    if gathered.tolist() != [rank for rank in range(world) for _ in range(3)]:
        raise AssertionError("wrong result of allgather")
    mpi.broadcast_object({"seed": seed}, root=seed % world)


PARTS: tuple[Callable[[int], None], ...] = (train, serve, fail, collect)


def run(seconds: float) -> list[str]:
    """Run cycles of all parts; return what has grown on any rank."""
    begin, cycle, printed = time.monotonic(), 0, 0
    baseline: list[dict[str, float]] = []
    everywhere: list[dict[str, float]] = []
    is_over, elapsed = False, 0.0
    while not is_over:
        own = resources()
        mpi.start()
        for part in PARTS:
            part(cycle)
        elapsed = mpi.broadcast_object(time.monotonic() - begin)
        everywhere = mpi.allgather_object(own)
        rank = mpi.rank()
        mpi.stop()
        cycle, is_over = cycle + 1, elapsed >= seconds
        if not baseline and elapsed >= seconds * _WARM_UP and cycle > 1:
            baseline = everywhere
        if rank == 0 and (is_over or elapsed >= printed * seconds / _NUM_LINES):
            printed = int(elapsed * _NUM_LINES / seconds) + 1
            _show(elapsed, cycle, everywhere)
    return _grown(baseline, everywhere) if rank == 0 else []


def _show(elapsed: float, cycle: int, everywhere: list[dict[str, float]]) -> None:
    if cycle == 1:
        print(
            f"{'seconds':>8} {'cycles':>7} " + " ".join(f"{name:>17}" for name in _MAX_GROWTH) + "   (most of any rank)"
        )
    most = [max(each[name] for each in everywhere) for name in _MAX_GROWTH]
    print(f"{elapsed:8.0f} {cycle:7} " + " ".join(f"{value:17}" for value in most), flush=True)


def _grown(baseline: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    problems = []
    for rank, (before, after) in enumerate(zip(baseline, now, strict=True)):
        for name, limit in _MAX_GROWTH.items():
            if after[name] - before[name] > limit:
                problems.append(f"rank {rank}: {name} grew from {before[name]} to {after[name]}, by more than {limit}")
    return problems


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    seconds = parser.parse_args().seconds
    mpi.start()  # MPI is initialized once for all cycles
    mpi.stop()
    problems = run(seconds)
    print("\n".join(problems), end="\n" if problems else "", flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
