"""Resources of this process: memory, mappings, descriptors, threads. Imports the standard library only."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_SEGMENT = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s+/(?:dev/shm/|memfd:)", flags=re.MULTILINE)


def usage() -> dict[str, int]:
    """Return the resources of this process now, in bytes and numbers.

    >>> usage()["resident_bytes"] > 0
    True
    """
    status, maps = Path("/proc/self/status").read_text(), Path("/proc/self/maps").read_text()
    return {
        "resident_bytes": 1024 * _field(status, "VmRSS"),
        "shared_resident_bytes": 1024 * _field(status, "RssShmem"),
        "segment_bytes": segment_bytes(maps),
        "mappings": maps.count("\n"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": _field(status, "Threads"),
        "dev_shm_bytes": _dev_shm_bytes(),
    }


def _field(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, flags=re.MULTILINE)
    return int(found[1]) if found else 0


def segment_bytes(maps: str) -> int:
    """Return the size of the shared segments in the text of ``/proc/PID/maps``, resident or not.

    >>> segment_bytes("7f00-7f10 rw-s 00000000 00:19 5    /dev/shm/x (deleted)")
    16
    """
    return sum(int(end, 16) - int(begin, 16) for begin, end in _SEGMENT.findall(maps))


def _dev_shm_bytes() -> int:
    """Return the bytes used by all processes of this machine."""
    return shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0
