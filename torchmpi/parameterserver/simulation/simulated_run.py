"""``simulate()``: a training function on many simulated workers in one process, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ... import files
from ...argument_types import checks_types
from ...errors import ArgumentError
from ..runs import observed_run
from ..runs.call_order import RecordedRows
from ..runs.observed_run import RunObserver
from ..runs.run_record import RunRecord, read_run
from .simulated_job import Generators, SimulatedRuntime, WorkerFailure, WorkerTurns, no_job, run_workers
from .simulated_network import SimulatedNetwork
from .simulated_servers import NumberedServing, RepeatedServing, ServedGroup, SimulatedServerContext

__all__ = ["SimulatedRun", "simulate"]

DEFAULT_SECONDS = 0.1
ComputeTimes = float | RunRecord | Callable[[int, int, np.random.Generator], float]
"""Seconds of the computation of a step: a number, those of a record, or a function of worker, step and a generator."""


@dataclass(frozen=True)
class SimulatedRun:
    """What :func:`simulate` returns.

    Args:
        results: What the training function returned, for each worker; None for one that has failed.
        seconds: Simulated time until the last worker ended.
        record: The record of all calls and steps.
        failed: The workers that have failed.

    Example:
        run = ps.simulate(train, 64, compute=0.1)
        print(run.results[0], run.record.text())
    """

    results: list[Any]
    seconds: float
    record: RunRecord
    failed: tuple[int, ...] = ()


class _Simulation(RunObserver):
    """Observes the workers, and lets time pass while they compute."""

    def __init__(
        self,
        turns: WorkerTurns,
        compute: Callable[[int, int], float],
        *,
        failures: Mapping[int, float],
        joins: Mapping[int, float],
        norms: bool,
    ) -> None:
        super().__init__(lambda: round(1e9 * turns.clock), norms=norms)
        self._turns, self._compute, self._failures, self._joins = turns, compute, failures, joins

    def begin_step(self, update: Any, rank: int) -> int:
        """Let the time of a computation pass, and end a worker that fails meanwhile."""
        seconds = self._compute(rank, update.step)
        if not 0 <= seconds < math.inf:
            raise ArgumentError(f"simulate: compute gave {seconds} for step {update.step} of worker {rank}.")
        turns, limit = self._turns, self._failures.get(rank, math.inf)
        turns.sleep(max(0.0, min(seconds, limit - turns.clock)))
        if turns.clock >= limit:
            raise WorkerFailure
        return self.now()

    def begin_training(self, update: Any, rank: int) -> None:
        """Let a worker that joins later wait, and begin with the values that the servers have then."""
        delay = self._joins.get(rank, 0.0) - self._turns.clock
        if delay > 0:
            if update.clock is not None:
                raise ArgumentError(
                    f"simulate: worker {rank} joins later, but with a finite max_staleness the others wait for it. Use "
                    "max_staleness=math.inf."
                )
            self._turns.sleep(delay)
            update.pull()


@checks_types
def simulate(
    train: Callable[[], Any],
    num_workers: int,
    *,
    compute: ComputeTimes = DEFAULT_SECONDS,
    network: SimulatedNetwork | None = None,
    seed: int = 0,
    failures: Mapping[int, float] | None = None,
    joins: Mapping[int, float] | None = None,
    record: files.StrPath | None = None,
    norms: bool = False,
    ordered: bool = False,
    replay: files.StrPath | None = None,
) -> SimulatedRun:
    """Run a training function on simulated workers in this process, in simulated time.

    Each worker calls ``train()``, in which ``mpi.rank()``, ``mpi.size()``, the collectives on CPU tensors, servers and
    updates work as on a rank, but time is simulated: it passes in each ``update()`` of an :class:`Update`, for the
    computation of the step, and in calls of servers. Gradients and rules are computed really. One worker runs at a
    time, and a run with the same arguments gives the same bits. Workers have own global generators of random numbers,
    and share all other global variables of the program.

    Args:
        train: The training function, without arguments. It does not call ``mpi.start()``.
        num_workers: The number of workers; some hundred are possible.
        compute: Seconds of a step: a number; or ``compute(worker, step, random)``, with a
            :class:`numpy.random.Generator` of the worker; or a record, whose times are repeated, by worker w those of
            rank w modulo the number of ranks.
        network: Latency and bandwidth; by default about those within a host.
        seed: Of the generators of `compute`, and of Python and numpy in `train`.
        failures: When workers fail, in seconds: they end in their next step, and no other worker waits for them in a
            :class:`Clock`. No collective may follow.
        joins: When workers join that are late: after the servers have been created (call ``update.start()`` before the
            loop), they wait until then, and fetch the values of that time.
        record: File for the record of the run.
        norms: Also record the norms of sent values.
        ordered: Also record the order of all calls, for :func:`replay`.
        replay: A record of ranks or workers, with ``ordered=True``, whose order of calls is repeated: see
            :func:`replay`. Only the times follow from the other arguments.

    Returns:
        The results of all workers, the simulated time, and the record.

    Raises:
        AlreadyStartedError: This process is a rank of a job.
        ArgumentError: A worker or a number is out of range.
        TorchMPIError: The workers wait for each other.

    Example:
        def train():
            torch.manual_seed(mpi.rank())
            update = ps.DownpourUpdate(model := Net(), lr=0.1 / mpi.size(), init_delay=0)
            ...

        run = ps.simulate(train, 64, compute=lambda worker, step, random: random.lognormal(-2, 0.3))
    """
    failures, joins = failures or {}, joins or {}
    if not num_workers > 0:
        raise ArgumentError(f"simulate: num_workers={num_workers}: expected a number from 1.")
    for name, times in (("failures", failures), ("joins", joins)):
        for worker, seconds in times.items():
            if not (0 <= worker < num_workers and seconds >= 0):
                raise ArgumentError(
                    f"simulate: {name}={{{worker}: {seconds}}}: expected workers from 0 to {num_workers - 1}, and "
                    "seconds from 0."
                )
    with no_job():
        rows = None if replay is None else RecordedRows(read_run(replay), replay, num_workers, "simulate")
        job = _Job(train, num_workers, network or SimulatedNetwork(), seed, rows)
        drawn = _compute_times(compute, [np.random.default_rng([seed, rank]) for rank in range(num_workers)])
        observer = _Simulation(job.turns, drawn, failures=failures, joins=joins, norms=norms)
        observer.order = NumberedServing() if job.order is None and ordered else job.order
        observed_run.observe(observer)
        try:
            functions = [partial(job.work, rank) for rank in range(num_workers)]
            results = run_workers(job.turns, functions, job.missing, job.failed)
        finally:
            observed_run.observe(None)
            job.close()
    if rows is not None:
        for rank in range(num_workers):
            rows.check_all_taken(rank)
    found = RunRecord.of(observer.events, num_ranks=num_workers, simulated=True)
    if record is not None:
        found.save(record)
    return SimulatedRun(results, job.seconds, found, tuple(sorted(job.failed)))


def _compute_times(compute: ComputeTimes, generators: list[np.random.Generator]) -> Callable[[int, int], float]:
    if isinstance(compute, RunRecord):
        times = [compute.compute_times(rank) for rank in range(compute.num_ranks)]
        few = [rank for rank, own in enumerate(times) if not len(own)]
        if few:
            raise ArgumentError(f"simulate: compute={compute}: rank {few[0]} has taken less than two steps.")
        # The first time is that of the second step: a first step compiles and creates servers.
        return lambda worker, step: float((own := times[worker % len(times)])[max(step - 1, 0) % len(own)])
    if not callable(compute):
        return lambda worker, step: float(compute)
    return lambda worker, step: float(compute(worker, step, generators[worker]))


class _Job:
    """The workers of a simulation."""

    def __init__(
        self, train: Callable[[], Any], size: int, network: SimulatedNetwork, seed: int, rows: RecordedRows | None
    ) -> None:
        self.turns = WorkerTurns(torch.get_num_threads() if rows is None else int(rows.record.about["threads"]))
        self.seconds = 0.0
        self.failed: list[int] = []
        self._train, self._seed = train, seed
        self._served = ServedGroup(self.turns, network)
        self.order = self._served.repeated = None if rows is None else RepeatedServing(rows, self.turns)
        self._workers: list[SimulatedRuntime] = []
        self._size = size

    def missing(self) -> str:
        """Return which call of a repeated run no worker has made; '' if no run is repeated."""
        return "" if self.order is None else self.order.missing()

    def work(self, rank: int) -> Any:
        """Run a worker in its thread."""
        worker = SimulatedRuntime(self.turns, rank, self._size, Generators.seeded(self._seed, rank))
        self._workers.append(worker)
        SimulatedServerContext(worker.world, self._served)
        self.turns.enter(worker)
        try:
            result = self._train()
        except WorkerFailure:
            self.failed.append(rank)
            for update in list(worker.context.updates.values()):
                update._abort()  # leaves its clock
            result = None
        self.seconds = max(self.seconds, self.turns.clock)
        return result

    def close(self) -> None:
        """Unmap the servers of all workers."""
        for worker in self._workers:
            for attachment in worker.world.attachments:
                attachment.close()
