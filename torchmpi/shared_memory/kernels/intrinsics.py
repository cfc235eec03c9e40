"""What Numba has no words for: raw addresses, atomic loads and stores, the processor's pause and the kernel's sleep."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

_WORD = ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def intrinsic(function: Any) -> Any:
    """Numba's, without the types it gives to what it makes: a call has one argument less than the definition."""
    return _intrinsic(function)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def load(typing_context, address):  # type: ignore[no-untyped-def]
    """A word."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load(_pointer(builder, arguments[0]), align=8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Write a word."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store(arguments[1], _pointer(builder, arguments[0]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_acquire(typing_context, address):  # type: ignore[no-untyped-def]
    """A word; what its writer wrote before it is seen by what we read after it."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_pointer(builder, arguments[0]), ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Write a word after everything we have read and written before."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def copy(typing_context, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """The C library's memcpy."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target, source = (builder.inttoptr(address, _BYTE_POINTER) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _lines_copier(*, past: bool) -> Any:
    """Code that copies four lines of 64 bytes: to an aligned target past the caches, or to any."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        line = ir.VectorType(_WORD, 8).as_pointer()
        target, source = (builder.inttoptr(address, line) for address in arguments)
        values = [builder.load(builder.gep(source, [_WORD(index)]), align=1) for index in range(4)]
        for index, value in enumerate(values):
            written = builder.store(value, builder.gep(target, [_WORD(index)]), align=64 if past else 1)
            if past:
                written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return generate


@intrinsic
def copy_lines(typing_context, target, source):  # type: ignore[no-untyped-def]
    """Copy four lines of 64 bytes."""
    return types.void(types.int64, types.int64), _lines_copier(past=False)


@intrinsic
def copy_lines_past(typing_context, target, source):  # type: ignore[no-untyped-def]
    """Copy four lines of 64 bytes to an aligned target, past the caches: what is there is not fetched first."""
    return types.void(types.int64, types.int64), _lines_copier(past=True)


def _lines_prefetcher(is_write: int, locality: int) -> Any:
    """Code that asks for four lines of 64 bytes; there need be no memory."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        lines = builder.inttoptr(arguments[0], _BYTE_POINTER)
        for index in range(4):
            line = builder.gep(lines, [_WORD(64 * index)])
            builder.call(function, [line, number(is_write), number(locality), number(1)])  # 1: no instructions
        return context.get_dummy_value()

    return generate


@intrinsic
def ask_lines(typing_context, address):  # type: ignore[no-untyped-def]
    """Ask for four lines that will be read, into the second cache."""
    return types.void(types.int64), _lines_prefetcher(0, 2)


@intrinsic
def claim_lines(typing_context, address):  # type: ignore[no-untyped-def]
    """Ask for four lines that will be written to."""
    return types.void(types.int64), _lines_prefetcher(1, 3)


@intrinsic
def now(typing_context):  # type: ignore[no-untyped-def]
    """Nanoseconds, of a clock that only goes forward."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _WORD.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        time = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
        fields = builder.bitcast(time, _WORD.as_pointer())
        builder.call(function, [ir.Constant(ir.IntType(32), 1), fields])  # CLOCK_MONOTONIC
        seconds, rest = (builder.load(builder.gep(fields, [_WORD(index)])) for index in range(2))
        return builder.add(builder.mul(seconds, _WORD(1_000_000_000)), rest)

    return types.int64(), generate


@intrinsic
def fence(typing_context):  # type: ignore[no-untyped-def]
    """Everything written before is seen by others before anything that is written after, past the caches or not."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def reduce(typing_context, function, outs, num_outs, sources, num_sources, numel):  # type: ignore[no-untyped-def]
    """Call a reducer by its address (see torchmpi.shared_memory.kernels.reduction)."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def load_number(typing_context, address):  # type: ignore[no-untyped-def]
    """A double."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load(builder.inttoptr(arguments[0], ir.DoubleType().as_pointer()), align=8)

    return types.float64(types.int64), generate


@intrinsic
def store_number(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Write a double."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.DoubleType().as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), generate


@intrinsic
def compare_and_swap(typing_context, address, expected, value):  # type: ignore[no-untyped-def]
    """Write `value` if `expected` is there, in one step; what was there."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pair = builder.cmpxchg(_pointer(builder, arguments[0]), arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def call_rule(typing_context, function, targets, sources, data, numel, coefficients):  # type: ignore[no-untyped-def]
    """Call a rule of the parameter server by its address (see torchmpi.shared_memory.kernels.server_rules)."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def this_core(typing_context):  # type: ignore[no-untyped-def]
    """The core on which this runs now."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [])
        number = builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_getcpu"), [])
        return builder.sext(number, _WORD)

    return types.int64(), generate


@intrinsic
def give_way(typing_context):  # type: ignore[no-untyped-def]
    """Let another thread have this core, if one wants it."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def read_memory(typing_context, process, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy out of the memory of another process; gives how many bytes, -1 if the system refuses."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        process, target, source, num_bytes = arguments
        vector = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 4))  # two of address and length: here, and there
        fields = builder.bitcast(vector, _WORD.as_pointer())
        for index, value in enumerate((target, num_bytes, source, num_bytes)):
            builder.store(value, builder.gep(fields, [_WORD(index)]))
        number = ir.IntType(32)
        kind = ir.FunctionType(_WORD, [number, fields.type, _WORD, fields.type, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "process_vm_readv")
        there = builder.gep(fields, [_WORD(2)])
        return builder.call(function, [builder.trunc(process, number), fields, _WORD(1), there, _WORD(1), _WORD(0)])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def sleep(typing_context, microseconds):  # type: ignore[no-untyped-def]
    """Sleep."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        function = cgutils.get_or_insert_function(builder.module, kind, "usleep")
        builder.call(function, [builder.trunc(arguments[0], ir.IntType(32))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the processor that this is a loop that waits."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        machine, void = platform.machine(), ir.VoidType()
        if machine in ("x86_64", "AMD64"):
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(void, []), "llvm.x86.sse2.pause")
            builder.call(function, [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(void, [ir.IntType(32)])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(function, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), generate
