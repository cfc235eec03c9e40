"""Times on a device: calls return when their work is queued, so a batch ends when the device has finished."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .job import Job

Timed = Callable[[int], float]


def timed_on(job: Job, calls: Sequence[Callable[[], Any]], *, is_launch: bool = False) -> Timed | None:
    """What times so many of the calls, made in turn, on the job's device; None on the CPU, where the clock does that.

    Of launches only the time counts until the last call has returned; they return handles.
    """
    if job.device.type == "cpu":
        return None

    def timed(number: int) -> float:
        torch.cuda.synchronize(job.device)  # what has written the buffers
        job.comm.Barrier()
        begin = time.perf_counter()
        results = [call() for call in itertools.islice(itertools.cycle(calls), number)]
        if not is_launch:
            torch.cuda.synchronize(job.device)
        seconds = time.perf_counter() - begin
        for handle in results if is_launch else ():
            handle.wait()
        torch.cuda.synchronize(job.device)
        return seconds

    return timed
