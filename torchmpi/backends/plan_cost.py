"""The cost of plans of messages for a rank, and the choice between plans. Pure arithmetic.

The numbers are those of rank 0, since no rank of these plans has more to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ..tensors import schedule
from ..tensors.schedule import Round

HEADER_BYTES = 16
"""Two numbers, by which ranks compare their calls."""


class Network(NamedTuple):
    """A network, in seconds; by default TCP over Ethernet of 1 Gbit/s, with messages started in Python.

    On a faster network bytes take less time, and plans with few messages are faster up to greater lengths than here.
    """

    latency: float = 50e-6
    """From the start of a message to its arrival, without its bytes."""
    message: float = 5e-6
    """The time in which a rank starts a message and receives another."""
    byte: float = 8e-9


class PlanCost(NamedTuple):
    """What a rank does in a plan."""

    rounds: int
    """Latencies one after the other."""
    messages: int
    """Sent or received, whichever is more."""
    num_bytes: float
    """Sent or received, whichever is more."""
    memory: float = 0.0
    """Bytes beside the tensors of the call."""

    def seconds(self, network: Network = Network()) -> float:  # noqa: B008, a constant
        """Return the time that the plan takes, without computing.

        >>> PlanCost(2, 10, 1000).seconds(Network(latency=1.0, message=0.1, byte=0.01))
        13.0
        """
        return self.rounds * network.latency + self.messages * network.message + self.num_bytes * network.byte


def cost_of(rounds: Iterable[Round], block_bytes: float, memory: float = 0.0) -> PlanCost:
    """Return the cost of rounds of messages, whose blocks have this size on average.

    >>> cost_of(schedule.doubling(0, 4), 10)
    PlanCost(rounds=2, messages=2, num_bytes=30, memory=0.0)
    """
    plan = list(rounds)
    sent, received = (
        [sum(each.num_blocks for each in messages) for messages in directions]
        for directions in ([step.sends for step in plan], [step.receives for step in plan])
    )
    num_messages = sum(max(len(step.sends), len(step.receives)) for step in plan)
    return PlanCost(len(plan), num_messages, max(sum(sent), sum(received)) * block_bytes, memory)


def allreduce_plans(size: int, num_bytes: float, chunk_bytes: float = float("inf")) -> dict[str, PlanCost]:
    """Return the cost of the plans of an allreduce: all of them combine in rank order.

    In a direct allreduce, each chunk takes the messages of both rounds; two chunks are in progress.

    >>> for name, cost in allreduce_plans(8, 8000).items(): print(name, cost[:3])
    gather (3, 3, 56000)
    direct (2, 14, 14000.0)
    relayed (6, 6, 19000.0)
    """
    block, chunk = num_bytes / size, 2 * min(num_bytes, chunk_bytes)
    direct = cost_of([schedule.exchange(0, size), schedule.spread(0, size)], block, chunk * (size - 1) / size)
    num_chunks = max(1, math.ceil(num_bytes / chunk_bytes))
    relays = schedule.relayed_exchange(0, size)
    relayed = sum(len(relay.positions) for relay in relays)
    doubling = schedule.doubling(0, size)
    collecting = cost_of(doubling, block)
    return {
        "gather": cost_of(doubling, num_bytes, size * num_bytes),
        "direct": direct._replace(messages=num_chunks * direct.messages),
        "relayed": PlanCost(
            len(relays) + collecting.rounds,
            len(relays) + collecting.messages,
            relayed * block + collecting.num_bytes,
            2.5 * num_bytes,  # the blocks, those of a round as they are sent and received, and the result
        ),
    }


@lru_cache
def most_relayed_bytes(size: int, limit: int) -> int:
    """Return up to which power of two bytes a relayed allreduce is faster than a direct one; 0 if it never is.

    >>> [most_relayed_bytes(size, 1 << 20) for size in (2, 16, 64, 256, 1024)]
    [0, 0, 4096, 65536, 262144]
    """
    most, num_bytes = 0, 1024
    while num_bytes <= limit:
        plans = allreduce_plans(size, num_bytes)
        if plans["relayed"].seconds() >= plans["direct"].seconds():
            break
        most, num_bytes = num_bytes, 2 * num_bytes
    return most
