"""Count the Python calls inside the package that one step of a program makes, once it is warmed up.

    mpirun -n 2 python benchmarks/calls.py [--list]

Counted with ``sys.setprofile`` on rank 0, in all threads; ``--list`` prints every function and how often it was called.
The counts depend on the code alone, not on the speed of the machine.
"""

from __future__ import annotations

import argparse
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

PACKAGE = Path(mpi.__file__).parent
NUM_WARMUPS = 20


class Counted:
    """The calls of functions of the package while :meth:`during` runs."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def during(self, step: Callable[[], object]) -> None:
        """Run a step, and count."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            self.calls[str(Path(path).relative_to(PACKAGE)), frame.f_code.co_name] += 1


def report(name: str, step: Callable[[], object], *, is_shown: bool, lists: bool) -> None:
    """Print the counts of one step."""
    for _ in range(NUM_WARMUPS):
        step()
    counted = Counted()
    counted.during(step)
    if not is_shown:
        return
    files = {path for path, _ in counted.calls}
    print(
        f"{name:44} {counted.calls.total():5} calls {len(counted.calls):4} functions {len(files):3} files", flush=True
    )
    for (path, function), count in counted.calls.most_common() if lists else ():
        print(f"{count:8} {path} {function}", flush=True)


def make_net() -> torch.nn.Module:
    """Eight layers: 16 parameters."""
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))


def main() -> None:
    """Count native steps first, then those of torch.distributed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every function and how often it was called")
    options = parser.parse_args()
    net, inputs, tensor = make_net(), torch.ones(4, 16), torch.ones(1000)
    mpi.start()
    shown = {"is_shown": mpi.rank() == 0, "lists": options.list}

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
    mpinn.register_async_backward(net)
    report("a step with asynchronous hooks, 16 gradients", backward, **shown)
    mpi.stop()

    dist.init_process_group("torchmpi")
    wrapped = torch.nn.parallel.DistributedDataParallel(make_net())
    report("torch.distributed: all_reduce", lambda: dist.all_reduce(tensor), **shown)
    report("torch.distributed: all_reduce, async_op", lambda: dist.all_reduce(tensor, async_op=True).wait(), **shown)
    report("torch.distributed: a DDP step of one bucket", lambda: wrapped(inputs).sum().backward(), **shown)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
