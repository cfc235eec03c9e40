"""Memory that processes of a host read and none can write: a file in memory or on a disk, mapped by each of them.

A file in memory has no name, and is sealed: not even its owner can write to it again. Another process of this user
opens it through the owner's entry in /proc, see :mod:`.segments`. The memory exists as long as a process has mapped it,
or its owner keeps it open, so nothing is left when all of them are killed.

Views are tensors and arrays that keep their mapping. A process that multiprocessing starts with ``spawn`` gets the
place of a view instead of a copy (:func:`_reduce_tensor`, :func:`_reduce_array`), and so does a rank from its workers.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from .segments import Ticket

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_STANDARD_ERROR = 2
_PROTOCOL = 4
"""Of the pickle of an ordinary array; from 5 on, its data are a PickleBuffer, which a pickler of protocol 4 refuses."""
_mapped: weakref.WeakValueDictionary[tuple[int, int], ReadOnlyMemory] = weakref.WeakValueDictionary()
"""What this process has mapped, by device and inode."""


class ReadOnlyMemory:
    """A mapped file. It is unmapped with the last view.

    Attributes:
        ticket: With what other processes open the memory; None after :meth:`withdraw`.

    >>> file = anonymous_file("example")
    >>> _ = os.write(file, bytes(8))
    >>> memory = ReadOnlyMemory.sealed(file)
    >>> view = memory.tensor(0, torch.int32, (2,))
    >>> view, ReadOnlyMemory.open(memory.ticket) is memory
    (tensor([0, 0], dtype=torch.int32), True)
    """

    def __init__(self, file: int, ticket: Ticket, *, is_owner: bool) -> None:
        """Map an open file.

        Args:
            file: A descriptor, which this object closes, also if mapping fails.
            ticket: With what other processes open the file.
            is_owner: Whether the ticket leads to this descriptor, which then stays open.
        """
        self.ticket: Ticket | None = ticket
        self._keep = weakref.finalize(self, os.close, file)
        self._keep.atexit = False
        try:
            self._map = mmap.mmap(file, ticket.num_bytes, prot=mmap.PROT_READ)
        except BaseException:
            self._keep()
            raise
        if not is_owner:
            self._keep()
        self.num_bytes = ticket.num_bytes
        self.address = int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)
        if not faulthandler.is_enabled():
            faulthandler.enable(_STANDARD_ERROR)  # torch writes to any tensor: the stack shows on which line it did
        _prepare_pickling()
        _mapped[ticket.device, ticket.inode] = self

    @classmethod
    def sealed(cls, file: int) -> ReadOnlyMemory:
        """Map a file of :func:`anonymous_file`, whose content can never change again.

        Raises:
            OSError: The system has no memory for the map, or no such seals.
        """
        try:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(file)
            raise
        return cls.of(file)

    @classmethod
    def of(cls, file: int) -> ReadOnlyMemory:
        """Map an open file, whose descriptor belongs to the result."""
        status = os.fstat(file)
        ticket = Ticket(f"/proc/{os.getpid()}/fd/{file}", status.st_dev, status.st_ino, status.st_size)
        return cls(file, ticket, is_owner=True)

    @classmethod
    def open(cls, ticket: Ticket, *, to_share: bool = False) -> ReadOnlyMemory:
        """Map what another process of this host and user has mapped, unless this process has done so.

        Args:
            ticket: The ticket of the other process.
            to_share: Whether this process passes the memory on to others, which may outlive that process.

        Raises:
            OSError: The other process has ended, or has withdrawn the memory.
        """
        known = _mapped.get((ticket.device, ticket.inode))
        if known is not None:
            return known
        file = os.open(ticket.path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(file)
        # Another process may have the number of one that has ended.
        if (status.st_dev, status.st_ino, status.st_size) != ticket[1:]:
            os.close(file)
            raise FileNotFoundError(f"{ticket.path} is another file than the announced memory")
        return cls.of(file) if to_share else cls(file, ticket, is_owner=False)

    def withdraw(self) -> None:
        """Prevent other processes from opening the memory, which then exists as long as it is mapped."""
        self.ticket = None
        self._keep()

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return a contiguous tensor with a storage of its own; torch.save() writes whole storages."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self._part(offset, num_bytes), dtype=torch.uint8).view(dtype).view(tuple(shape))

    def array(
        self, offset: int, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return an array, which refuses to be written; `offset` is that of its first element."""
        # Of frombuffer(): an array whose base is the buffer itself could be made writable again by its flags.
        whole = np.frombuffer(memoryview(self._part(0, self.num_bytes)).toreadonly(), np.uint8)
        found: np.ndarray[Any, Any]
        found = np.ndarray(tuple(shape), dtype, whole.data, offset, None if strides is None else tuple(strides))
        return found

    def bytes(self, offset: int, num_bytes: int) -> memoryview:
        """Return a part of the memory."""
        return memoryview(self._map)[offset : offset + num_bytes]

    def _part(self, offset: int, num_bytes: int) -> Any:
        """Return a buffer that keeps this object. torch warns of one that is not writable, at each use of it."""
        part: Any = (ctypes.c_ubyte * num_bytes).from_address(self.address + offset)
        part.memory = self
        return part


def anonymous_file(name: str) -> int:
    """Make an empty file in memory that can be sealed, which this user alone can open; return its descriptor.

    Raises:
        OSError: The system has no such files, or no /proc, through which other processes open them.
    """
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        raise OSError("this system has no files in memory that other processes can open")
    file = os.memfd_create(f"torchmpi-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(file, 0o600)
    return file


def withdraw_all() -> None:
    """Let no other process open the memory of this one, which is freed when all processes have dropped their views."""
    for memory in list(_mapped.values()):
        memory.withdraw()


# --- views in pickles of multiprocessing -----------------------------------------------------------------------------


def _prepare_pickling() -> None:
    if ForkingPickler._extra_reducers.get(torch.Tensor) is not _reduce_tensor:  # type: ignore[attr-defined]
        ForkingPickler.register(torch.Tensor, _reduce_tensor)
        ForkingPickler.register(np.ndarray, _reduce_array)


def _holder(address: int) -> tuple[Ticket, int] | None:
    """Return the ticket of the memory that has an address, and the distance to its begin; None if there is none."""
    for memory in list(_mapped.values()):
        if memory.ticket is not None and memory.address <= address < memory.address + memory.num_bytes:
            return memory.ticket, address - memory.address
    return None


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad:
        storage = tensor.untyped_storage()
        if storage.nbytes() and (found := _holder(storage.data_ptr())) is not None:
            place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            return _tensor_at, (*found, storage.nbytes(), tensor.dtype, *place)
    usual: Callable[[torch.Tensor], Any] = reduce_tensor
    return usual(tensor)


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    found = None if array.dtype.hasobject or not array.size else _holder(array.__array_interface__["data"][0])
    if found is None:
        return array.__reduce_ex__(_PROTOCOL)
    return _array_at, (*found, array.dtype, array.shape, array.strides)


def _tensor_at(
    ticket: Ticket,
    begin: int,
    num_bytes: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    storage = ReadOnlyMemory.open(ticket).tensor(begin, torch.uint8, (num_bytes,)).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides)


def _array_at(ticket: Ticket, offset: int, *place: Any) -> np.ndarray[Any, Any]:
    return ReadOnlyMemory.open(ticket).array(offset, *place)
