"""The address at which the other hosts of a group reach this host, and the age of its connections."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network
from pathlib import Path

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""PyTorch's variable: the network interface for gloo, or several, separated by commas."""
NUM_STRANGERS = 128
"""Connections of other programs that the queue of a listener has room for, in addition to those of ranks."""
Interface = IPv4Interface | IPv6Interface
_LOOPBACK = ("127.0.0.1", "::1")
_INFO_NUMBER, _INFO_AGES = struct.Struct("=I"), struct.Struct("=II")
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: the route is looked up, nothing is sent


def namespace() -> str:
    """Return a key of the network stack of this process: processes with the same key reach each other by loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def wanted_interfaces() -> list[str]:
    """Return the names of the network interfaces that the user has chosen."""
    return [name for name in os.environ.get(INTERFACE_VARIABLE, "").split(",") if name]


def own_interfaces(names: Sequence[str] = ()) -> list[str]:
    """Return the addresses of this host with their networks, such as ``10.0.0.3/24``; of some interfaces if named."""
    import psutil  # not at the top: ranks of one host need no addresses

    addresses = psutil.net_if_addrs()
    try:
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    except OSError:  # emulators and sandboxes have no request for the speed of an interface
        up = set(addresses)
    found = []
    for name, entries in addresses.items():
        for entry in entries if name in up and (not names or name in names) else ():
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                length = bin(int.from_bytes(socket.inet_pton(entry.family, entry.netmask or "::"), "big")).count("1")
                found.append(f"{entry.address.split('%')[0]}/{length}")
    return found


def interface_in(network: str) -> str | None:
    """Return the name of the first interface of this host with an address in a network, or None.

    >>> interface_in("127.0.0.0/8")
    'lo'
    """
    wanted = ip_network(network, strict=False)
    for _, name in socket.if_nameindex():
        if any(ip_interface(address).ip in wanted for address in own_interfaces([name])):
            return name
    return None


def is_own(name: str) -> bool:
    """Return whether a name of a host, or an address, is one of this host.

    >>> is_own("localhost"), is_own("192.0.2.1")
    (True, False)
    """
    if name == socket.gethostname():
        return True
    own = {ip_interface(each).ip for each in own_interfaces()}
    with suppress(OSError):
        found = [ip_address(str(each[4][0]).split("%")[0]) for each in socket.getaddrinfo(name, None)]
        return any(address.is_loopback or address in own for address in found)
    return False


def address_among(own: Sequence[str], others: Sequence[Sequence[str]]) -> str | None:
    """Return the address of this host in a network in which every other host has a different address; IPv4 first.

    A bridge of containers, which has the same address on each host, is not chosen.

    >>> address_among(["172.17.0.1/16", "10.0.0.1/24"], [["172.17.0.1/16", "10.0.0.2/24"]])
    '10.0.0.1'
    """
    for interface in sorted(map(ip_interface, own), key=lambda each: each.version):
        if interface.is_loopback or interface.is_link_local:
            continue
        if all(_has_neighbor(interface, map(ip_interface, other)) for other in others):
            return str(interface.ip)
    return None


def _has_neighbor(interface: Interface, others: Iterable[Interface]) -> bool:
    return any(other.ip in interface.network and other.ip != interface.ip for other in others)


def address_of_route() -> str | None:
    """Return the address of this host on the default route, or None."""
    for family, target in zip((socket.AF_INET, socket.AF_INET6), _ELSEWHERE, strict=True):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return None


def family(address: str) -> socket.AddressFamily:
    """Return the family of sockets for an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def loopback() -> str:
    """Return the loopback address, of IPv6 if there is no other."""
    with suppress(OSError), socket.socket(socket.AF_INET) as probe:
        probe.bind((_LOOPBACK[0], 0))
        return _LOOPBACK[0]
    return _LOOPBACK[1]


def choose(hosts: Sequence[tuple[str, Sequence[str]]], rank: int) -> str | None:
    """Return the address at which the other ranks reach a rank, given `namespace` and `own_interfaces` of each rank.

    >>> choose([("a", ["10.0.0.1/24"]), ("a", ["10.0.0.1/24"]), ("b", ["10.0.0.2/24"])], 2)
    '10.0.0.2'
    """
    key, own = hosts[rank]
    others = dict(host for host in hosts if host[0] != key)
    return address_among(own, list(others.values())) or address_of_route() if others else loopback()


def address_of(hosts: Sequence[tuple[str, Sequence[str]]], rank: int) -> str:
    """Return the address at which a rank listens for the others: that of the chosen interface, or as in `choose`."""
    wanted = wanted_interfaces()
    if wanted and (named := own_interfaces(wanted)):
        return named[0].split("/")[0]
    return choose(hosts, rank) or loopback()


def listen(address: str, num_ranks: int) -> socket.socket:
    """Listen on a free port of an address, with room in the queue for connections of other programs."""
    return socket.create_server((address, 0), family=family(address), backlog=num_ranks + NUM_STRANGERS)


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end a TCP connection when the other host does not answer for this time.

    The kernel probes a connection without traffic, and limits the time until data is acknowledged. Neither needs the
    process: a thread that waits for the GIL, or a stopped process, does not end the connection.
    """
    probe_seconds = max(1, int(seconds / 6))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds)),
    ):
        sock.setsockopt(level, option, value)


def silent_seconds(sock: socket.socket) -> float:
    """Return the time since the other host has last sent or acknowledged anything on a TCP connection."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    last_data, last_ack = _INFO_AGES.unpack_from(info, 52)  # tcpi_last_data_recv, tcpi_last_ack_recv
    return int(min(last_data, last_ack)) / 1000


def round_trip_us(sock: socket.socket) -> int:
    """Return how long a message to the other host and its acknowledgement have taken lately, in microseconds."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72)
    return int(_INFO_NUMBER.unpack_from(info, 68)[0])  # tcpi_rtt
