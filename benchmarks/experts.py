"""Measure steps of a mixture of experts, against one process and gloo in the same job.

    mpirun --bind-to core -n 2 python benchmarks/experts.py

A step is forward, backward, and the average of the router's gradient; what it exchanges is measured alone, too. On each
rank are two experts, and tokens of its own; "one process" has all experts and the tokens of all ranks, while the other
ranks sleep. The losses of all contestants are compared first. They alternate. Printed are the medians of the slowest
rank in milliseconds, and the shortest times, which other programs on the host disturb least.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.nn.experts import TokenExchange

EXPERTS_PER_RANK = 2
ONE, OWN, GLOO = "one process", "MixtureOfExperts", "torch.distributed on gloo"


class TorchExchange(TokenExchange):
    """The exchange of a layer through a process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        super().__init__(mpi.communicator(0))
        self.group = group

    def gather(self, counts: Tensor) -> Tensor:
        """Return the counts of all ranks."""
        gathered = counts.new_empty(self.comm.size * len(counts))
        dist.all_gather_into_tensor(gathered, counts, group=self.group)
        return gathered

    def move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to other ranks, and return the received ones."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result


def make_layer(width: int, hidden: int, num_experts: int) -> mpinn.MixtureOfExperts:
    """Make the layer, with the same weights whatever ranks it is divided over."""
    torch.manual_seed(1)

    def make_expert() -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden * width), nn.ReLU(), nn.Linear(hidden * width, width))

    return mpinn.MixtureOfExperts(width, num_experts, make_expert, capacity_factor=1.25)


def step_of(layer: mpinn.MixtureOfExperts, tokens: Tensor, average: Callable[[Tensor], object]) -> Callable[[], float]:
    """Return a function that makes a step and returns the loss of this rank."""

    def step() -> float:
        layer.zero_grad()
        loss = (tokens + layer(tokens)).square().mean() + 0.01 * layer.balance_loss
        loss.backward()
        gradient = layer.router.weight.grad
        assert gradient is not None
        average(gradient)
        return float(loss.detach())

    return step


def through_torch(layer: mpinn.MixtureOfExperts, tokens: Tensor, group: Any) -> Callable[[], float]:
    """Return the step of a copy of the layer that uses torch.distributed only."""
    other = copy.deepcopy(layer)
    other.token_exchange = TorchExchange(group)

    def average(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=group)
        gradient /= mpi.size()

    return step_of(other, tokens, average)


def alone(step: Callable[[], float]) -> Callable[[], float]:
    """Return a step that rank 0 makes, while the others sleep: a rank that waits would take its core."""
    from mpi4py import MPI

    def run() -> float:
        loss = step() if mpi.rank() == 0 else 0.0
        request = MPI.COMM_WORLD.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)
        return loss

    return run


def exchanges(exchange: TokenExchange, num_rows: int, width: int) -> Callable[[], float]:
    """Return what a step exchanges, with equal parts, and nothing else."""
    numbers, rows = torch.ones(2 * EXPERTS_PER_RANK * mpi.size(), dtype=torch.int64), torch.ones(num_rows, width)
    parts = [num_rows // mpi.size()] * mpi.size()

    def run() -> float:
        exchange.gather(numbers)
        for _ in range(4):
            exchange.move(rows[: sum(parts)], parts, parts)
        return 0.0

    return run


def measured(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return median and minimum of each in milliseconds, in alternating rounds, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 == 0 else reversed([*steps]):
            mpi.barrier()
            begin = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - begin)
    largest = {
        name: [mpi.allreduce(of(each), op="max") for of in (statistics.median, min)] for name, each in times.items()
    }
    return {name: (median * 1e3, least * 1e3) for name, (median, least) in largest.items()}


def check_losses(steps: Mapping[str, Callable[[], float]]) -> None:
    """Fail if the contestants have different losses."""
    means = {name: mpi.allreduce(step(), op="avg") for name, step in steps.items()}
    means[ONE] *= mpi.size()
    for name, mean in means.items():
        assert abs(mean - means[ONE]) <= 1e-5 * means[ONE], f"{name}: {means}"


def main() -> None:
    """Compare and measure; print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128,256", help="features of a token (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1, help="of an expert, times the width (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=31, help="steps of each (default: %(default)s)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # deprecated names
    mpi.start()
    dist.init_process_group("torchmpi")
    groups = {"torch.distributed on torchmpi": dist.group.WORLD, GLOO: dist.new_group(backend="gloo")}
    num_experts, size = EXPERTS_PER_RANK * mpi.size(), options.tokens
    if mpi.rank() == 0:
        print(f"{mpi.size()} ranks, {EXPERTS_PER_RANK} experts and {size} tokens on each; milliseconds")
    for width in map(int, options.widths.split(",")):
        layer, whole = make_layer(width, options.hidden, num_experts), None
        everything = torch.randn(mpi.size() * size, width, generator=torch.Generator().manual_seed(2))
        own = everything[mpi.rank() * size :][:size]
        with mpi.group([0]) as first:
            if first:
                with mpi.use(first):
                    whole = make_layer(width, options.hidden, num_experts)
            steps = {ONE: alone(step_of(whole, everything, lambda gradient: None) if whole else lambda: 0.0)}
            steps[OWN] = step_of(layer, own, lambda gradient: mpi.allreduce(gradient, op="avg"))
            steps |= {name: through_torch(layer, own, group) for name, group in groups.items()}
            check_losses(steps)
            found = {"step": measured(steps, options.rounds)}
        calls = {OWN: exchanges(layer.token_exchange, 2 * size, width)}
        calls |= {name: exchanges(TorchExchange(group), 2 * size, width) for name, group in groups.items()}
        found["exchanges alone"] = measured(calls, options.rounds)
        if mpi.rank() == 0:
            for what, times in found.items():
                print(f"width {width}, {what}")
                for name, (median, least) in times.items():
                    ratios = f"{times[GLOO][0] / median:6.2f} x gloo, minima {times[GLOO][1] / least:6.2f}"
                    print(f"  {name:<30} {median:9.3f} {least:9.3f} {ratios}", flush=True)
    dist.destroy_process_group()
    mpi.stop()


if __name__ == "__main__":
    main()
