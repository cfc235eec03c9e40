"""Shared-memory segments of the processes of one host, without a name in the file system.

A segment is an anonymous file in memory (`memfd_create`). Other processes open the segment through the owner's entry in
/proc while the owner holds the file open. Nothing is left when a process is killed, and the size of /dev/shm (64 MB in
a container) is no limit. On systems without such files a file in /dev/shm is used, and removed as soon as all processes
have opened the file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import numpy as np

_FOLDER = "/dev/shm"


class Ticket(NamedTuple):
    """Path of a segment, and numbers that identify the file, with which another process opens the segment."""

    path: str
    device: int
    inode: int
    num_bytes: int


class Segment:
    """Shared memory, mapped into this process.

    Attributes:
        memory: The memory.
        address: Its address in this process.
        ticket: With what other processes open it.

    >>> first = Segment.create("example", 8192)
    >>> second = Segment.open(first.ticket)
    >>> first.memory[5:8] = b"abc"
    >>> bytes(second.memory[5:8])
    b'abc'
    >>> first.withdraw(); first.close(); second.close()
    """

    def __init__(self, memory: mmap.mmap, file: int | None, path: str | None, ticket: Ticket) -> None:
        self.memory, self.ticket = memory, ticket
        self.address = int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
        self._file, self._path = file, path

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Segment:
        """Make a segment that this user alone can read.

        Raises:
            OSError: The system has not enough memory.
        """
        return cls._around(*_make_file(f"torchmpi-{name}-", num_bytes), num_bytes)

    @classmethod
    def of(cls, file: int, num_bytes: int) -> Segment:
        """Make a segment of an open anonymous file, which must not be used after the release of the segment."""
        return cls._around(os.dup(file), None, num_bytes)

    @classmethod
    def _around(cls, file: int, path: str | None, num_bytes: int) -> Segment:
        try:
            memory = mmap.mmap(file, num_bytes)
            status = os.fstat(file)
        except BaseException:
            os.close(file)
            if path is not None:
                os.unlink(path)
            raise
        ticket = Ticket(path or f"/proc/{os.getpid()}/fd/{file}", status.st_dev, status.st_ino, num_bytes)
        return cls(memory, file, path, ticket)

    @classmethod
    def open(cls, ticket: Ticket) -> Segment:
        """Map the segment of another process of this host and user."""
        file = os.open(ticket.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            # In another container, the same path may be another file.
            if (status.st_dev, status.st_ino, status.st_size) != ticket[1:]:
                raise FileNotFoundError(f"{ticket.path} is another file than the announced segment")
            return cls(mmap.mmap(file, ticket.num_bytes), None, None, ticket)
        finally:
            os.close(file)

    @property
    def is_anonymous(self) -> bool:
        """Whether the segment has no name in the file system."""
        return self._path is None

    @property
    def is_released(self) -> bool:
        """Whether the owner has released the memory."""
        return self.memory.size() == 0

    def offer(self) -> Ticket:
        """Return a ticket of this process, for one that has started after the name was removed.

        Raises:
            OSError: The system does not show the descriptor that the map keeps.
        """
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, like that of the listing
                status = os.stat(f"/proc/self/fd/{name}")
                if (status.st_dev, status.st_ino) == (self.ticket.device, self.ticket.inode):
                    return self.ticket._replace(path=f"/proc/{os.getpid()}/fd/{name}")
        raise FileNotFoundError(f"no descriptor of the segment {self.ticket.path}")

    def withdraw(self) -> None:
        """Prevent other processes from opening the segment, which then exists as long as it is mapped."""
        self._end(truncate=False)

    def release(self) -> None:
        """Return the memory to the system, even if other processes have mapped it; accesses are invalid afterwards."""
        self._end(truncate=True)

    def _end(self, *, truncate: bool) -> None:
        # Cleared before closing: a finalizer may run this method in another thread, and a descriptor that is closed
        # twice may already belong to another file.
        (path, self._path), (file, self._file) = (self._path, None), (self._file, None)
        if path is not None:
            os.unlink(path)
        if file is not None:
            if truncate:
                os.ftruncate(file, 0)
            os.close(file)

    def close(self) -> None:
        """Unmap the segment."""
        self.memory.close()


def _make_file(prefix: str, num_bytes: int) -> tuple[int, str | None]:
    file, path = _anonymous_file(prefix), None
    if file is None:
        file, path = tempfile.mkstemp(prefix=prefix, dir=_FOLDER if os.access(_FOLDER, os.W_OK) else None)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, num_bytes)
        if path is not None:
            os.posix_fallocate(file, 0, num_bytes)  # a full /dev/shm is an error here, and not a SIGBUS later
    except BaseException:
        os.close(file)
        if path is not None:
            os.unlink(path)
        raise
    return file, path


@cache
def _has_descriptors() -> bool:
    """Return whether processes see each other's descriptors."""
    return os.path.exists("/proc/self/fd")


def _anonymous_file(name: str) -> int | None:
    if not hasattr(os, "memfd_create") or not _has_descriptors():
        return None
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:  # an old kernel, or forbidden by a sandbox
        return None
