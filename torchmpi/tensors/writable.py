"""Find out whether memory can be written, without changing it: a write to a read-only map ends the process by SIGSEGV.

Such tensors are made by ``torch.from_numpy(numpy.memmap(file, mode="r"))``, and torch does not know it of them. Calls
are checked where they run through Python: machine code (docs/design/fast-path.md) runs those for which it has a plan.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import weakref
from typing import Any

import torch

from ..errors import ArgumentError

FUTEX: int | None = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""The number of the system call futex(2); None if unknown."""
_WAKE_OP_PRIVATE = 5 | 128
_OR_WITH_0 = 2 << 28
"""The operation of the kernel on the memory: an atomic one, which changes nothing."""
_MOST_KNOWN = 4096

_word = ctypes.c_int(0)
_system_call: Any = None
known: dict[int, weakref.ref[torch.Tensor]] = {}
"""Tensors that can be written, by id: one that is used repeatedly is tested once. (Not by address: after a tensor has
been freed, a file may be mapped there.)"""


def refuse_read_only(where: str, call: str, *tensors: torch.Tensor) -> None:
    """Raise if a tensor is in host memory that cannot be written.

    >>> refuse_read_only("rank 0", "allreduce", torch.ones(2))
    """
    for tensor in tensors:
        seen = known.get(id(tensor))
        # As in is_writable(), without a call for a repeated tensor.
        if (seen is None or seen() is not tensor) and not is_writable(tensor):
            raise ArgumentError(
                f"{where}: {call}: the tensor is in memory that cannot be written, as of np.memmap(mode='r'). Pass "
                ".clone(), or map the file with mode='c', which leaves the file unchanged."
            )


def is_writable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be written; True if that cannot be found out.

    >>> is_writable(torch.ones(2)), is_writable(torch.empty(0))
    (True, True)
    """
    seen = known.get(id(tensor))
    if seen is not None and seen() is tensor:
        return True
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() and not _can_write(tensor.data_ptr()):
        return False
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[id(tensor)] = weakref.ref(tensor)
    return True


def _can_write(address: int) -> bool:
    global _system_call
    if FUTEX is None:
        return True
    if _system_call is None:
        _system_call = ctypes.CDLL(None, use_errno=True).syscall
        _system_call.restype = ctypes.c_long
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        _system_call.argtypes = (ctypes.c_long, pointer, integer, integer, pointer, pointer, integer)
    own = ctypes.addressof(_word)
    status = _system_call(FUTEX, own, _WAKE_OP_PRIVATE, 0, None, address & ~3, _OR_WITH_0)
    return not (status == -1 and ctypes.get_errno() == errno.EFAULT)  # other errors: the system has no such call
