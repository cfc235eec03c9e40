"""The address at which the other hosts of a group reach this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path

import psutil

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""PyTorch's variable: the network interface for gloo, or several, separated by commas."""
Interface = IPv4Interface | IPv6Interface
_LOOPBACK = ("127.0.0.1", "::1")
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
    up = {name for name, state in psutil.net_if_stats().items() if state.isup and (not names or name in names)}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries if name in up else ():
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                length = bin(int.from_bytes(socket.inet_pton(entry.family, entry.netmask or "::"))).count("1")
                found.append(f"{entry.address.split('%')[0]}/{length}")
    return found


def address_among(own: Sequence[str], others: Sequence[Sequence[str]]) -> str | None:
    """Return the address of this host in a network in which every other host has a different address; IPv4 first.

    A bridge of containers, which has the same address on each host, is not chosen.

    >>> address_among(["172.17.0.1/16", "10.0.0.1/24"], [["172.17.0.1/16", "10.0.0.2/24"]])
    '10.0.0.1'
    """
    for interface in sorted(map(ip_interface, own), key=lambda each: each.version):
        if interface.is_loopback or interface.is_link_local:
            continue
        if all(_has_neighbour(interface, map(ip_interface, other)) for other in others):
            return str(interface.ip)
    return None


def _has_neighbour(interface: Interface, others: Iterable[Interface]) -> bool:
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
