"""What kernels on the GPU need and Python has no words for: memory at an address, and 16-bit floats from their bits.

Under Numba's simulator (NUMBA_ENABLE_CUDASIM=1) the same names work on addresses of the host.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types

UNIT_BYTES = 16
"""The widest load and store there is: two words."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
Function = Callable[..., Any]


def _memory(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind, addrspace=1))


def _load(typingctx: Any, address: Any) -> Any:
    """The two words at an address that is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = builder.load(_memory(builder, arguments[0], ir.VectorType(_I64, 2)), align=UNIT_BYTES)
        words = [builder.extract_element(pair, ir.Constant(_I32, index)) for index in (0, 1)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(types.int64), codegen


def _store(typingctx: Any, address: Any, first: Any, second: Any) -> Any:
    """Write two words to an address that is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(_I64, 2)
        pair: Any = ir.Constant(kind, ir.Undefined)
        for index in (0, 1):
            pair = builder.insert_element(pair, arguments[1 + index], ir.Constant(_I32, index))
        builder.store(pair, _memory(builder, arguments[0], kind), align=UNIT_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64, types.uint64), codegen


def _store_lane(bits: int) -> Function:
    def store_lane(typingctx: Any, address: Any, value: Any) -> Any:
        """Write the lowest bits of a word to an address that is a multiple of their length."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            value = builder.trunc(arguments[1], kind) if bits < 64 else arguments[1]
            builder.store(value, _memory(builder, arguments[0], kind), align=bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64), codegen

    return store_lane


def _widen(typingctx: Any, bits: Any) -> Any:
    """The bits of a float16 as a float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(builder.trunc(arguments[0], ir.IntType(16)), ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint64), codegen


def _narrow(typingctx: Any, value: Any) -> Any:
    """A float32 as the bits of a float16, rounded to even."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.zext(builder.bitcast(half, ir.IntType(16)), _I64)

    return types.uint64(types.float32), codegen


# --- the same under the simulator


def _load_here(address: int) -> tuple[Any, Any]:
    assert address % UNIT_BYTES == 0
    words = (ctypes.c_uint64 * 2).from_address(address)
    return np.uint64(words[0]), np.uint64(words[1])


def _store_here(address: int, first: Any, second: Any) -> None:
    assert address % UNIT_BYTES == 0
    words = (ctypes.c_uint64 * 2).from_address(address)
    words[0], words[1] = int(first), int(second)


def _store_lane_here(bits: int) -> Function:
    kind: Any = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}[bits]

    def store_lane(address: int, value: Any) -> None:
        assert address % (bits // 8) == 0
        kind.from_address(address).value = int(value) & ((1 << bits) - 1)

    return store_lane


def _widen_here(bits: Any) -> Any:
    return np.float32(np.uint16(bits).view(np.float16))


def _narrow_here(value: Any) -> Any:
    return np.uint64(np.float16(value).view(np.uint16))


def _multiply_here(a: Any, b: Any) -> Any:
    return a * b


def _registry() -> Any:
    """numba-cuda has one of its own, the CUDA target that comes with Numba shares Numba's."""
    for name in ("numba.cuda.extending", "numba.extending"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).intrinsic
    raise ImportError("this Numba has no place for intrinsics")


load: Any
store: Any
store_lane: Callable[[int], Function]
widen_half: Any
narrow_half: Any
multiply_single: Any
"""Never fused with a sum that follows, unlike ``a * b``."""
multiply_double: Any

if getattr(config, "ENABLE_CUDASIM", False):
    load, store, store_lane = _load_here, _store_here, _store_lane_here
    widen_half, narrow_half = _widen_here, _narrow_here
    multiply_single = multiply_double = _multiply_here
else:
    from numba.cuda import libdevice

    _intrinsic = _registry()
    load, store = _intrinsic(_load), _intrinsic(_store)
    widen_half, narrow_half = _intrinsic(_widen), _intrinsic(_narrow)
    multiply_single, multiply_double = libdevice.fmul_rn, libdevice.dmul_rn

    def store_lane(bits: int) -> Function:
        """Return the intrinsic that stores the lowest bits of a word."""
        made: Function = _intrinsic(_store_lane(bits))
        return made
