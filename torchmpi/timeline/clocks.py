"""Alignment of the clocks of hosts: the offset against the clock of rank 0 over time, with an error bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # it takes milliseconds of each import of torchmpi
    import numpy.typing as npt

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_INVERSE_DRIFT = 2000
_DRIFT_BOUND = 1 / _INVERSE_DRIFT
"""The most by which the rates of two clocks are assumed to differ."""

_INFINITE = np.int64(1 << 62)


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
    """Converts local times of a rank to the clock of rank 0, for arrays and for single times.

    Between two samples the offset is interpolated. The rate of the clock may change there, within its bound, so the
    true offset differs from the straight line by at most half the bound times the distance of the samples. The error of
    a segment is this difference plus the larger error of its two samples. A sample is left out if its error is larger
    than that of a neighbor, extended by the drift to its time. Before the first sample and after the last one the
    offset is constant, and the error grows.

    >>> clock = AlignedClock([ClockSample(0, 100, 5), ClockSample(1000000, 110, 7), ClockSample(2000000, 0, 900)])
    >>> clock.aligned([0, 500000]).tolist(), clock.error([500000, 5000000]).tolist()
    ([100, 500105], [259, 2009])
    """

    def __init__(self, samples: Iterable[ClockSample]) -> None:
        found = np.array(sorted(samples), np.int64).reshape(-1, 3)
        local, offset, error = found[~_is_beaten(found)].T
        self._times, self._offsets = local, offset
        self._is_exact = not error.any()  # the clock is that of the reference
        self._ends = np.where(error > 0, error * (1 + _DRIFT_BOUND) + 1, 0)  # the offset changes during an exchange
        self._segments = np.maximum(self._ends[:-1], self._ends[1:]) + _DRIFT_BOUND / 2 * np.diff(local)

    def aligned(self, local: npt.ArrayLike) -> IntArray:
        """Return the time of the reference at local times."""
        times, first = np.asarray(local, np.int64), self._times[0]
        more = np.interp(times - first, self._times - first, self._offsets - self._offsets[0])
        found: IntArray = times + self._offsets[0] + np.rint(more).astype(np.int64)
        return found

    def error(self, local: npt.ArrayLike) -> IntArray:
        """Return the bound of the error of :meth:`aligned`."""
        times = np.asarray(local, np.int64)
        if self._is_exact:
            return np.zeros_like(times)
        before, after = self._times[0] - times, times - self._times[-1]
        errors = np.concatenate((self._ends[:1], self._segments, self._ends[-1:]))
        inside = errors[np.searchsorted(self._times, times)]
        beyond = np.maximum(np.maximum(before, after), 0)
        found: IntArray = np.ceil(inside + _DRIFT_BOUND * beyond).astype(np.int64)
        return found

    def largest_error(self, first: int, last: int) -> int:
        between = self._times[(first < self._times) & (self._times < last)]
        return int(self.error(np.concatenate(([first], between, [last]))).max())


def _is_beaten(samples: IntArray) -> npt.NDArray[np.bool_]:
    """Return for each sorted sample whether another sample, with the drift to its time, has a smaller error."""
    # In integers: rounded, each of two equal samples could have a smaller error than the other one.
    local, error = samples[:, 0] - samples[:1, 0], samples[:, 2] * _INVERSE_DRIFT
    before = np.minimum.accumulate(np.append(_INFINITE, error - local)[:-1]) + local
    later = np.append((error + local)[1:], _INFINITE)[::-1]
    after = np.minimum.accumulate(later)[::-1] - local
    beaten: npt.NDArray[np.bool_] = (before <= error) | (after < error)
    return beaten
