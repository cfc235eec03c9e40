"""Comparison of recorded calls with the times that ``torchmpi bench`` has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from .step_times import CallSite

_SAME_EVERYWHERE = {name: name for name in ("allreduce", "broadcast", "reduce")} | {"allreduce_many": "allreduce"}
"""Collectives whose tensor has one size on all ranks, which is also the size that the benchmark states."""
_CONTESTANT, _MODE = "auto", "sync"


class BenchTimes:
    """The times of a file of ``torchmpi bench --json``, of the default choice of backends, by size.

    >>> row = {"ranks": 2, "verb": "allreduce", "dtype": "float32", "mode": "sync", "contestant": "auto"}
    >>> times = BenchTimes([row | {"bytes": 1000, "median_us": 10.0}, row | {"bytes": 3000, "median_us": 20.0}])
    >>> [round(1e6 * times.seconds(("allreduce", 2, "float32"), size), 3) for size in (10, 2000, 6000)]
    [10.0, 15.0, 40.0]
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._times: dict[tuple[str, int, str], dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row["contestant"] == _CONTESTANT and row["mode"] == _MODE and "median_us" in row:
                self._times[row["verb"], row["ranks"], row["dtype"]][row["bytes"]] = row["median_us"] / 1e6

    def seconds(self, key: tuple[str, int, str], num_bytes: int) -> float | None:
        """Return the time of a call; `key` has collective, ranks and dtype. None if there is no such measurement.

        Between two sizes it is interpolated; larger tensors move as fast as the largest one, shorter ones take as long
        as the shortest one.
        """
        points = sorted(self._times.get(key, {}).items())
        if not points:
            return None
        (least, shortest), (most, longest) = points[0], points[-1]
        if num_bytes <= least:
            return shortest
        for (low, before), (high, after) in pairwise(points):
            if num_bytes <= high:
                return before + (after - before) * (num_bytes - low) / (high - low)
        return longest * num_bytes / most

    def share(self, site: CallSite) -> float | None:
        """Return the speed of the calls of a line while data move, as a part of that in the benchmark, if known."""
        collective, moving = _SAME_EVERYWHERE.get(site.collective), (site.seconds - site.waiting) / site.num_calls
        if collective is None or moving <= 0:
            return None
        seconds = self.seconds((collective, site.num_ranks, site.dtype), site.num_bytes)
        return None if seconds is None else seconds / moving
