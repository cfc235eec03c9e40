"""A model of links: LogGP for messages, an uplink and a downlink for each host, switches with shared uplinks."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .coroutines import Event, Turns


class Network(NamedTuple):
    """Times in seconds, sizes in bytes. The defaults are assumptions, not measurements."""

    rate: float = 125e6
    """Bytes per second of the link of a host, in each direction."""
    latency: float = 50e-6
    overhead: float = 2.5e-6
    """The time of a rank to begin a message, sent or received."""
    host_latency: float = 1e-6
    memory_rate: float = 5e9
    """Bytes per second that the ranks of a host move in its memory."""
    long_bytes: int = 64 << 10
    """From this size on, a message waits for its receive, and for a round trip."""
    hosts_per_switch: int = 0
    """Hosts under one switch; 0: all."""
    oversubscription: float = 1.0
    """The rate of all hosts under a switch over that of its uplink."""
    slow_hosts: tuple[tuple[int, float], ...] = ()
    """Hosts whose links have this fraction of the rate."""

    def in_host(self, num_bytes: float) -> float:
        """Return the time to move bytes in the memory of a host."""
        return self.host_latency + num_bytes / self.memory_rate


class Links:
    """The links of all hosts and switches. Each carries one message after the other, in the order of their arrival."""

    def __init__(self, network: Network, turns: Turns) -> None:
        self.network, self.turns = network, turns
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        self._slow = dict(network.slow_hosts)
        self.carried: dict[tuple[str, int], int] = defaultdict(int)
        """Bytes that each link has carried."""

    def carry(
        self, sent: Event, received: Event, num_bytes: int, posted: float, awaited: float, origin: int, target: int
    ) -> None:
        """Begin a message between hosts; finish both events when they happen."""
        network = self.network
        is_long = num_bytes >= network.long_bytes
        ready = posted if not is_long else max(posted, awaited) + (2 * network.latency if origin != target else 0.0)
        if origin == target:
            end = ready + network.in_host(num_bytes)
            self.turns.finish(sent, end if is_long else posted)
            self.turns.finish(received, max(end, awaited))
            return
        path = [("out", origin), ("in", target)]
        if network.hosts_per_switch:
            switches = origin // network.hosts_per_switch, target // network.hosts_per_switch
            if switches[0] != switches[1]:
                path[1:1] = [("up", switches[0]), ("down", switches[1])]
        if not is_long:
            self.turns.finish(sent, posted)

        def pass_link(number: int, begin: float, last: float) -> None:
            """Occupy a link from `begin` on; the last byte arrives at it at the time `last`."""
            seconds = num_bytes / self._rate(*path[number])
            start = max(begin, self._free[path[number]])
            self._free[path[number]] = start + seconds
            self.carried[path[number]] += num_bytes
            end = max(start + seconds, last)
            if number == 0 and is_long:
                self.turns.finish(sent, end)
            hop = network.latency / (len(path) - 1)
            if number == len(path) - 1:
                self.turns.finish(received, max(end, awaited))
            else:
                self.turns.at(start + hop, lambda time: pass_link(number + 1, time, end + hop))

        self.turns.at(ready, lambda time: pass_link(0, time, time))

    def _rate(self, kind: str, number: int) -> float:
        if kind in ("up", "down"):
            return self.network.rate * self.network.hosts_per_switch / self.network.oversubscription
        return self.network.rate * self._slow.get(number, 1.0)
