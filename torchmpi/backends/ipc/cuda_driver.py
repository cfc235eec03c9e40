"""The CUDA driver, by ctypes: memory and events that processes share, copies, and kernels in machine code.

Torch has no words for most of this: its memory comes from a cache whose blocks cannot be shared one by one. The driver
(libcuda.so.1) rather than the runtime library, since there is one of it in a process, by a fixed name, with an
interface that does not change, whatever libcudart torch has brought along. Both work on the device's *primary context*:
what one has made, the other takes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ...errors import CudaError

_int, _unsigned, _size, _address = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_handle = ctypes.c_void_p
_HANDLE_BYTES = 64


class SharedHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


def _to(kind: Any) -> Any:
    return ctypes.POINTER(kind)


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_unsigned,),
    "cuGetErrorName": (_int, _to(ctypes.c_char_p)),
    "cuGetErrorString": (_int, _to(ctypes.c_char_p)),
    "cuDeviceGet": (_to(_int), _int),
    "cuDeviceGetAttribute": (_to(_int), _int, _int),
    "cuDevicePrimaryCtxRetain": (_to(_handle), _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (_to(_handle),),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_to(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyAsync": (_address, _address, _size, _handle),
    "cuIpcGetMemHandle": (_to(SharedHandle), _address),
    "cuIpcOpenMemHandle_v2": (_to(_address), SharedHandle, _unsigned),
    "cuIpcCloseMemHandle": (_address,),
    "cuEventCreate": (_to(_handle), _unsigned),
    "cuEventDestroy_v2": (_handle,),
    "cuEventRecord": (_handle, _handle),
    "cuStreamWaitEvent": (_handle, _handle, _unsigned),
    "cuIpcGetEventHandle": (_to(SharedHandle), _handle),
    "cuIpcOpenEventHandle": (_to(_handle), SharedHandle),
    "cuModuleLoadData": (_to(_handle), ctypes.c_char_p),
    "cuModuleGetFunction": (_to(_handle), _handle, ctypes.c_char_p),
    "cuLaunchKernel": (_handle, *[_unsigned] * 7, _handle, _to(ctypes.c_void_p), _handle),
}
"""What is called, and with what; all return a status."""

_LAZY_PEER_ACCESS = 1
_DISABLE_TIMING, _INTERPROCESS = 2, 4
_NUM_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76


@functools.cache
def library() -> ctypes.CDLL:
    """The driver, initialized; an error says that it cannot be had."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name, arguments in SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = _int, arguments
    except (OSError, AttributeError) as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}.") from None
    _check(found, "cuInit", found.cuInit(0))
    return found


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver, and raise what it says is wrong."""
    driver = library()
    status = getattr(driver, name)(*arguments)
    if status:
        _check(driver, name, status)


def _check(driver: ctypes.CDLL, name: str, status: int) -> None:
    if not status:
        return
    title, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(title))
    driver.cuGetErrorString(status, ctypes.byref(text))
    words = [(part.value or b"?").decode() for part in (title, text)]
    raise CudaError(f"{name} failed: {words[0]} ({status}): {words[1]}.")


def _made(kind: Any, name: str, *arguments: Any) -> Any:
    """What a function writes to its first argument."""
    place = kind()
    call(name, ctypes.byref(place), *arguments)
    return place if kind is SharedHandle else place.value


class Device:
    """A GPU, by its number among those that this process sees. Between `enter` and `leave` its context is current."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._ordinal = _made(_int, "cuDeviceGet", index)
        self._context = _made(_handle, "cuDevicePrimaryCtxRetain", self._ordinal)
        self.num_multiprocessors: int = self._attribute(_NUM_MULTIPROCESSORS)
        self.capability: tuple[int, int] = self._attribute(_MAJOR), self._attribute(_MINOR)

    def _attribute(self, number: int) -> Any:
        return _made(_int, "cuDeviceGetAttribute", number, self._ordinal)

    def enter(self) -> None:
        """A thread that has not called CUDA yet has no context, and one that has may be on another device."""
        call("cuCtxPushCurrent_v2", self._context)

    def leave(self) -> None:
        """Back to the context of before."""
        call("cuCtxPopCurrent_v2", ctypes.byref(_handle()))

    def finish(self) -> None:
        """Wait for everything that this process has enqueued on the device."""
        call("cuCtxSynchronize")

    def release(self) -> None:
        """Give the context back; torch keeps its own hold on it."""
        call("cuDevicePrimaryCtxRelease_v2", self._ordinal)

    # --- memory: what is shared is the whole allocation that an address is in

    def allocate(self, num_bytes: int) -> int:
        """Memory of its own. The driver puts what is below 2 MB together: ask for multiples of that."""
        return int(_made(_address, "cuMemAlloc_v2", num_bytes))

    def free(self, address: int) -> None:
        """Give memory back, once no other process has it open."""
        call("cuMemFree_v2", address)

    def share(self, address: int) -> bytes:
        """What another process opens memory with."""
        return bytes(_made(SharedHandle, "cuIpcGetMemHandle", address))

    def open(self, handle: bytes) -> int:
        """The address here of another process's memory."""
        shared = SharedHandle.from_buffer_copy(handle)
        return int(_made(_address, "cuIpcOpenMemHandle_v2", shared, _LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """The end of `open`."""
        call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy."""
        call("cuMemcpyAsync", target, source, num_bytes, stream)

    # --- events

    def make_event(self) -> int:
        """An event that other processes can wait for."""
        return int(_made(_handle, "cuEventCreate", _DISABLE_TIMING | _INTERPROCESS))

    def share_event(self, event: int) -> bytes:
        """What another process opens an event with."""
        return bytes(_made(SharedHandle, "cuIpcGetEventHandle", event))

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        return int(_made(_handle, "cuIpcOpenEventHandle", SharedHandle.from_buffer_copy(handle)))

    def destroy_event(self, event: int) -> None:
        """An own one, or one that was opened."""
        call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Enqueue an event behind what is in a stream."""
        call("cuEventRecord", event, stream)

    def wait(self, event: int, stream: int) -> None:
        """Let what comes next in a stream wait for the last record of an event."""
        call("cuStreamWaitEvent", stream, event, 0)

    # --- kernels

    def load(self, code: str, name: str) -> int:
        """A function from PTX, which the driver compiles for this device. It stays as long as the context."""
        module = _made(_handle, "cuModuleLoadData", code.encode())
        return int(_made(_handle, "cuModuleGetFunction", module, name.encode()))

    def launch(self, function: int, num_rows: int, num_threads: int, stream: int, words: Sequence[int]) -> None:
        """Enqueue a kernel that takes 64-bit integers only."""
        values = (ctypes.c_int64 * len(words))(*words)
        begin = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(words))(*range(begin, begin + 8 * len(words), 8))
        call("cuLaunchKernel", function, num_rows, 1, 1, num_threads, 1, 1, 0, stream, places, None)
