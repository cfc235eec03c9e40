"""Times contestants against each other: short batches, both orders, medians over batches of all ranks together."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from .samples import Sample, summarise

BATCH_SECONDS = 3e-3
MIN_BATCHES, MAX_BATCHES = 7, 201
_MOST_CALLS = 20_000


class Entrant(NamedTuple):
    """Something to time."""

    name: str
    calls: tuple[Callable[[], object], ...]
    """Made in turn: one for each root, where there is one."""
    touch: Callable[[], object]
    """Writes the buffers, before each batch, outside of the time."""
    timed: Callable[[int], float] | None = None
    """For what happens in another process: makes so many calls there, instead of `calls`, and returns the seconds."""


class Span(NamedTuple):
    """When a rank began with a batch, and when it had done its part."""

    begin: float
    end: float


def measure(entrants: Sequence[Entrant], comm: Any, *, seconds: float, one_clock: bool) -> list[Sample]:
    """Time all entrants, in about the time given but with at least seven batches each. Collective over `comm`.

    `one_clock`: all ranks are on one host.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        lengths = [_calls_per_batch(entrant, comm, one_clock) for entrant in entrants]
        begin = time.perf_counter()
        _round(entrants, lengths, comm)  # to warm up, and to see how long a round takes
        round_seconds = _largest([time.perf_counter() - begin], comm)[0]
        batches: list[list[Span]] = [[] for _ in entrants]
        for number in range(num_rounds(seconds, round_seconds)):
            order = range(len(entrants)) if number % 2 == 0 else range(len(entrants) - 1, -1, -1)
            spans = _round([entrants[i] for i in order], [lengths[i] for i in order], comm)
            for index, span in zip(order, spans, strict=True):
                batches[index].append(span)
    finally:
        if was_enabled:
            gc.enable()
    return [
        summarise(_durations(spans, comm, one_clock), length) for spans, length in zip(batches, lengths, strict=True)
    ]


def num_rounds(seconds: float, round_seconds: float) -> int:
    """How many rounds fit, within bounds.

    >>> num_rounds(1.0, 0.5), num_rounds(10.0, 0.5), num_rounds(1e6, 0.5)
    (7, 20, 201)
    """
    return max(MIN_BATCHES, min(MAX_BATCHES, int(seconds / max(round_seconds, 1e-9))))


def _round(entrants: Sequence[Entrant], lengths: Sequence[int], comm: Any) -> list[Span]:
    return [_batch(entrant, length, comm) for entrant, length in zip(entrants, lengths, strict=True)]


def _batch(entrant: Entrant, length: int, comm: Any) -> Span:
    entrant.touch()
    # islice and cycle run in C: between two calls there is next to nothing of the clock's own.
    calls = itertools.islice(itertools.cycle(entrant.calls), length)
    comm.Barrier()
    if entrant.timed is not None:
        return Span(0.0, entrant.timed(length))
    begin = time.perf_counter()
    for call in calls:
        call()
    span = Span(begin, time.perf_counter())
    comm.Barrier()  # who is done first must not write the next buffers on a core that another still needs for this one
    return span


def _calls_per_batch(entrant: Entrant, comm: Any, one_clock: bool) -> int:
    """So many calls that a batch takes about three milliseconds, a multiple of the number of roots."""
    turn = length = len(entrant.calls)
    _batch(entrant, length, comm)
    while True:
        duration = _durations([_batch(entrant, length, comm)], comm, one_clock)[0]
        if duration >= BATCH_SECONDS / 4 or length >= _MOST_CALLS:
            break
        length *= 4
    return turn * max(1, min(math.ceil(_MOST_CALLS / turn), round(BATCH_SECONDS / (duration / length) / turn)))


def _durations(spans: Sequence[Span], comm: Any, one_clock: bool) -> list[float]:
    """How long each batch took, from the first rank that began to the last that ended.

    Where several ranks share a core, some begin late, and those that wait for nobody end as late. Between hosts, whose
    clocks differ, the slowest rank counts.
    """
    if not one_clock:
        return _largest([span.end - span.begin for span in spans], comm)
    numbers = _largest([span.end for span in spans] + [-span.begin for span in spans], comm)
    return [end + begin for end, begin in zip(numbers[: len(spans)], numbers[len(spans) :], strict=True)]


def _largest(times: Sequence[float], comm: Any) -> list[float]:
    """Element by element the largest of all ranks, the same everywhere."""
    mine, largest = numpy.array(times), numpy.empty(len(times))
    comm.Allreduce(mine, largest, op=_maximum())
    return [float(value) for value in largest]


def _maximum() -> Any:
    from ...session import mpi_library

    return mpi_library.load().MAX
