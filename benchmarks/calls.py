"""Count the Python calls inside the package that one step of a program makes, once it is warmed up.

    mpirun -n 2 python benchmarks/calls.py [--list]

Counted with ``sys.setprofile`` on rank 0, in all threads; ``--list`` prints every function and how often it was called.
The counts depend on the code, not on the speed of the machine, except for who runs a queued call, its caller or a
helper: of five counts, the one with the fewest functions is printed. For another checkout, set ``PYTHONPATH`` to it.
The two hosts are two names of this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi import parameterserver
from torchmpi.engine import AllReduceSGDEngine

PACKAGE = Path(mpi.__file__).parent
NUM_WARMUPS, NUM_COUNTS = 20, 5
OBSERVERS = {"torchmpi watchdog", "torchmpi heartbeat"}
"""Threads that look at a step from time to time."""


class Counted:
    """The calls of functions of the package while :meth:`during` runs, in all threads that began after it was made."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._is_counting = False
        threading.setprofile(self._note)

    def during(self, step: Callable[[], object]) -> Counter[tuple[str, str]]:
        """Run a step, and return the calls."""
        self.calls = Counter()
        self._is_counting = True
        sys.setprofile(self._note)
        try:
            step()
        finally:
            sys.setprofile(None)
            self._is_counting = False
        return self.calls

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if not (self._is_counting and event == "call" and path.startswith(f"{PACKAGE}/")):
            return
        if threading.current_thread().name not in OBSERVERS:
            self.calls[str(Path(path).relative_to(PACKAGE)), frame.f_code.co_name] += 1


def report(name: str, step: Callable[[], object], *, counted: Counted, is_shown: bool, lists: bool) -> None:
    """Print the counts of one step."""
    for _ in range(NUM_WARMUPS):
        step()
    calls = min((counted.during(step) for _ in range(NUM_COUNTS)), key=len)
    if not is_shown:
        return
    files = {path for path, _ in calls}
    print(f"{name:44} {calls.total():5} calls {len(calls):4} functions {len(files):3} files", flush=True)
    for (path, function), count in calls.most_common() if lists else ():
        print(f"{count:8} {path} {function}", flush=True)


def make_net() -> torch.nn.Module:
    """Eight layers: 16 parameters."""
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))


def main() -> None:
    """Count native steps first, then those of torch.distributed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every function and how often it was called")
    options = parser.parse_args()
    counted = Counted()  # before torchmpi has threads
    net, inputs, tensor = make_net(), torch.ones(4, 16), torch.ones(1000)
    mpi.start()
    rank = mpi.rank()
    shown = {"counted": counted, "is_shown": rank == 0, "lists": options.list}
    engine, batches = AllReduceSGDEngine(), [(inputs, torch.zeros(4, 16))] * 4

    def train() -> None:
        engine.train(network=net, criterion=torch.nn.functional.mse_loss, iterator=batches, lr=0.1, max_epochs=1)

    def new_gradients() -> None:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        mpinn.synchronize_gradients(net)

    def backward() -> None:
        net.zero_grad()
        net(inputs).sum().backward()
        mpinn.synchronize_gradients_async(net)

    report("synchronize_gradients, 16 new gradients", new_gradients, **shown)
    report("synchronize_gradients, 16 kept gradients", lambda: mpinn.synchronize_gradients(net), **shown)
    report('allreduce(backend="shm")', lambda: mpi.allreduce(tensor, backend="shm"), **shown)
    report("allreduce", lambda: mpi.allreduce(tensor), **shown)
    server = parameterserver.init(torch.zeros(1000))
    report("parameterserver.send", lambda: parameterserver.send(server, tensor).wait(), **shown)
    parameterserver.free(server)
    report("engine.train, an epoch of 4 batches", train, **shown)
    mpinn.register_async_backward(net)
    report("a step with asynchronous hooks, 16 gradients", backward, **shown)
    mpi.stop()

    os.environ["TORCHMPI_HOST_NAME"] = f"host {rank}"
    mpi.start()
    strided = torch.ones(40, 25).t()
    report("allreduce of a strided tensor on two hosts", lambda: mpi.allreduce(strided), **shown)
    mpi.stop()
    del os.environ["TORCHMPI_HOST_NAME"]

    dist.init_process_group("torchmpi")
    wrapped = torch.nn.parallel.DistributedDataParallel(make_net())
    report("torch.distributed: all_reduce", lambda: dist.all_reduce(tensor), **shown)
    report("torch.distributed: all_reduce, async_op", lambda: dist.all_reduce(tensor, async_op=True).wait(), **shown)
    report("torch.distributed: a DDP step of one bucket", lambda: wrapped(inputs).sum().backward(), **shown)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
