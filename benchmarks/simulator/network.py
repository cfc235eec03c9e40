"""A model of links: LogGP for messages, an uplink and a downlink for each host, switches with shared uplinks."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torchmpi.parameterserver.simulation.coroutines import Event, RunOrder


class Network(NamedTuple):
    """Times in seconds, sizes in bytes. The defaults are assumptions, not measurements."""

    rate: float = 125e6
    """Bytes per second of the link of a host, in each direction."""
    header_share: float = 66 / 1448
    """Bytes of headers over bytes of data in a packet: TCP over Ethernet."""
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


class Message(Event):
    """One side of a message between two ranks."""

    def __init__(self, description: str, is_send: bool, num_bytes: int, hosts: tuple[int, int], posted: float) -> None:
        """Begin to send or to receive; `hosts` are those of the sender and of the receiver."""
        super().__init__(description)
        self.is_send, self.num_bytes, self.hosts, self.posted = is_send, num_bytes, hosts, posted
        self.receiver: Message | None = None
        """The other side of a message that is sent, when it is known."""
        self.announced: float | None = None
        """When the announcement of a long message has arrived."""
        self.arrived: float | None = None
        """When the last byte of a message that is sent has arrived."""


class Links:
    """The links of all hosts and switches. Each carries one message after the other, in the order of their arrival."""

    def __init__(self, network: Network, order: RunOrder, num_hosts: int = sys.maxsize) -> None:
        """Make the links.

        `num_hosts`: the number of hosts, and a multiple of those under a switch, of which all others do the same: a
        message to another host takes the links of the host in the same position among these.
        """
        self.network, self.order, self._num_hosts = network, order, num_hosts
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        self._slow = dict(network.slow_hosts)
        self.carried: dict[tuple[str, int], int] = defaultdict(int)
        """Bytes that each link has carried."""

    def begin(self, message: Message) -> None:
        """Take a message that a rank begins to send or to receive: a short one leaves without its receive."""
        if not message.is_send:
            return
        if self._is_long(message):
            if message.hosts[0] != message.hosts[1]:
                self._carry(0, message.hosts, message.posted, partial(self._announce, message))
        else:
            self.order.finish(message, message.posted)
            self._carry(message.num_bytes, message.hosts, message.posted, partial(self._arrive, message))

    def match(self, sent: Message, received: Message) -> None:
        """Take both sides of a message."""
        sent.receiver = received
        if self._is_long(sent):
            if sent.hosts[0] == sent.hosts[1]:
                self._carry_long(sent, max(sent.posted, received.posted))
            elif sent.announced is not None:
                self._answer(sent, received)
        elif sent.arrived is not None:
            self.order.finish(received, max(sent.arrived, received.posted))

    # A long message is announced, and answered when there is a receive. Both wait for the messages before them.

    def _announce(self, sent: Message, time: float) -> None:
        sent.announced = time
        if sent.receiver is not None:
            self._answer(sent, sent.receiver)

    def _answer(self, sent: Message, received: Message) -> None:
        assert sent.announced is not None
        ready = max(sent.announced, received.posted)
        self._carry(0, (sent.hosts[1], sent.hosts[0]), ready, partial(self._carry_long, sent))

    def _carry_long(self, sent: Message, ready: float) -> None:
        self._carry(
            sent.num_bytes, sent.hosts, ready, partial(self._arrive, sent), left=partial(self.order.finish, sent)
        )

    def _arrive(self, sent: Message, time: float) -> None:
        sent.arrived = time
        if sent.receiver is not None:
            self.order.finish(sent.receiver, max(time, sent.receiver.posted))

    def _is_long(self, message: Message) -> bool:
        return message.num_bytes >= self.network.long_bytes

    def _carry(
        self,
        num_bytes: int,
        hosts: tuple[int, int],
        ready: float,
        arrived: Callable[[float], object],
        left: Callable[[float], object] = float,
    ) -> None:
        """Carry bytes from a host to another; call `left` when the last one is on its way, and `arrived`."""
        network, (origin, target) = self.network, hosts
        if origin == target:
            end = ready + network.in_host(num_bytes)
            left(end)
            arrived(end)
            return
        path = [("out", self._folded(origin)), ("in", self._folded(target))]
        if network.hosts_per_switch and origin // network.hosts_per_switch != target // network.hosts_per_switch:
            up, down = (self._folded(host) // network.hosts_per_switch for host in hosts)
            path[1:1] = [("up", up), ("down", down)]
        hop = network.latency / (len(path) - 1)

        def pass_link(number: int, begin: float, last: float) -> None:
            """Occupy a link from `begin` on; the last byte arrives at it at the time `last`."""
            start = max(begin, self._free[path[number]])
            self._free[path[number]] = start + num_bytes / self._rate(*path[number])
            self.carried[path[number]] += num_bytes
            end = max(self._free[path[number]], last)
            if number == 0:
                left(end)
            if number == len(path) - 1:
                arrived(end)
            else:
                self.order.at(start + hop, lambda time: pass_link(number + 1, time, end + hop))

        self.order.at(ready, lambda time: pass_link(0, time, time))

    def _folded(self, host: int) -> int:
        return host % self._num_hosts

    def _rate(self, kind: str, number: int) -> float:
        rate = self.network.rate / (1 + self.network.header_share)
        if kind in ("up", "down"):
            return rate * self.network.hosts_per_switch / self.network.oversubscription
        return rate * self._slow.get(number, 1.0)
