"""Test whether the ranks of a host exist, and can read each other's memory (Linux: process_vm_readv).

Some systems allow such reads to debuggers only, containers may forbid them, and process ids differ between containers.
So each rank tries to read a random number from all others.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_shown = ctypes.c_uint64(0)


class Probe(NamedTuple):
    """A value in the memory of a process that other processes try to read."""

    process: int
    address: int
    value: int


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def probe() -> Probe:
    """Return a probe of this process, for `can_read` in others.

    >>> probe().process == os.getpid()
    True
    """
    while not _shown.value:
        _shown.value = int.from_bytes(os.urandom(8), "little")
    return Probe(os.getpid(), ctypes.addressof(_shown), _shown.value)


def can_read(probes: Iterable[Probe]) -> bool:
    """Return whether this process can read the memory of all these processes.

    >>> can_read([Probe(process=-1, address=1, value=1)])
    False
    """
    library: Any = ctypes.CDLL(None, use_errno=True)
    read = getattr(library, "process_vm_readv", None)
    return read is not None and all(_read(read, *probe) for probe in probes)


def _read(read: Any, process: int, address: int, value: int) -> bool:
    found = ctypes.c_uint64(0)
    num_bytes = ctypes.sizeof(found)
    local, remote = _IoVec(ctypes.addressof(found), num_bytes), _IoVec(address, num_bytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read.restype = ctypes.c_ssize_t
    count = read(ctypes.c_int(process), ctypes.byref(local), one, ctypes.byref(remote), one, none)
    return bool(count == num_bytes and found.value == value)


def has_ended(process: int) -> bool:
    """Return whether a process of this host has ended; False if this process is out of file descriptors.

    >>> has_ended(os.getpid()), has_ended(1 << 30)
    (False, True)
    """
    try:
        # The name, in parentheses, may contain anything.
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in (b"Z", b"X")  # ended, but its parent has not read its status
