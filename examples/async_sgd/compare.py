"""Compare sequential SGD, allreduce, Downpour, EASGD, EAMSGD, LocalSGD and DiLoCo at equally many samples.

Methods that communicate once per period are run with several periods. Test error against samples, wall time and bytes
sent is written to a table, plots, and a file with all curves.

    mpirun -n 4 python examples/async_sgd/compare.py
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from methods import METHODS
from options import Plan, make_plans, parse_options
from plots import draw
from report import Point, Run, best_rates, save
from task import BATCH_SIZE, Dataset, batches, load, make_network, test_error, validation
from torch import Tensor

import torchmpi as mpi
import torchmpi.parameterserver as ps


class Snapshot(NamedTuple):
    """State of a run, tested afterwards."""

    num_steps: int
    seconds: float
    megabytes: float
    center: Tensor


def train(plan: Plan, data: Dataset, num_steps: int, interval: int, slow: float) -> Run:
    """One run of `num_steps` on each rank; its curve has a point for every `interval` steps of rank 0.

    The last rank sleeps for `slow` seconds after each step.
    """
    # Sequential training: rank 0 takes the steps of all ranks, while the others wait.
    is_alone = plan.method == "sequential"
    rank, size = (0, 1) if is_alone else (mpi.rank(), mpi.size())
    share = mpi.size() if is_alone else 1
    network = make_network(data.num_inputs, plan.seed)
    trainer = METHODS[plan.method](network, lr=plan.lr, period=plan.period)
    source = batches(data.train.part(rank, size), seed=1000 * plan.seed + rank)
    snapshots: list[Snapshot] = []

    def note(step: int, seconds: float) -> None:
        snapshots.append(Snapshot(step * size, seconds, trainer.bytes_sent / 1e6, trainer.center()))

    mpi.barrier()
    begin = time.perf_counter()
    for step in range(num_steps * share if mpi.rank() < size else 0):
        if mpi.rank() == 0 and step and step % (interval * share) == 0:
            note(step, time.perf_counter() - begin)
        trainer.step(*next(source))
        if slow and 0 < rank == size - 1:
            time.sleep(slow)
    trainer.finish()
    seconds = mpi.allreduce(time.perf_counter() - begin, op="max")  # the end of the last rank
    if mpi.rank() == 0:
        note(num_steps * share, seconds)
    mpi.barrier()
    ps.free_all()
    curve = [
        Point(shot.num_steps * BATCH_SIZE, shot.seconds, shot.megabytes, test_error(network, shot.center, data.test))
        for shot in snapshots
    ]
    return Run(plan.method, plan.period, plan.lr, plan.seed, trainer.staleness, curve)


def describe(run: Run) -> str:
    end = run.curve[-1]
    return (
        f"{run.method:10s} period {run.period or '-':>2}  lr {run.lr:<5g} seed {run.seed}: "
        f"error {100 * end.error:5.2f} %, {end.seconds:5.2f} s, {end.megabytes:6.2f} MB"
    )


def main() -> None:
    options = parse_options(__doc__)
    mpi.start(with_cuda=False)

    def say(text: str) -> None:
        if mpi.rank() == 0:
            print(text, flush=True)

    data = load(options.data)
    data = validation(data) if options.tune else data
    plans = make_plans(options)
    interval = math.lcm(*options.periods)  # a multiple of all periods
    per_step = mpi.size() * BATCH_SIZE
    num_steps = max(1, round(options.epochs * len(data.train) / per_step / interval)) * interval
    say(f"data: {data.origin}")
    say(f"{len(plans)} runs of {num_steps * per_step} samples: {num_steps} steps of {BATCH_SIZE} on each rank")

    if options.slow:
        say(f"rank {mpi.size() - 1} sleeps {options.slow:g} ms after each step")

    train(plans[0], data, interval, interval, 0)  # warm up
    runs, begin = [], time.perf_counter()
    for number, plan in enumerate(plans, 1):
        runs.append(train(plan, data, num_steps, interval, options.slow / 1000))
        left = (time.perf_counter() - begin) / number * (len(plans) - number)
        if mpi.rank() == 0:
            say(f"{number:3d}/{len(plans)}  {describe(runs[-1])}; {left:3.0f} s left")

    if mpi.rank() == 0:
        say(save(runs, options.out))
        if options.tune:
            say("\n".join(f"{method}: {rates}" for method, rates in best_rates(runs).items()))
        try:
            draw(runs, options.out)
        except ImportError:
            say("no plots: matplotlib is not installed (pip install matplotlib)")
        say(f"saved in {options.out.resolve()}")
    mpi.stop()


if __name__ == "__main__":
    main()
