"""Measure what `watch_replicas` costs: a comparison of ResNet-50, against a training step of it on the same cores.

    mpirun -n 2 python benchmarks/replica_watch_cost.py [--every 100] [--batch 8] [--rounds 3]

Reported are the medians over rounds, in which steps and comparisons alternate, and the share of a step that comparing
every so many steps adds. On a GPU both are of the device of the rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.cli.bench.models import resnet50
from torchmpi.nn.replica import Replica
from torchmpi.nn.replica_check import compare, compared_tensors
from torchmpi.session import runtime


def seconds(function: Callable[[], object]) -> float:
    """Return the time of a call, with that of the device."""
    mpi.barrier()
    begin = time.perf_counter()
    function()
    if mpi.device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100, help="steps between two comparisons")
    parser.add_argument("--batch", type=int, default=8, help="images of a rank in a step")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    mpi.start()
    torch.manual_seed(0)
    net = resnet50().to(mpi.device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    images = torch.randn(options.batch, 3, 224, 224, device=mpi.device())
    comm = runtime.communicator(None)

    def step() -> None:
        optimizer.zero_grad()
        net(images).square().mean().backward()
        mpinn.synchronize_gradients(net)
        optimizer.step()

    def check() -> None:
        compare(compared_tensors(Replica(net), comm, buffers=False), comm)

    step()
    check()
    steps, checks = zip(*((seconds(step), seconds(check)) for _ in range(options.rounds)), strict=True)
    if mpi.rank() == 0:
        share = median(checks) / options.every / median(steps)
        print(f"a step:       {1000 * median(steps):8.1f} ms")
        print(
            f"a comparison: {1000 * median(checks):8.1f} ms, {100 * share:.3f} % of a step every {options.every} steps"
        )
    mpi.stop()


if __name__ == "__main__":
    main()
