"""Whether the ranks of a host may read each other's memory by a call of the system (Linux: process_vm_readv).

Some systems allow it to nobody but debuggers, containers forbid it, and the number of a process means nothing in
another container. So each rank tries it, on all others.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

_shown = ctypes.c_uint64(0)


class Ticket(NamedTuple):
    """Where a process has something for others to read, and what."""

    process: int
    address: int
    value: int


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def ticket() -> Ticket:
    """Of this process, for `can_read` in others.

    >>> ticket().process == os.getpid()
    True
    """
    while not _shown.value:
        _shown.value = secrets.randbits(64)
    return Ticket(os.getpid(), ctypes.addressof(_shown), _shown.value)


def can_read(tickets: Iterable[Ticket]) -> bool:
    """Whether this process can read the memory of all these.

    >>> can_read([Ticket(process=-1, address=1, value=1)])
    False
    """
    library: Any = ctypes.CDLL(None, use_errno=True)
    read = getattr(library, "process_vm_readv", None)
    return read is not None and all(_read(read, *ticket) for ticket in tickets)


def _read(read: Any, process: int, address: int, value: int) -> bool:
    found = ctypes.c_uint64(0)
    num_bytes = ctypes.sizeof(found)
    here, there = _Span(ctypes.addressof(found), num_bytes), _Span(address, num_bytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read.restype = ctypes.c_ssize_t
    count = read(ctypes.c_int(process), ctypes.byref(here), one, ctypes.byref(there), one, none)
    return bool(count == num_bytes and found.value == value)
