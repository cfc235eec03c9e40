"""Alignment of the clocks of hosts: offset and drift against the clock of rank 0, with an error bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_DRIFT_BOUND = 100e-6
"""Largest drift of the clock of a computer, for times that no later measurement bounds: 100 ppm."""


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
