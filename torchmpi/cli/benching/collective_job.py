"""Inside a job: verbs by dtypes and sizes, all contestants on the same buffers."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from .arguments import CPU_PEERS, DIST, short_size
from .clock import BATCH_SECONDS, MIN_BATCHES, Entrant, measure
from .contestants import COPY, LAUNCH, Contestant, Copy, our_contestants
from .device_clock import timed_on
from .job import Job, job_facts, split_seconds
from .model import cost
from .peers import TorchDistributed, find_peers, open_group
from .workload import ROOTED, Shape, Workload

Row = dict[str, Any]
_ASSUMED_BYTES_PER_SECOND = 2e9  # to divide the time among sizes; what a slow contestant reaches


def measure_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Rows of figures, or of reasons why there are none, for each cell and contestant. Collective."""
    asynchronous = options.asynchronous
    device = job.device.type
    peers = (*options.peers, "nccl") if device != "cpu" and tuple(options.peers) == CPU_PEERS else options.peers
    contestants: list[Contestant] = [
        *our_contestants(options.backends, options.memory, asynchronous=asynchronous, device=device),
        *_over_torch(job, options),
        *find_peers(peers, job, asynchronous=asynchronous),
        Copy(),
    ]
    cells = [
        Shape(collective, dtype, size)
        for collective in options.verbs
        for dtype in options.dtypes
        for size in options.sizes
    ]
    weights = [_expected_seconds(cell, len(contestants), job.size) for cell in cells]
    rows: list[Row] = []
    end = time.monotonic() + options.seconds
    for index, cell in enumerate(cells):
        job.show(f"{index + 1}/{len(cells)} {cell.collective} {cell.dtype} {short_size(cell.num_bytes)}")
        left = job.comm.bcast(max(0.0, end - time.monotonic()))
        rows += Cell(job, cell).rows(contestants, split_seconds(left, weights, index), asynchronous)
    return {"facts": job_facts(job.comm), "rows": rows}


def _over_torch(job: Job, options: argparse.Namespace) -> list[Contestant]:
    """torch.distributed with our backend, if that was asked for."""
    if DIST not in (options.backends or ()):
        return []
    group = open_group("torchmpi", job.comm, job.resources)
    return [TorchDistributed(DIST, group, asynchronous=options.asynchronous)]


def _expected_seconds(cell: Shape, num_contestants: int, size: int) -> float:
    return num_contestants * MIN_BATCHES * max(BATCH_SECONDS, size * cell.num_bytes / _ASSUMED_BYTES_PER_SECOND)


class Cell:
    """One verb, dtype and size."""

    def __init__(self, job: Job, shape: Shape) -> None:
        self.job, self.shape = job, shape
        self._plain = self._workload(None)

    def _workload(self, contestant: Contestant | None) -> Workload:
        allocate = None if contestant is None else contestant.allocate()
        job = self.job
        return Workload(self.shape, rank=job.rank, size=job.size, allocate=allocate, device=job.device)

    def rows(self, contestants: list[Contestant], seconds: float, asynchronous: bool) -> list[Row]:
        """One row for each contestant: its figures, or why there are none."""
        entrants: list[Entrant] = []
        reasons: dict[str, str] = {}
        for contestant in contestants:
            entrant, reason = self._admit(contestant)
            if entrant is None:
                reasons[contestant.name] = reason
            else:
                entrants.append(entrant)
        samples = measure(entrants, self.job.comm, seconds=seconds, one_clock=self.job.one_clock)
        figures = {entrant.name: sample for entrant, sample in zip(entrants, samples, strict=True)}
        head = self._head(asynchronous)
        return [
            head
            | {"contestant": name}
            | (dataclasses.asdict(figures[name]) if name in figures else {"why_not": reasons[name]})
            for name in (contestant.name for contestant in contestants)
        ]

    def _head(self, asynchronous: bool) -> Row:
        on_host = self.job.device.type == "cpu"
        steps, sent_bytes = cost(self.shape.collective, self.job.size, self._plain.payload_bytes)
        return {
            "ranks": self.job.size,
            "verb": self.shape.collective,
            "dtype": self.shape.dtype,
            "mode": ("async" if asynchronous else "sync") + ("" if on_host else " on cuda"),
            "bytes": self.shape.num_bytes,
            "payload_bytes": self._plain.payload_bytes,
            "model_steps": steps,
            "model_bytes": sent_bytes,
        }

    def _admit(self, contestant: Contestant) -> tuple[Entrant | None, str]:
        """Ready to be timed, once it has given the right result for every root; otherwise the reason."""
        reason = self.job.agreed(contestant.why_not(self.shape.collective, self.shape.dtype))
        if reason is not None:
            return None, reason
        roots = range(self.job.size if self.shape.collective in ROOTED else 1)
        work, calls = self._plain, []
        try:
            if contestant.allocate() is not None:
                work = self._workload(contestant)
            calls = [contestant.bind(work, root) for root in roots]
        except Exception as error:  # a peer may refuse in any way it likes
            reason = f"{type(error).__name__}: {error}"
        reason = self.job.agreed(reason)
        if reason is None:
            reason = self.job.agreed(self._check(contestant, work, calls))
        if reason is not None:
            return None, reason
        timed = timed_on(self.job, calls, is_launch=contestant.name == LAUNCH)
        return Entrant(contestant.name, tuple(calls), work.touch, timed), ""

    def _check(self, contestant: Contestant, work: Workload, calls: list[Any]) -> str | None:
        reason = None
        for root, call in enumerate(calls):  # to the end, whatever happens: the other ranks make all calls
            work.fill()
            try:
                result = call()
                if contestant.name == LAUNCH:
                    result.wait()
                is_right = contestant.name == COPY or work.is_right(root)
                found = None if is_right else f"wrong result on rank {self.job.rank}, root {root}"
            except Exception as error:
                found = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = reason or found
        return reason
