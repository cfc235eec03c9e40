"""Tensors in shared memory that the other ranks of the host can access: collectives on them make no copies."""

from __future__ import annotations

import math
import os
import resource
import threading
import weakref
from typing import Any

import numpy as np
import torch

from .kernels import records
from .segments import Segment, Ticket

_PAGE_BYTES = 4096
_MOST_SEGMENTS = 1024
_INODE_BITS = 0xFFFFFFFF


class SharedHeap:
    """The shared tensors of this process, and the mapped segments of other processes.

    >>> heap = SharedHeap()
    >>> heap.empty((2, 3), torch.float64).shape
    torch.Size([2, 3])
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.table = np.zeros(1 + _MOST_SEGMENTS * records.SegmentRecord.FIELDS, np.int64)
        """The number of segment records, then the records, for the kernels."""
        self._most = _affordable(num_ranks)
        self._process = os.getpid()
        self._changing = threading.Lock()
        self._own: dict[int, Segment] = {}
        self._mapped: dict[tuple[int, int], Segment] = {}
        self._adopted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._num_made = 0
        self._perhaps_read: weakref.WeakSet[Segment] = weakref.WeakSet()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make an uninitialized tensor, whose memory is released with its last view.

        Raises:
            OSError: The system has not enough memory or descriptors.
        """
        if len(self._own) >= self._most:
            raise OSError(f"there are {self._most} shared tensors already")
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        segment = Segment.create("tensor", -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        if not segment.is_anonymous:  # other ranks could not open it, and a kill would leave the file
            segment.withdraw()
            raise OSError("this system has no anonymous files in memory")
        memory = np.frombuffer(segment.memory, np.uint8)
        with self._changing:
            index = self._free_index()
            self._announce(index, segment, memory.ctypes.data)
        weakref.finalize(memory, self._release, index, segment).atexit = False
        return torch.from_numpy(memory)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def adopt(self, storage: torch.UntypedStorage, file: int, num_bytes: int) -> None:
        """Make a storage whose memory is this file accessible to other processes, as long as the storage exists.

        Raises:
            OSError: The system has not enough descriptors, or no /proc.
        """
        with self._changing:
            if len(self._own) >= self._most:
                raise OSError(f"there are {self._most} shared tensors already")
            segment = Segment.of(file, num_bytes)
            if not os.path.exists(segment.ticket.path):
                segment.withdraw()
                raise OSError("this system has no /proc, through which other ranks open shared tensors")
            index = self._free_index()
            self._adopted[index] = weakref.ref(storage), storage.data_ptr()
            self._announce(index, segment, storage.data_ptr())
        weakref.finalize(storage, self._release, index, segment).atexit = False

    def note_failed_call(self) -> None:
        """Do not truncate the present segments, since a rank that is still in the call may access them later."""
        self._perhaps_read.update(list(self._own.values()))

    def forget_what_moved(self) -> None:
        """Withdraw adopted storages that have been resized or moved."""
        for index, (reference, address) in list(self._adopted.items()):
            storage = reference()
            if storage is not None and storage.data_ptr() != address:
                self._withdraw(index, self._own.get(index))

    def _free_index(self) -> int:
        return next(index for index in range(len(self._own) + 1) if index not in self._own)

    def _announce(self, index: int, segment: Segment, address: int) -> None:
        self._num_made += 1
        self._own[index] = segment
        fields = self._fields(index)
        file = int(segment.ticket.path.rsplit("/", 1)[1])
        fields[records.SegmentRecord.begin] = address
        fields[records.SegmentRecord.key] = self._num_made << 32 | segment.ticket.inode & _INODE_BITS
        fields[records.SegmentRecord.file] = os.getpid() << 32 | file
        # Last, since a kernel may be reading: until now the record contains no address.
        fields[records.SegmentRecord.end] = address + segment.ticket.num_bytes
        self.table[0] = max(self.table[0], index + 1)

    def _release(self, index: int, segment: Segment) -> None:
        """Release a segment whose last tensor was freed. May run at any time in any thread, so it takes no lock."""
        if os.getpid() != self._process:
            return  # a forked child, which shares the memory: the rank still uses the tensor
        if self._withdraw(index, segment) and segment not in self._perhaps_read:
            segment.release()
        else:
            segment.withdraw()

    def _withdraw(self, index: int, segment: Segment | None) -> bool:
        if segment is None or self._own.get(index) is not segment:
            return False
        self._fields(index)[records.SegmentRecord.end] = 0
        self._adopted.pop(index, None)
        del self._own[index]
        return True

    def _fields(self, index: int) -> Any:
        begin = 1 + index * records.SegmentRecord.FIELDS
        return self.table[begin : begin + records.SegmentRecord.FIELDS]

    def holds(self, address: int) -> bool:
        """Return whether an address is within a segment of this process.

        >>> SharedHeap().holds(4096)
        False
        """
        segments = self.table[1:].reshape(-1, records.SegmentRecord.FIELDS)[: int(self.table[0])]
        begins, ends = segments[:, records.SegmentRecord.begin], segments[:, records.SegmentRecord.end]
        return bool(((begins <= address) & (address < ends)).any())

    def map(self, key: int, file: int, num_bytes: int) -> int:
        """Map a segment that another rank has announced, and return its address.

        Raises:
            OSError: The rank has released the segment, or its process id denotes another process in this container.
        """
        with self._changing:
            segment = self._mapped.get((file, key))
            if segment is None:
                for known in [known for known, segment in self._mapped.items() if segment.is_released]:
                    self._mapped.pop(known).close()
                path = f"/proc/{file >> 32}/fd/{file & 0xFFFFFFFF}"
                status = os.stat(path)
                if status.st_ino & _INODE_BITS != key & _INODE_BITS:
                    raise FileNotFoundError(f"{path} is another file than the announced shared tensor")
                segment = Segment.open(Ticket(path, status.st_dev, status.st_ino, num_bytes))
                self._mapped[file, key] = segment
            return segment.address

    def close(self) -> None:
        """Withdraw all segments: tensors that still exist are private from now on."""
        self.table[:] = 0
        for segment in list(self._own.values()):  # finalizers may run at the same time
            segment.withdraw()
        self._own.clear()
        self._adopted.clear()
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()


def _affordable(num_ranks: int) -> int:
    """Return how many shared tensors each of so many ranks may have.

    Half of the descriptors may be used; a tensor takes at most three in its own process and one in every other process.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_SEGMENTS if limit == resource.RLIM_INFINITY else limit // 2 // (num_ranks + 2)
    return max(1, min(_MOST_SEGMENTS, most))
