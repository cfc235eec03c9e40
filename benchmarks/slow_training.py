"""Plant a fault in a training job, and print the report of `torchmpi timeline report` that names it.

    python benchmarks/slow_training.py                       # all faults; traces and pictures in ./slow_training
    python benchmarks/slow_training.py --faults late --out docs/images

Each fault is a job of its own on this machine, in which the ranks are on two hosts by name where the fault needs them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.cli import main as torchmpi_command
from torchmpi.launch import launcher

WIDTH, NUM_LAYERS, BATCH = 128, 8, 64
LATE_SECONDS = 0.05


class Fault(NamedTuple):
    """A reason for slow training."""

    num_ranks: int
    train: Callable[[int], None]
    variables: dict[str, str]
    """Settings of the job."""
    ranks_per_host: int = 0
    """0: all ranks are on this host."""


def steps(num_steps: int, bucket_bytes: int | None = None, before_step: Callable[[], None] = lambda: None) -> None:
    """Train a network on random data, with gradients that are averaged during backward()."""
    layers = [layer for _ in range(NUM_LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers)
    mpinn.synchronize_parameters(net)
    mpinn.register_async_backward(net, bucket_bytes=bucket_bytes)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(num_steps):
        before_step()
        optimizer.zero_grad()
        (loss := net(torch.randn(BATCH, WIDTH)).square().mean()).backward()
        mpinn.synchronize_gradients_async(net)
        optimizer.step()
        mpi.report_progress(samples=BATCH, loss=loss.item())


def late(num_steps: int) -> None:
    """Let the last rank do more work than the others in each step."""
    steps(num_steps, before_step=lambda: time.sleep(LATE_SECONDS) if mpi.rank() == mpi.size() - 1 else None)


def small_buckets(num_steps: int) -> None:
    """Put each parameter into a bucket of its own."""
    steps(num_steps, bucket_bytes=1)


FAULTS = {
    "late": Fault(2, late, {}),
    "buckets": Fault(2, small_buckets, {}),
    "flat": Fault(3, steps, {"TORCHMPI_HIERARCHICAL": "off"}, ranks_per_host=2),
}


def run_rank(name: str, num_steps: int) -> None:
    """Run one rank of the job of a fault."""
    fault = FAULTS[name]
    if fault.ranks_per_host:
        os.environ["TORCHMPI_HOST_NAME"] = f"node{(launcher.detect().rank or 0) // fault.ranks_per_host}"
    mpi.start()
    fault.train(num_steps)
    mpi.stop()


def show(name: str, folder: Path, num_steps: int) -> int:
    """Run the job of a fault, and print its report."""
    fault, traces = FAULTS[name], folder / name
    command = [sys.executable, "-m", "torchmpi", "run", "-n", str(fault.num_ranks), __file__]
    environment = os.environ | {"TORCHMPI_TIMELINE": str(traces), **fault.variables}
    status = subprocess.run([*command, "--rank-of", name, "--steps", str(num_steps)], env=environment).returncode
    if status:
        return status
    print(f"\n{name}:", flush=True)
    return torchmpi_command(["timeline", "report", str(traces), "--plot", str(folder / f"steps_{name}.png")])


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog="example: python benchmarks/slow_training.py --steps 30"
    )
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    parser.add_argument("--steps", type=int, default=30, help="steps of each job (default: %(default)d)")
    parser.add_argument("--out", type=Path, default=Path("slow_training"), help="folder for traces and pictures")
    parser.add_argument("--rank-of", choices=FAULTS, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run the command."""
    given = make_parser().parse_args()
    if given.rank_of:
        run_rank(given.rank_of, given.steps)
        return 0
    return max(show(name, given.out, given.steps) for name in given.faults)


if __name__ == "__main__":
    sys.exit(main())
