"""Inside a job: very many calls, and what each rank holds before and after them."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from ... import collectives
from .job import Job, job_facts
from .usage import usage

_SLICES = 10
_WARM_UP_CALLS = 1000
_PARTS = (("4 B", 1), ("1 MB", 1 << 18))


def measure_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """One row for each rank and size of message. Collective."""
    rows: list[dict[str, Any]] = []
    for (part, numel), num_calls in zip(_PARTS, (options.small, options.large), strict=True):
        rows += _run(job, part, numel, num_calls)
    return {"facts": job_facts(job.comm), "rows": rows}


def _run(job: Job, part: str, numel: int, num_calls: int) -> list[dict[str, Any]]:
    calls = itertools.cycle(_calls(numel, job.size))
    _make(calls, min(_WARM_UP_CALLS, num_calls))
    before, begin = usage(), time.monotonic()
    for number in range(_SLICES):
        job.show(f"{part}: {number * num_calls // _SLICES} of {num_calls} calls")
        _make(calls, (number + 1) * num_calls // _SLICES - number * num_calls // _SLICES)
    seconds = time.monotonic() - begin
    after = usage()
    row = {"ranks": job.size, "rank": job.rank, "part": part, "calls": num_calls, "seconds": round(seconds, 3)}
    return list(job.comm.allgather(row | {f"{name}_growth": after[name] - before[name] for name in after}))


def _make(calls: itertools.cycle[Callable[[], object]], number: int) -> None:
    for call in itertools.islice(calls, number):
        call()


def _calls(numel: int, size: int) -> list[Callable[[], object]]:
    """Several verbs in turn, in place and not, one of them asynchronous; results of a fresh tensor among them."""
    tensor = torch.zeros(numel)
    whole = torch.zeros(max(size, numel // size * size))
    return [
        lambda: collectives.allreduce(tensor),
        lambda: collectives.broadcast(tensor),
        lambda: collectives.allgather(tensor[: max(1, numel // size)]),
        lambda: collectives.reduce_scatter(whole),
        lambda: collectives.allreduce_async(tensor).wait(),
    ]
