"""Tensors in shared memory, which the other ranks of the host can reach: collectives on them copy nothing."""

from __future__ import annotations

import math
import os
import resource
import threading
import weakref
from typing import Any

import numpy as np
import torch

from .kernels import context
from .segments import Segment, Ticket

_PAGE_BYTES = 4096
_MOST_SEGMENTS = 1024


class SharedHeap:
    """The shared tensors of this process, and the segments of others that it has mapped.

    >>> heap = SharedHeap()
    >>> heap.empty((2, 3), torch.float64).shape
    torch.Size([2, 3])
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.table = np.zeros(1 + _MOST_SEGMENTS * context.SEGMENT_FIELDS, np.int64)
        """For the kernels: which addresses are shared."""
        self._most = _affordable(num_ranks)
        self._process = os.getpid()
        self._changing = threading.Lock()
        self._own: dict[int, Segment] = {}
        self._mapped: dict[int, Segment] = {}
        self._adopted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._num_made = 0
        self._perhaps_read: weakref.WeakSet[Segment] = weakref.WeakSet()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that lives until the tensor and all views of it are gone; OSError if there is none."""
        if len(self._own) >= self._most:
            raise OSError(f"there are {self._most} shared tensors already")
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        segment = Segment.create("tensor", -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        if not segment.is_anonymous:  # others could not find it, and a killed process would leave it behind
            segment.withdraw()
            raise OSError("this system has no anonymous files in memory")
        memory = np.frombuffer(segment.memory, np.uint8)
        with self._changing:
            place = self._free_place()
            self._announce(place, segment, memory.ctypes.data)
        weakref.finalize(memory, self._release, place, segment).atexit = False
        return torch.from_numpy(memory)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def adopt(self, storage: torch.UntypedStorage, file: int, num_bytes: int) -> None:
        """Let others reach a storage whose memory is this file, as long as it lives; OSError if that cannot be."""
        with self._changing:
            if len(self._own) >= self._most:
                raise OSError(f"there are {self._most} shared tensors already")
            segment = Segment.of(file, num_bytes)
            if not os.path.exists(segment.ticket.path):
                segment.withdraw()
                raise OSError("this system has no /proc by which others could open it")
            place = self._free_place()
            self._adopted[place] = weakref.ref(storage), storage.data_ptr()
            self._announce(place, segment, storage.data_ptr())
        weakref.finalize(storage, self._release, place, segment).atexit = False

    def note_failed_call(self) -> None:
        """A rank that is still in the call may look at any of today's tensors later than they are gone here."""
        self._perhaps_read.update(list(self._own.values()))

    def forget_what_moved(self) -> None:
        """Adopted storages that somebody has resized, or moved elsewhere, are no longer where the table says."""
        for place, (reference, address) in list(self._adopted.items()):
            storage = reference()
            if storage is not None and storage.data_ptr() != address:
                self._withdraw(place, self._own.get(place))

    def _free_place(self) -> int:
        """Where in the table there is room."""
        return next(place for place in range(len(self._own) + 1) if place not in self._own)

    def _announce(self, place: int, segment: Segment, address: int) -> None:
        self._num_made += 1
        self._own[place] = segment
        fields = self._fields(place)
        file = int(segment.ticket.path.rsplit("/", 1)[1])
        fields[context.SEGMENT_BEGIN] = address
        fields[context.SEGMENT_KEY] = os.getpid() << 32 | self._num_made
        fields[context.SEGMENT_FILE] = os.getpid() << 32 | file
        # Last, since a kernel may be reading: until now the entry holds no address at all.
        fields[context.SEGMENT_END] = address + segment.ticket.num_bytes
        self.table[0] = max(self.table[0], place + 1)

    def _release(self, place: int, segment: Segment) -> None:
        """The last tensor is gone. May run at any moment in any thread, so it takes no lock."""
        if os.getpid() != self._process:
            return  # gone in a forked child, which shares the memory: the rank still has the tensor
        if self._withdraw(place, segment) and segment not in self._perhaps_read:
            segment.release()
        else:
            segment.withdraw()

    def _withdraw(self, place: int, segment: Segment | None) -> bool:
        """Take a segment out of the table, if it is still there."""
        if segment is None or self._own.get(place) is not segment:
            return False
        self._fields(place)[context.SEGMENT_END] = 0
        self._adopted.pop(place, None)
        del self._own[place]
        return True

    def _fields(self, place: int) -> Any:
        begin = 1 + place * context.SEGMENT_FIELDS
        return self.table[begin : begin + context.SEGMENT_FIELDS]

    def holds(self, address: int) -> bool:
        """Whether this is an address within one of the own segments.

        >>> SharedHeap().holds(4096)
        False
        """
        segments = self.table[1:].reshape(-1, context.SEGMENT_FIELDS)[: int(self.table[0])]
        begins, ends = segments[:, context.SEGMENT_BEGIN], segments[:, context.SEGMENT_END]
        return bool(((begins <= address) & (address < ends)).any())

    def map(self, key: int, file: int, num_bytes: int) -> int:
        """The address here of a segment that another rank has announced."""
        with self._changing:
            segment = self._mapped.get(key)
            if segment is None:
                for known in [known for known, segment in self._mapped.items() if segment.is_released]:
                    self._mapped.pop(known).close()
                path = f"/proc/{file >> 32}/fd/{file & 0xFFFFFFFF}"
                segment = self._mapped[key] = Segment.open(Ticket(path, *_identity(path), num_bytes))
            return segment.address

    def close(self) -> None:
        """Forget everything: tensors that are left are private from now on."""
        self.table[:] = 0
        for segment in list(self._own.values()):  # tensors may go at the same time
            segment.withdraw()
        self._own.clear()
        self._adopted.clear()
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _affordable(num_ranks: int) -> int:
    """How many shared tensors each of so many ranks may have: half of the descriptors, of which each tensor takes three
    at most in its own process and one in every other.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_SEGMENTS if limit == resource.RLIM_INFINITY else limit // 2 // (num_ranks + 2)
    return max(1, min(_MOST_SEGMENTS, most))
