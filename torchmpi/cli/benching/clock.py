"""Times contestants against each other: short batches, both orders, medians over batches of the slowest rank."""

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


def measure(entrants: Sequence[Entrant], comm: Any, *, seconds: float) -> list[Sample]:
    """Time all entrants, in about the time given but with at least seven batches each. Collective over `comm`."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        lengths = [_calls_per_batch(entrant, comm) for entrant in entrants]
        begin = time.perf_counter()
        _round(entrants, lengths, comm)  # to warm up, and to see how long a round takes
        round_seconds = _largest([time.perf_counter() - begin], comm)[0]
        batches: list[list[float]] = [[] for _ in entrants]
        for number in range(num_rounds(seconds, round_seconds)):
            order = range(len(entrants)) if number % 2 == 0 else range(len(entrants) - 1, -1, -1)
            durations = _round([entrants[i] for i in order], [lengths[i] for i in order], comm)
            for index, duration in zip(order, durations, strict=True):
                batches[index].append(duration)
    finally:
        if was_enabled:
            gc.enable()
    return [summarise(_largest(times, comm), length) for times, length in zip(batches, lengths, strict=True)]


def num_rounds(seconds: float, round_seconds: float) -> int:
    """How many rounds fit, within bounds.

    >>> num_rounds(1.0, 0.5), num_rounds(10.0, 0.5), num_rounds(1e6, 0.5)
    (7, 20, 201)
    """
    return max(MIN_BATCHES, min(MAX_BATCHES, int(seconds / max(round_seconds, 1e-9))))


def _round(entrants: Sequence[Entrant], lengths: Sequence[int], comm: Any) -> list[float]:
    return [_batch(entrant, length, comm) for entrant, length in zip(entrants, lengths, strict=True)]


def _batch(entrant: Entrant, length: int, comm: Any) -> float:
    entrant.touch()
    # islice and cycle run in C: between two calls there is next to nothing of the clock's own.
    calls = itertools.islice(itertools.cycle(entrant.calls), length)
    comm.Barrier()
    if entrant.timed is not None:
        return entrant.timed(length)
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def _calls_per_batch(entrant: Entrant, comm: Any) -> int:
    """So many calls that a batch takes about three milliseconds, a multiple of the number of roots."""
    turn = length = len(entrant.calls)
    _batch(entrant, length, comm)
    while True:
        duration = _largest([_batch(entrant, length, comm)], comm)[0]
        if duration >= BATCH_SECONDS / 4 or length >= _MOST_CALLS:
            break
        length *= 4
    return turn * max(1, min(math.ceil(_MOST_CALLS / turn), round(BATCH_SECONDS / (duration / length) / turn)))


def _largest(times: Sequence[float], comm: Any) -> list[float]:
    """Element by element the largest of all ranks, the same everywhere."""
    mine, largest = numpy.array(times), numpy.empty(len(times))
    comm.Allreduce(mine, largest, op=_maximum())
    return [float(value) for value in largest]


def _maximum() -> Any:
    from ... import mpi_library

    return mpi_library.load().MAX
