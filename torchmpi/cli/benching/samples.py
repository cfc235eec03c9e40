"""Figures from batches: medians and quartiles."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Sample:
    """The times of one contestant, per call, in microseconds."""

    median_us: float
    low_us: float
    """First quartile."""
    high_us: float
    """Third quartile."""
    num_batches: int
    calls_per_batch: int

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        return (self.high_us - self.low_us) / 2 / self.median_us if self.median_us else 0.0


def summarise(batch_seconds: Sequence[float], calls_per_batch: int) -> Sample:
    """The figures of batches of equal length.

    >>> summarise([3e-6, 1e-6, 2e-6], calls_per_batch=1)
    Sample(median_us=2.0, low_us=1.5, high_us=2.5, num_batches=3, calls_per_batch=1)
    """
    per_call = sorted(seconds / calls_per_batch * 1e6 for seconds in batch_seconds)
    if len(per_call) == 1:
        low = middle = high = per_call[0]
    else:
        low, middle, high = statistics.quantiles(per_call, n=4, method="inclusive")
    return Sample(round(middle, 3), round(low, 3), round(high, 3), len(per_call), calls_per_batch)


def apart(before: Sample, after: Sample) -> bool:
    """Whether the quartiles of two samples do not overlap.

    >>> apart(Sample(2, 1, 3, 7, 1), Sample(4, 2.5, 5, 7, 1)), apart(Sample(2, 1, 3, 7, 1), Sample(5, 4, 6, 7, 1))
    (False, True)
    """
    return before.high_us < after.low_us or after.high_us < before.low_us
