"""Timing of contestants against each other: short batches, in alternating order, medians over batches of all ranks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from ...launch import mpi_library
from .bench_job import BenchJob

BATCH_SECONDS = 3e-3
MIN_BATCHES, MAX_BATCHES = 7, 201
_MOST_CALLS = 20_000


@dataclasses.dataclass(frozen=True)
class TimingSummary:
    """Median and quartiles of the times of one contestant, per call, in microseconds."""

    median_us: float
    low_us: float
    high_us: float
    num_batches: int
    calls_per_batch: int

    @property
    def spread(self) -> float:
        """Return half the distance of the quartiles, relative to the median."""
        return (self.high_us - self.low_us) / 2 / self.median_us if self.median_us else 0.0


def summarize(batch_seconds: Sequence[float], calls_per_batch: int) -> TimingSummary:
    """Summarize the durations of batches of equal length.

    >>> summarize([3e-6, 1e-6, 2e-6], calls_per_batch=1)
    TimingSummary(median_us=2.0, low_us=1.5, high_us=2.5, num_batches=3, calls_per_batch=1)
    """
    per_call = [seconds / calls_per_batch * 1e6 for seconds in batch_seconds]
    quartiles = statistics.quantiles(per_call * (2 if len(per_call) == 1 else 1), n=4, method="inclusive")
    low, middle, high = (round(quartile, 3) for quartile in quartiles)
    return TimingSummary(middle, low, high, len(per_call), calls_per_batch)


def apart(before: TimingSummary, after: TimingSummary) -> bool:
    """Return whether the quartiles of two summaries do not overlap."""
    return before.high_us < after.low_us or after.high_us < before.low_us


class TimedCall(NamedTuple):
    """A contestant with bound arguments, ready to be timed."""

    name: str
    calls: tuple[Callable[[], object], ...]
    """Called in rotation: one for each root, if the collective has a root."""
    touch: Callable[[], object]
    """Writes the buffers before each batch; not timed."""
    timed: Callable[[int], float] | None = None
    """If given, called instead of `calls` with a number of calls; makes them elsewhere, and returns the seconds."""


class BatchInterval(NamedTuple):
    """Begin and end of a batch on one rank."""

    begin: float
    end: float


def measure_calls(
    contestants: Sequence[TimedCall],
    comm: Any,
    *,
    seconds: float,
    one_clock: bool,
    batch_seconds: float = BATCH_SECONDS,
) -> list[TimingSummary]:
    """Time all contestants for about the given time, with at least seven batches each. Collective over `comm`.

    Set `one_clock` if all ranks are on one host. Between batches other contestants use the caches.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        entries = [
            (contestant, _calls_per_batch(contestant, comm, one_clock, batch_seconds)) for contestant in contestants
        ]
        begin = time.perf_counter()
        for contestant, length in entries:  # a warm-up that also measures the duration of a round
            _batch(contestant, length, comm)
        (round_seconds,) = _largest([time.perf_counter() - begin], comm)
        batches: list[list[BatchInterval]] = [[] for _ in entries]
        for number in range(num_rounds(seconds, round_seconds)):
            in_order = list(zip(entries, batches, strict=True))
            for (contestant, length), found in in_order if number % 2 == 0 else reversed(in_order):
                found.append(_batch(contestant, length, comm))
    finally:
        if was_enabled:
            gc.enable()
    pairs = zip(batches, entries, strict=True)
    return [summarize(_durations(found, comm, one_clock), length) for found, (_, length) in pairs]


def timed_rows(
    job: BenchJob,
    timed: Sequence[TimedCall],
    why_not: Mapping[str, str | None],
    seconds: float,
    head: Mapping[str, Any],
    batch_seconds: float = BATCH_SECONDS,
) -> list[dict[str, Any]]:
    """Time calls as :func:`measure_calls`; return rows of times, then of the reasons why contestants have none."""
    summaries = measure_calls(timed, job.comm, seconds=seconds, one_clock=job.one_clock, batch_seconds=batch_seconds)
    found = {call.name: dataclasses.asdict(summary) for call, summary in zip(timed, summaries, strict=True)}
    found |= {name: {"why_not": reason} for name, reason in why_not.items() if reason is not None}
    return [{**head, "contestant": name, **figures} for name, figures in found.items()]


def num_rounds(seconds: float, round_seconds: float) -> int:
    """Return the number of rounds that fit into the time, within bounds.

    >>> num_rounds(1.0, 0.5), num_rounds(10.0, 0.5), num_rounds(1e6, 0.5)
    (7, 20, 201)
    """
    return max(MIN_BATCHES, min(MAX_BATCHES, int(seconds / max(round_seconds, 1e-9))))


def _batch(contestant: TimedCall, length: int, comm: Any) -> BatchInterval:
    contestant.touch()
    # islice and cycle run in C, so the loop adds very little time between two calls.
    calls = itertools.islice(itertools.cycle(contestant.calls), length)
    comm.Barrier()
    if contestant.timed is not None:
        return BatchInterval(0.0, contestant.timed(length))
    begin = time.perf_counter()
    for call in calls:
        call()
    interval = BatchInterval(begin, time.perf_counter())
    comm.Barrier()  # a rank that ends first must not write its next buffers on a core that another rank still needs
    return interval


def _calls_per_batch(contestant: TimedCall, comm: Any, one_clock: bool, seconds: float) -> int:
    """Return the number of calls in a batch of about `seconds`, a multiple of the number of roots."""
    num_roots = length = len(contestant.calls)
    _batch(contestant, length, comm)
    while True:
        (duration,) = _durations([_batch(contestant, length, comm)], comm, one_clock)
        if duration >= seconds / 4 or length >= _MOST_CALLS:
            break
        length *= 4
    most = math.ceil(_MOST_CALLS / num_roots)
    return num_roots * max(1, min(most, round(seconds / (duration / length) / num_roots)))


def _durations(spans: Sequence[BatchInterval], comm: Any, one_clock: bool) -> list[float]:
    """Return the duration of each batch, from the first rank that began to the last that ended.

    The duration on one rank alone would be too short where several ranks share a core and some begin late. On several
    hosts, whose clocks differ, the duration on the slowest rank is used.
    """
    if not one_clock:
        return _largest([span.end - span.begin for span in spans], comm)
    numbers = _largest([span.end for span in spans] + [-span.begin for span in spans], comm)
    return [end + begin for end, begin in zip(numbers[: len(spans)], numbers[len(spans) :], strict=True)]


def _largest(times: Sequence[float], comm: Any) -> list[float]:
    mine, largest = numpy.array(times), numpy.empty(len(times))
    comm.Allreduce(mine, largest, op=mpi_library.load().MAX)
    return [float(value) for value in largest]


def timed_on(
    job: BenchJob, calls: Sequence[Callable[[], Any]], *, is_launch: bool = False
) -> Callable[[int], float] | None:
    """Return a function that times a number of calls on the device of the job; None on the CPU.

    On a device, a call returns when its work is queued, so a batch ends when the device has finished. With
    `is_launch` the calls return handles, and the time ends when the last call has returned.
    """
    if job.device.type == "cpu":
        return None

    def timed(number: int) -> float:
        torch.cuda.synchronize(job.device)  # the buffers have been written
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
