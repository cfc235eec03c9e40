"""Who may hold the locks of a host: the rows of the actors in shared memory, and whether they still live."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..shared_memory.kernels import shard_layout as fields
from ..shared_memory.segments import Segment

ACTORS_PER_RANK = 2
CLIENT, SERVER = range(ACTORS_PER_RANK)


class Memory:
    """Zeroed memory that the kernels are shown by address: a segment, or private where there is nobody to share with.

    >>> memory = Memory(None, 4096)
    >>> bytes(memory.bytes[:3])
    b'\\x00\\x00\\x00'
    >>> memory.close()
    """

    def __init__(self, segment: Segment | None, num_bytes: int) -> None:
        self._segment = segment
        self.bytes: Any
        self.address, self.bytes = _private(num_bytes) if segment is None else (segment.address, segment.memory)

    def close(self) -> None:
        """Give it back; nobody may look at it any more."""
        if self._segment is not None:
            self._segment.close()
        self.bytes, self.address = None, 0


def _private(num_bytes: int) -> tuple[int, Any]:
    """The address of a cache line, and the memory from there on."""
    memory = np.zeros(num_bytes + 64, np.uint8)
    skipped = -memory.ctypes.data % 64
    return memory.ctypes.data + skipped, memory[skipped:]


class Arena:
    """The rows of the actors of the ranks that share memory, two for each."""

    def __init__(self, memory: Memory, index: int) -> None:
        """`index`: of this rank among them."""
        self.memory, self.address = memory, memory.address
        self.index = index

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Size for so many ranks."""
        return num_ranks * ACTORS_PER_RANK * fields.BLOCK_BYTES

    def enter(self, kind: int) -> int:
        """The number of this rank's client or server, whose row then says which process it is."""
        actor = self.index * ACTORS_PER_RANK + kind + 1
        row = self._row(actor)
        row[fields.PROCESS], row[fields.STARTED] = os.getpid(), start_of(os.getpid())
        return actor

    def rank_of(self, actor: int) -> int:
        """Index of its rank among those that share memory."""
        return (actor - 1) // ACTORS_PER_RANK

    def is_dead(self, actor: int) -> bool:
        """Whether its process has ended, killed for instance. Not if this one cannot look, being out of descriptors."""
        row = self._row(actor)
        process, started = int(row[fields.PROCESS]), int(row[fields.STARTED])
        try:
            return process != 0 and start_of(process) != started
        except OSError:
            return False

    def _row(self, actor: int) -> Any:
        start = (actor - 1) * fields.BLOCK_BYTES
        return memoryview(self.memory.bytes)[start : start + 64].cast("B").cast("q")


def start_of(process: int) -> int:
    """When a process was started, in ticks of the system; 0 if it is no more, or only its entry waits to be fetched.

    >>> start_of(os.getpid()) > 0, start_of(1 << 30)
    (True, 0)
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name, in brackets, may contain anything.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
