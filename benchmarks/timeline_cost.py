"""Measure what recording a timeline costs: a call of 4 bytes, and DDP steps of the networks of `torchmpi bench train`.

    mpirun -n 2 python benchmarks/timeline_cost.py
    mpirun -n 1 python benchmarks/timeline_cost.py --parts calls

Batches with and without a timeline alternate in one job. Reported are medians of the slowest rank, the median of the
differences of neighboring batches, and the difference of the fastest batches. Times are those of the processor: of one
thread for calls, which should be measured on one rank, and of all threads for steps. The threads of asynchronous calls
do not take turns: the worker waits until some calls have been queued, and each wait finds a call that has just ended.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed

import torchmpi as mpi
from torchmpi.cli.bench.models import make_task
from torchmpi.communicators.handle import Handle
from torchmpi.session import runtime

_MODELS = ("mlp", "cnn", "transformer", "resnet")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="calls,steps", help="calls, steps (default: both)")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of batches (default 40)")
    parser.add_argument("--models", default=",".join(_MODELS), help="networks, separated by commas")
    options = parser.parse_args()
    mpi.start()
    folder = mpi.broadcast_object(tempfile.mkdtemp())
    if mpi.rank() == 0:
        print(f"{mpi.size()} ranks, torch {torch.__version__}, Python {sys.version.split()[0]}")
    if "calls" in options.parts:
        measure_calls(folder, options.rounds)
    if "steps" in options.parts:
        torch.distributed.init_process_group("torchmpi")
        for name in options.models.split(","):
            measure_steps(name, folder, options.rounds)
        torch.distributed.destroy_process_group()
    mpi.stop()


def measure_calls(folder: str, rounds: int) -> None:
    """Print the time of calls of 4 bytes, in microseconds."""
    tensor, repeats = torch.zeros(1), 1000

    def fast() -> None:
        for _ in range(repeats):
            mpi.allreduce(tensor)

    def through_python() -> None:
        for _ in range(repeats):
            mpi.allreduce(tensor, backend="mpi")

    for name, batch in (
        ("allreduce", timed(fast)),
        ("allreduce by MPI", timed(through_python)),
        ("asynchronous, the call", lambda: queued(tensor, repeats)[0]),
        ("asynchronous, the worker", lambda: queued(tensor, repeats)[1]),
        ("asynchronous, a wait", lambda: waited(repeats)),
    ):
        show(f"{name}, 4 bytes", "us", [1e6 * value / repeats for value in compared(batch, folder, rounds)])


def queued(tensor: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Return the seconds that asynchronous calls take in the calling thread, and in the worker."""
    own, calls = 0.0, runtime.communicator(None).intra.call_queue
    in_worker, at_once = 0.0, 20
    for _ in range(repeats // at_once):
        with calls.run_lock:
            first = calls.submit(time.thread_time, "begin")
            begin = time.thread_time()
            for _ in range(at_once):
                mpi.allreduce_async(tensor, backend="mpi")
            own += time.thread_time() - begin
            last = calls.submit(time.thread_time, "end")
        in_worker += last.wait() - first.wait()
    return own, in_worker


def waited(repeats: int) -> float:
    """Return the seconds that waits take apart from the waiting: the lock of each handle is free, as at its end."""
    handles: list[Handle[None]] = [Handle("allreduce") for _ in range(repeats)]
    for handle in handles:
        handle._finished.release()
    begin = time.thread_time()
    for handle in handles:
        handle.wait()
    return time.thread_time() - begin


def timed(batch: Callable[[], None], clock: Callable[[], float] = time.thread_time) -> Callable[[], float]:
    """Return a function that returns how long a batch takes."""

    def run() -> float:
        begin = clock()
        batch()
        return clock() - begin

    return run


def measure_steps(model: str, folder: str, rounds: int) -> None:
    """Print the time of DDP steps of a network, in milliseconds."""
    net, inputs, targets = make_task(model, rank=mpi.rank())
    net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    for _ in range(2):  # the first one broadcasts, the second one uses the buckets of all further ones
        step()
    before = num_calls()
    step()
    name = f"DDP step, {model}, {num_calls() - before} calls"
    show(name, "ms", [1e3 * value for value in compared(timed(step, time.process_time), folder, rounds)])


def num_calls() -> int:
    """Return how many calls this rank has made."""
    found = mpi.metrics()["calls"].values()
    return sum(int(each["calls"]) for collectives in found for each in collectives.values())


def compared(batch: Callable[[], float], folder: str, rounds: int) -> list[float]:
    """Return seconds of a batch: medians without and with a timeline and of the differences; that of the fastest."""
    times: dict[bool, list[float]] = {False: [], True: []}
    gc.disable()
    for number in range(rounds):
        for is_on in (False, True) if number % 2 else (True, False):
            with mpi.timeline.start(folder) if is_on else nullcontext():
                batch()  # fills the caches of this side
                mpi.barrier()
                own = batch()
            times[is_on].append(mpi.allreduce(own, op="max"))
    gc.enable()
    off, on = times[False], times[True]
    differences = [after - before for before, after in zip(off, on, strict=True)]
    return [*map(statistics.median, (off, on, differences)), min(on) - min(off)]


def show(name: str, unit: str, values: list[float]) -> None:
    """Print one row on rank 0."""
    if mpi.rank() == 0:
        off, on, more, least = values
        difference = f"difference {more:6.2f} ({100 * more / off:5.1f} %), fastest {least:6.2f}"
        print(f"{name:34} off {off:7.2f} {unit}, on {on:7.2f}, {difference}", flush=True)


if __name__ == "__main__":
    main()
