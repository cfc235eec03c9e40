"""What a verb must at least do: steps and bytes of the usual algorithms, and the factors of the bus bandwidth."""

from __future__ import annotations

import math
from typing import NamedTuple


class Cost(NamedTuple):
    """Of the busiest rank."""

    steps: int
    """Messages one after another."""
    sent_bytes: int


def cost(collective: str, size: int, payload_bytes: int) -> Cost:
    """The bandwidth-optimal plan: rings for what ends on all ranks, a tree for what has a root and is not divided.

    >>> cost("allreduce", 4, 1000)
    Cost(steps=6, sent_bytes=1500)
    >>> cost("broadcast", 4, 1000)
    Cost(steps=2, sent_bytes=1000)
    """
    others = size - 1
    steps = {
        "allreduce": 2 * others,
        "broadcast": math.ceil(math.log2(size)),
        "reduce": math.ceil(math.log2(size)),
    }.get(collective, others)
    return Cost(steps, round(bus_factor(collective, size) * payload_bytes))


def bus_factor(collective: str, size: int) -> float:
    """Bytes the busiest link carries, per byte of payload: what makes speeds of different numbers of ranks comparable.

    >>> bus_factor("allreduce", 2), bus_factor("allgather", 4)
    (1.0, 0.75)
    """
    if collective in ("broadcast", "reduce"):
        return 1.0 if size > 1 else 0.0
    return (2 if collective == "allreduce" else 1) * (size - 1) / size


def gigabytes_per_second(num_bytes: float, microseconds: float) -> float:
    """Speed.

    >>> gigabytes_per_second(1000, 1)
    1.0
    """
    return num_bytes / microseconds / 1e3 if microseconds else math.inf
