"""Where this process is, and at which address others reach it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # an address of the documentation's: only the way there is asked for, nothing is sent
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""PyTorch's own: what it says for gloo holds for us."""


class Place(NamedTuple):
    """Processes that agree in it see the same."""

    network: str
    """Sockets of the kernel: they reach each other without a network."""
    memory: str
    """Shared memory."""


def here() -> Place:
    """The place of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    host = f"{socket.gethostname()} {boot}"
    return Place(f"{host} {_namespace('net')}", f"{host} {_namespace('net')} {_namespace('pid')}")


def _namespace(kind: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def own_address(store: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Return an address of this host for other hosts.

    It is that of the interface chosen by GLOO_SOCKET_IFNAME, else that of the route to the store's host, else that of
    the default route, else any.

    >>> own_address(None, {"GLOO_SOCKET_IFNAME": "lo"})
    '127.0.0.1'
    """
    interfaces = interface_addresses()
    for name in environment.get(_INTERFACE_VARIABLE, "").split(","):
        if name in interfaces:
            return interfaces[name]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for target in (getattr(store, "host", None), _ANYWHERE):
        address = _address_towards(target) if target else ""
        if address and not address.startswith(("127.", "::1")):
            return address
    return next((address for address in interfaces.values() if not address.startswith("127.")), "127.0.0.1")


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _address_towards(host: str) -> str:
    """The own address on packets to a host."""
    with suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""
