"""Compare asynchronous training on ranks with the same on simulated workers, and measure how long simulations take.

    mpirun -n 4 python benchmarks/simulated_workers.py
    python benchmarks/simulated_workers.py --workers 256
    python benchmarks/simulated_workers.py --cost

The first form trains on the ranks, with a record. Rank 0 then simulates as many workers, whose compute times and
network are those of the record, and once more with compute times that are drawn from those of all ranks. It prints the
overlap of the histograms of staleness (the sum of the smaller parts: 1 for equal ones), the overlap of the real one
with as many independent draws from it, beyond which no simulation gets, and the losses. Ranks sleep in place of long
computations, so that they need no cores of their own. The second form simulates many workers, and prints
the seconds that this took. The third one measures what the record of a call costs its rank.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.parameterserver.rules import prepare
from torchmpi.parameterserver.runs.observed_run import RunObserver

METHODS: dict[str, Callable[..., ps.Update]] = {
    "downpour": lambda net, **options: ps.DownpourUpdate(net, lr=0.2 / mpi.size(), **options),
    "easgd": lambda net, **options: ps.EASGDUpdate(net, beta=0.9, **options),
}
INPUTS, HIDDEN, CLASSES, SAMPLES = 64, 32, 10, 1797
"""As of scikit-learn's digits."""


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of ten random patterns."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    patterns = torch.randn(CLASSES, INPUTS, generator=generator)
    return patterns[labels] + 2 * torch.randn(SAMPLES, INPUTS, generator=generator), labels


def train(method: str, period: int, steps: int, sleeps: float) -> float:
    """Train on a part of the samples; return the loss of the values of the servers on all of them."""
    images, labels = samples()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    update = METHODS[method](net, update_frequency=period, init_delay=0)
    update.start()
    own, drawn = torch.Generator().manual_seed(mpi.rank()), random.Random(mpi.rank())
    for _ in range(steps):
        chosen = torch.randint(SAMPLES, (16,), generator=own)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        if sleeps:
            time.sleep(drawn.lognormvariate(0, 0.4) * sleeps)
        update.update()
        optimizer.step()
    update.finish()
    mpi.barrier()
    update.pull()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(net(images), labels))
    update.free()
    return loss


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Return the common part of two histograms.

    >>> overlap(np.array([1, 1]), np.array([4]))
    0.5
    """
    length = max(len(first), len(second))
    parts = [np.pad(each, (0, length - len(each))) / max(each.sum(), 1) for each in (first, second)]
    return float(np.minimum(*parts).sum())


def drawn_like(counts: np.ndarray) -> np.ndarray:
    """Return a histogram of as many draws.

    >>> drawn_like(np.array([0, 5]))
    array([0, 5])
    """
    return np.random.default_rng(0).multinomial(counts.sum(), counts / max(counts.sum(), 1))


def compare(methods: list[str], periods: list[int], steps: int, sleeps: float) -> None:
    """Train on the ranks of this job and on simulated workers, and print how they differ."""
    measured: dict[tuple[str, int], tuple[ps.RunRecord, float]] = {}
    with mpi.started():
        rank, size = mpi.rank(), mpi.size()
        folder = Path(mpi.broadcast_object(tempfile.mkdtemp() if rank == 0 else ""))
        for method, period in product(methods, periods):
            with ps.record(folder / "run.npz"):
                loss = train(method, period, steps, sleeps)
            measured[method, period] = ps.read_run(folder / "run.npz"), loss
            mpi.barrier()
        if rank == 0:
            (folder / "run.npz").unlink()
            folder.rmdir()
    if rank:
        return
    print(f"{size} ranks, {steps} steps")
    print(f"{'method':>9} {'period':>6} {'times':>9} {'overlap':>8} {'of draws':>8} {'staleness: real':>16} "
          f"{'simulated':>9} {'loss: real':>10} {'simulated':>9} {'difference':>10}")  # fmt: skip
    for (method, period), (record, loss) in measured.items():
        every = np.concatenate([record.compute_times(rank) for rank in range(size)])
        times: dict[str, Any] = {
            "repeated": record,
            "drawn": lambda worker, step, draw, every=every: draw.choice(every),
        }
        for name, compute in times.items():
            network = ps.SimulatedNetwork.of(record)
            run = ps.simulate(partial(train, method, period, steps, 0.0), size, compute=compute, network=network)
            real = record.staleness()
            common, limit = overlap(real, run.record.staleness()), overlap(real, drawn_like(real))
            means = [float(each.updates["staleness"].mean()) for each in (record, run.record)]
            print(f"{method:>9} {period:>6} {name:>9} {common:8.3f} {limit:8.3f} {means[0]:16.2f} {means[1]:9.2f} "
                  f"{loss:10.4f} {run.results[0]:9.4f} {abs(run.results[0] / loss - 1):10.1%}", flush=True)  # fmt: skip


def measure(num_workers: int, methods: list[str], periods: list[int], steps: int) -> None:
    """Simulate many workers, and print how long that takes."""
    torch.set_num_threads(1)  # else each worker has a pool of threads, which short steps do not use
    for method, period in product(methods, periods):
        begin = time.perf_counter()
        work = partial(train, method, period, steps, 0.0)
        run = ps.simulate(work, num_workers, compute=lambda worker, step, draw: draw.lognormal(-4, 0.4))
        seconds = time.perf_counter() - begin
        print(f"{method:>9} {period:>6}: {num_workers} workers, {steps} steps each: {seconds:.1f} s, simulated "
              f"{run.seconds:.2f} s, loss {run.results[0]:.4f}", flush=True)  # fmt: skip


def print_cost(num_batches: int = 300, batch: int = 200) -> None:
    """Print the nanoseconds of the record of a send."""
    observer, values = RunObserver(), torch.zeros(8)
    server: Any = SimpleNamespace(world_rank=0, label="parameters 0", sent_version=1.0, sent_staleness=1.0)
    request: Any = SimpleNamespace(server=server, rule=prepare("add", torch.float32))
    times = []
    for _ in range(num_batches):
        begin = time.perf_counter_ns()
        for _ in range(batch):
            observer.begin(request, values)()
        times.append((time.perf_counter_ns() - begin) / batch)
        observer.events.clear()
    print(f"the record of a send: {statistics.median(times):.0f} ns, at least {min(times):.0f} ns")


def main() -> None:
    """Compare, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="only simulate as many workers")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--periods", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sleeps", type=float, default=0.02, help="median seconds of a step on ranks (default 0.02)")
    parser.add_argument("--cost", action="store_true", help="only measure the record of a call")
    options = parser.parse_args()
    if options.cost:
        print_cost()
    elif options.workers:
        measure(options.workers, options.methods, options.periods, options.steps)
    else:
        compare(options.methods, options.periods, options.steps, options.sleeps)


if __name__ == "__main__":
    main()
