"""Alignment of the clocks of hosts: offset and drift against the clock of rank 0, with an error bound."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

_DRIFT_BOUND = 500e-6
"""The drift assumed after the last measurement: the largest rate by which Linux corrects a clock for NTP."""

_NUM_READINGS = 20


class ClockSample(NamedTuple):
    """One measurement: reference time = local time + offset, within the error. All numbers are nanoseconds."""

    local: int
    offset: int
    error: int


def sample(rounds: Iterable[tuple[int, int, int]]) -> ClockSample:
    """Return the best sample of several rounds of a message to the reference and back.

    Each round is (local time at the send, time of the reference, local time at the receive). The true offset is within
    half the round trip of the middle, so the fastest round has the smallest error.

    >>> sample([(100, 1100, 300), (1000, 1901, 1002)])
    ClockSample(local=1001, offset=900, error=1)
    """
    sent, reference, received = min(rounds, key=lambda times: times[2] - times[0])
    middle = (sent + received) // 2
    return ClockSample(middle, reference - middle, -(-(received - sent) // 2))


class AlignedClock:
    """Converts local times of a rank to the clock of rank 0.

    Between two samples the offset is interpolated, which removes a constant drift. Beyond them it is constant, and the
    error grows by the largest drift that clocks have.

    >>> clock = AlignedClock([ClockSample(0, 100, 5), ClockSample(1000, 110, 7)])
    >>> clock.aligned(500), clock.error(500), round(clock.drift * 1e6)
    (605, 7, 10000)
    """

    def __init__(self, samples: Sequence[ClockSample]) -> None:
        self.samples = sorted(samples)

    @property
    def drift(self) -> float:
        """The seconds that the offset changes in a second; 0 with one sample."""
        first, last = self.samples[0], self.samples[-1]
        return (last.offset - first.offset) / (last.local - first.local) if last.local > first.local else 0.0

    def aligned(self, local: int) -> int:
        """Return the time of the reference at a local time."""
        first, last = self.samples[0], self.samples[-1]
        return local + first.offset + round(self.drift * (min(max(local, first.local), last.local) - first.local))

    def error(self, local: int) -> int:
        """Return the bound of the error of :meth:`aligned`."""
        first, last = self.samples[0], self.samples[-1]
        beyond = max(first.local - local, local - last.local, 0)
        is_exact = all(each.error == 0 for each in self.samples)  # the clock is that of the reference
        return max(each.error for each in self.samples) + (0 if is_exact else round(_DRIFT_BOUND * beyond))


class TickClock:
    """Converts the ticks by which the fast path measures to nanoseconds of the monotonic clock.

    Both are read together at the beginning, and again when later ticks are to be converted.

    >>> clock = TickClock(lambda: 2 * time.monotonic_ns())
    >>> later = 2 * time.monotonic_ns()
    >>> abs(clock.nanoseconds(later) - later // 2) < 1_000_000, clock.nanoseconds(-5)
    (True, 5)
    """

    def __init__(self, read_ticks: Callable[[], int]) -> None:
        self._read_ticks = read_ticks
        self._first = self._last = self._reading()

    def nanoseconds(self, ticks: int) -> int:
        """Return the time of ticks, which are nanoseconds with a minus where a processor has no counter to read."""
        if ticks <= 0:
            return -ticks
        if ticks > self._last[0]:
            self._last = self._reading()
        (begin, nanoseconds), (end, last) = self._first, self._last
        return nanoseconds + (ticks - begin) * (last - nanoseconds) // max(end - begin, 1)

    def _reading(self) -> tuple[int, int]:
        readings = []
        for _ in range(_NUM_READINGS):  # the fastest one, as the thread may lose its core between two clocks
            before, ticks, after = time.monotonic_ns(), self._read_ticks(), time.monotonic_ns()
            readings.append((after - before, ticks, (before + after) // 2))
        return min(readings)[1:]


tick_clock = functools.cache(TickClock)
"""Return the clock of a function that reads ticks, one for the process."""
