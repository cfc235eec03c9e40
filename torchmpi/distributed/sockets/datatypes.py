"""Types and operations under the names MPI has for them, and what callers may pass as a buffer."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .requests import CommunicationError

_PyBUF_WRITE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object


class Datatype:
    """The type of one element."""

    __slots__ = ("itemsize", "name", "numpy")

    def __init__(self, name: str, numpy: str) -> None:
        self.name, self.numpy = name, np.dtype(numpy)
        self.itemsize = self.numpy.itemsize

    def __repr__(self) -> str:
        return f"<{self.name}>"


DATATYPES = {
    name: Datatype(name, numpy)
    for name, numpy in {
        "BYTE": "u1", "INT": "i4", "FLOAT": "f4", "DOUBLE": "f8", "C_FLOAT_COMPLEX": "c8", "C_DOUBLE_COMPLEX": "c16",
        "INT8_T": "i1", "INT16_T": "i2", "INT32_T": "i4", "INT64_T": "i8",
        "UINT8_T": "u1", "UINT16_T": "u2", "UINT32_T": "u4", "UINT64_T": "u8",
    }.items()
}  # fmt: skip
BYTE = DATATYPES["BYTE"]


class Op(NamedTuple):
    """A reduction: of arrays element by element, and of two Python objects."""

    name: str
    ufunc: Callable[..., Any]
    of_objects: Callable[[Any, Any], Any]

    def __call__(self, a: Any, b: Any) -> Any:
        """Combine two objects."""
        return self.of_objects(a, b)


OPS = {
    op.name: op
    for op in (
        Op("SUM", np.add, operator.add),
        Op("PROD", np.multiply, operator.mul),
        Op("MIN", np.minimum, min),
        Op("MAX", np.maximum, max),
        Op("BAND", np.bitwise_and, operator.and_),
        Op("BOR", np.bitwise_or, operator.or_),
        Op("BXOR", np.bitwise_xor, operator.xor),
        Op("LAND", np.logical_and, lambda a, b: bool(a) and bool(b)),
        Op("LOR", np.logical_or, lambda a, b: bool(a) or bool(b)),
        Op("LXOR", np.logical_xor, lambda a, b: bool(a) != bool(b)),
    )
}


class _InPlace:
    def __repr__(self) -> str:
        return "<IN_PLACE>"


IN_PLACE = _InPlace()
"""As a send buffer: what is to be sent lies in the receive buffer."""


class buffer:
    """Stands where ``mpi4py.MPI.buffer`` does."""

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> memoryview:
        """Memory by its address; the caller keeps it alive."""
        if not nbytes:
            return memoryview(bytearray())
        return _memory_at(address, nbytes, 0 if readonly else _PyBUF_WRITE)  # type: ignore[no-any-return]


class BufferSpec(NamedTuple):
    """What a caller passed: its bytes, and what they are."""

    view: memoryview
    datatype: Datatype

    def array(self) -> np.ndarray:
        """The elements, over the same memory."""
        return np.frombuffer(self.view, self.datatype.numpy)


def buffer_of(given: Any, *, written: bool = False) -> BufferSpec:
    """A buffer passed as ``array``, ``(array, type)`` or ``(array, count, type)``.

    >>> buffer_of((np.zeros(3, np.float32), 2, DATATYPES["FLOAT"])).view.nbytes
    8
    """
    if not isinstance(given, (tuple, list)):
        view = _bytes_of(given)
        found = BufferSpec(view, _type_of(given))
    else:
        view, datatype = _bytes_of(given[0]), given[-1]
        if not isinstance(datatype, Datatype) or len(given) > 3:
            raise CommunicationError(f"{given!r} is no buffer: pass (memory, type) or (memory, count, type)")
        if len(given) == 3:
            num_bytes = given[1] * datatype.itemsize
            if num_bytes > len(view):
                raise CommunicationError(f"{given[1]} elements of {datatype} are more than the {len(view)} bytes given")
            view = view[:num_bytes]
        found = BufferSpec(view, datatype)
    if written and view.readonly and len(view):
        raise CommunicationError("the memory to receive into cannot be written")
    return found


def blocks_of(given: Any, num_rows: int, *, written: bool = False) -> list[memoryview]:
    """The parts of a buffer passed as ``(memory, counts, displacements, type)``, or else of equal length."""
    if isinstance(given, (tuple, list)) and len(given) > 2 and not isinstance(given[1], int):
        memory, counts, displacements, datatype = given
        size = datatype.itemsize
        view = buffer_of((memory, datatype), written=written).view
        if any((begin + count) * size > len(view) for count, begin in zip(counts, displacements, strict=True)):
            raise CommunicationError(f"blocks of {counts} at {displacements} exceed the {len(view)} bytes given")
        return [view[begin * size : (begin + count) * size] for count, begin in zip(counts, displacements, strict=True)]
    view = buffer_of(given, written=written).view
    length, rest = divmod(len(view), num_rows)
    if rest:
        raise CommunicationError(f"{len(view)} bytes cannot be split evenly between {num_rows} ranks")
    return [view[length * place : length * (place + 1)] for place in range(num_rows)]


def combine(parts: Sequence[np.ndarray], op: Op, out: np.ndarray) -> None:
    """Combine in the order given into `out`, which may be one of the parts.

    >>> out = np.zeros(2); combine([np.ones(2), np.full(2, 3.0)], OPS["SUM"], out); out
    array([4., 4.])
    """
    if len(parts) == 1:
        out[:] = parts[0]
        return
    if len(parts) == 2:
        op.ufunc(parts[0], parts[1], out=out)
        return
    result = op.ufunc(parts[0], parts[1]).astype(out.dtype, copy=False)
    for part in parts[2:]:
        op.ufunc(result, part, out=result)
    out[:] = result


def _bytes_of(memory: Any) -> memoryview:
    view = memory if type(memory) is memoryview else memoryview(memory)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise CommunicationError("the memory of a buffer must be contiguous")
    if not view.nbytes:
        return memoryview(bytearray())
    # Not view.cast(): it does not know complex numbers.
    return np.asarray(view).reshape(-1).view(np.uint8).data


def _type_of(memory: Any) -> Datatype:
    if not isinstance(memory, np.ndarray):
        return BYTE
    found = next((datatype for datatype in DATATYPES.values() if datatype.numpy == memory.dtype), None)
    if found is None:
        raise CommunicationError(f"there is no MPI type for {memory.dtype}: pass (array.view(numpy.uint8), BYTE)")
    return found
