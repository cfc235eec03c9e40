"""NVIDIA's NCCL by its C interface: the library that torch brings, found and called through ctypes.

The functions used here have had the same signatures since NCCL 2.7. Each call leaves the GIL, and raises
:class:`~torchmpi.errors.TransportError` with NCCL's own words where NCCL refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch

from ...errors import TransportError

DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
"""ncclDataType_t"""
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
"""ncclRedOp_t"""
BYTE = DTYPES[torch.uint8]
_OLDEST = (2, 10, 0)  # the first with ncclAvg
_FILE = "libnccl.so.2"
_SOCKET_VARIABLE = "NCCL_SOCKET_IFNAME"


class UniqueId(ctypes.Structure):
    """What the ranks of a communicator find each other by."""

    _fields_ = [("internal", c_char * 128)]


_END = (c_int, c_void_p, c_void_p)  # type, communicator, stream: of everything that moves data
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, *_END),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, *_END),
    "ncclSend": (c_void_p, c_size_t, c_int, *_END),
    "ncclRecv": (c_void_p, c_size_t, c_int, *_END),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
"""The arguments of the functions that are called here; each returns an ncclResult_t."""

_REMEDIES = {
    1: "The GPU, its driver or an earlier kernel has failed: look at `nvidia-smi`, and at errors of torch before this.",
    2: "The network or /dev/shm may be the reason: `torchmpi doctor`, and NCCL_SOCKET_IFNAME names the interface.",
    3: "NCCL_DEBUG=WARN makes it say more.",
    4: "NCCL_DEBUG=WARN makes it say more; please report it.",
    5: "NCCL_DEBUG=WARN makes it say more. Several ranks on one GPU need backend='ipc'.",
    6: "Another rank has ended or cannot be reached: its own message says why.",
}


class Library:
    """One loaded libnccl."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version: tuple[int, ...] = ()
        self._functions = ctypes.CDLL(path)
        for name, arguments in FUNCTIONS.items():
            function = getattr(self._functions, name)
            function.argtypes, function.restype = arguments, c_int
        for name, arguments in (("ncclGetErrorString", (c_int,)), ("ncclGetLastError", (c_void_p,))):
            with contextlib.suppress(AttributeError):  # the second came with 2.13
                function = getattr(self._functions, name)
                function.argtypes, function.restype = arguments, c_char_p
        number = c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = version_of(number.value)

    def call(self, name: str, *arguments: Any, where: str = "") -> None:
        """Call a function by its name in nccl.h, or raise."""
        status = getattr(self._functions, name)(*arguments)
        if status:
            raise TransportError(where + self.describe(name, status))

    def describe(self, name: str, status: int) -> str:
        """What a status means, in NCCL's words, and what to do."""
        words = [self._functions.ncclGetErrorString(status).decode(errors="replace")]
        with contextlib.suppress(AttributeError):
            words.append((self._functions.ncclGetLastError(None) or b"").decode(errors="replace").strip())
        said = ": ".join(dict.fromkeys(filter(None, words)))
        remedy = _REMEDIES.get(status, "NCCL_DEBUG=WARN makes it say more.")
        return f"NCCL {'.'.join(map(str, self.version))}, {name}: {said.rstrip('.')}. {remedy}"

    def unique_id(self) -> bytes:
        """A new id for a communicator. This process then listens, at a port of NCCL's, until all ranks have come."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Calls in this block are begun together, at its end."""
        self.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            self._functions.ncclGroupEnd()  # the group would stay open in this thread; what it says is of no interest
            raise
        self.call("ncclGroupEnd")


class NcclCommunicator:
    """One rank's end of a communicator, on the CUDA device that is current when it is made. Collective."""

    def __init__(self, library: Library, unique_id: bytes, size: int, rank: int, *, where: str) -> None:
        """`where` says which rank this is: errors begin with it."""
        self.library, self.group, self._where = library, library.group, f"{where}: "
        handle, key = c_void_p(), UniqueId.from_buffer_copy(unique_id)
        library.call("ncclCommInitRank", ctypes.byref(handle), size, key, rank, where=self._where)
        self._handle: c_void_p | None = handle

    def run(self, name: str, *arguments: int, stream: int) -> None:
        """Enqueue a collective, or a message; `arguments` are those before the communicator in nccl.h."""
        self.library.call(name, *arguments, self._handle, stream, where=self._where)

    def check(self) -> None:
        """Raise if something that was enqueued before has failed."""
        status = self._failure()
        if status:
            raise TransportError(self._where + self.library.describe("an earlier call", status))

    def _failure(self) -> int:
        status = c_int()
        self.library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(status), where=self._where)
        return status.value

    def close(self) -> None:
        """Wait for what is enqueued, and give everything back. Collective, unless something has failed."""
        handle, failed = self._handle, self._handle is not None and self._failure()
        if handle is not None:
            self.library.call("ncclCommAbort" if failed else "ncclCommDestroy", handle, where=self._where)
            self._handle = None


def version_of(code: int) -> tuple[int, ...]:
    """The parts of NCCL's version number.

    >>> version_of(2708), version_of(23203)
    ((2, 7, 8), (2, 32, 3))
    """
    unit = 1000 if code < 10_000 else 10_000
    return code // unit, code % unit // 100, code % 100


def mapped(lines: Iterable[str]) -> list[str]:
    """The NCCL libraries among the files that a process has mapped, given the lines of its ``/proc/PID/maps``.

    >>> mapped(["7f5c0 r-xp 0 fd:00 12 /a/nvidia/nccl/lib/libnccl.so.2", "7f5d0 rw-p 0 00:00 0 [stack]"])
    ['/a/nvidia/nccl/lib/libnccl.so.2']
    """
    matches = (re.search(r"(/.*/libnccl\.so[.\d]*)$", line.rstrip()) for line in lines)
    return list(dict.fromkeys(match[1] for match in matches if match))


def candidates() -> list[str]:
    """Where the library may be: loaded already, in NVIDIA's wheel, beside torch, in the system."""
    try:
        found = mapped(Path("/proc/self/maps").read_text().splitlines())
    except OSError:
        found = []
    package = Path(str(torch.__file__)).parent
    folders = [Path(entry) / "nvidia" / "nccl" / "lib" for entry in (*sys.path, str(package.parent))]
    files = [folder / _FILE for folder in (*folders, package / "lib")]
    return list(dict.fromkeys([*found, *(str(file) for file in files if file.exists()), _FILE]))


@functools.cache
def load() -> Library:
    """The library, loaded once; raises :class:`~torchmpi.errors.TransportError` where there is none."""
    problem = "it is not there"
    for path in candidates():
        try:
            library = Library(path)
        except (OSError, AttributeError) as error:
            problem = str(error)
            continue
        if library.version >= _OLDEST:
            return library
        problem = f"{path} is too old: {'.'.join(map(str, library.version))}"
    raise TransportError(
        f"NCCL ({_FILE}) cannot be loaded: {problem}. torch wheels for CUDA bring it; a torch built otherwise needs "
        "`pip install nvidia-nccl-cu12` (or -cu13, as its CUDA)."
    )


def stay_on_this_host() -> None:
    """Have NCCL listen on the loopback interface only, unless the user has named one. Before its first use."""
    os.environ.setdefault(_SOCKET_VARIABLE, "lo")
