"""Comparison of recorded calls with the times that ``torchmpi bench`` has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from ..collective_specs import spec_of
from .step_times import CallSite

_CONTESTANT, _MODE = "auto", "sync"


class BenchTimes:
    """The times of a file of ``torchmpi bench --json``, of the default choice of backends, by size.

    >>> row = {"ranks": 2, "verb": "allreduce", "dtype": "float32", "mode": "sync", "contestant": "auto"}
    >>> sizes = {1000: 10.0, 3000: 20.0}
    >>> times = BenchTimes(row | {"payload_bytes": size, "median_us": time} for size, time in sizes.items())
    >>> [round(1e6 * times.seconds(("allreduce", 2, "float32"), size), 3) for size in (10, 2000, 6000)]
    [10.0, 15.0, 40.0]
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._times: dict[tuple[str, int, str], dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row["contestant"] == _CONTESTANT and row["mode"] == _MODE and "median_us" in row:
                self._times[row["verb"], row["ranks"], row["dtype"]][row["payload_bytes"]] = row["median_us"] / 1e6

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
        moving = (site.seconds - site.waiting) / site.num_calls
        if moving <= 0:
            return None
        collective = spec_of(site.collective).form_of or site.collective
        num_bytes = payload_bytes(collective, site.num_bytes, site.num_ranks)
        seconds = self.seconds((collective, site.num_ranks, site.dtype), num_bytes)
        return None if seconds is None else seconds / moving


def payload_bytes(collective: str, num_bytes: int, num_ranks: int) -> int:
    """Return the size of a call as the benchmark states it, which is that of the larger tensor.

    `num_bytes`: what a rank passes, or receives if it passes nothing; the mean over the ranks.

    >>> payload_bytes("allreduce", 1000, 4), payload_bytes("allgather", 250, 4), payload_bytes("scatter", 1750 // 4, 4)
    (1000, 1000, 999)
    """
    spec = spec_of(collective)
    if spec.grows > 0:
        return num_bytes * num_ranks
    if spec.only_root_passes and num_ranks:  # the root passes all parts, each other rank receives one
        return round(num_bytes * num_ranks**2 / (2 * num_ranks - 1))
    return num_bytes
