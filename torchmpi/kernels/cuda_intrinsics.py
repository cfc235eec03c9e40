"""What kernels on the GPU need and Python has no words for: memory at an address, and 16-bit floats from their bits.

Under Numba's simulator (NUMBA_ENABLE_CUDASIM=1) the same names work on addresses of the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types

try:  # numba-cuda has a registry of its own, the CUDA target that comes with Numba shares Numba's
    from numba.cuda.extending import intrinsic
except ImportError:
    from numba.extending import intrinsic

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


if config.ENABLE_CUDASIM:

    def load(address: int) -> tuple[Any, Any]:
        assert address % UNIT_BYTES == 0
        words = (ctypes.c_uint64 * 2).from_address(address)
        return np.uint64(words[0]), np.uint64(words[1])

    def store(address: int, first: Any, second: Any) -> None:
        assert address % UNIT_BYTES == 0
        words = (ctypes.c_uint64 * 2).from_address(address)
        words[0], words[1] = int(first), int(second)

    def store_lane(bits: int) -> Function:
        kind = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}[bits]

        def store(address: int, value: Any) -> None:
            kind.from_address(address).value = int(value) & ((1 << bits) - 1)

        return store

    def widen_half(bits: Any) -> Any:
        return np.float32(np.uint16(bits).view(np.float16))

    def narrow_half(value: Any) -> Any:
        return np.uint64(np.float16(value).view(np.uint16))

    def multiply_single(a: Any, b: Any) -> Any:
        return a * b

    multiply_double = multiply_single
else:
    from numba.cuda import libdevice

    # Their products are never fused with a sum that follows.
    multiply_single, multiply_double = libdevice.fmul_rn, libdevice.dmul_rn

    load, store = intrinsic(_load), intrinsic(_store)
    widen_half, narrow_half = intrinsic(_widen), intrinsic(_narrow)

    def store_lane(bits: int) -> Function:
        made: Function = intrinsic(_store_lane(bits))
        return made
