"""Numba intrinsics: raw memory, fields, atomic access, cache control, and calls of the C library."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...tensors.writable import FUTEX
from ..compiler.simd_ir import Lanes
from ..compiler.target import intrinsic
from .kernel_sets import DELAYS

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


def _delay(builder: Any) -> None:
    """Generate a pause of random length, mostly none, if the kernels are compiled with delays."""
    if DELAYS:
        known = builder.module.globals.get(_DELAY)
        builder.call(known or _delay_function(builder.module), [])


_DELAY = "torchmpi_delay"
_DELAY_RANGE, _SLEEPS, _YIELDS = 1024, 3, 60  # of so many delays so many sleep, and so many more yield
_DELAY_MICROSECONDS = 80


def _delay_function(module: Any) -> Any:
    """Add a function that sleeps, yields or does nothing; its numbers depend on the seed and on the process."""
    number = ir.IntType(32)
    seed = int.from_bytes(hashlib.sha256(f"{DELAYS} {module.name}".encode()).digest()[:8], "little")
    state = ir.GlobalVariable(module, _WORD, f"{_DELAY}_state")
    state.linkage, state.initializer = "internal", _WORD(seed)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), _DELAY)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    following = builder.add(builder.mul(builder.load(state), _WORD(6364136223846793005)), _WORD(1442695040888963407))
    builder.store(following, state)
    process = cgutils.get_or_insert_function(module, ir.FunctionType(number, []), "getpid")
    mixed = builder.xor(
        following, builder.mul(builder.zext(builder.call(process, []), _WORD), _WORD(0x9E3779B97F4A7C15))
    )
    drawn = builder.urem(builder.lshr(builder.mul(mixed, _WORD(0xD6E8FEB86659FD93)), _WORD(33)), _WORD(_DELAY_RANGE))
    with builder.if_then(builder.icmp_unsigned("<", drawn, _WORD(_SLEEPS + _YIELDS))):
        yields = cgutils.get_or_insert_function(module, ir.FunctionType(number, []), "sched_yield")
        builder.call(yields, [])
        with builder.if_then(builder.icmp_unsigned("<", drawn, _WORD(_SLEEPS))):
            sleeps = cgutils.get_or_insert_function(module, ir.FunctionType(number, [number]), "usleep")
            builder.call(sleeps, [number(_DELAY_MICROSECONDS)])
    builder.ret_void()
    return function


@intrinsic
def load(address):
    """Load a 64-bit integer."""

    def generate(context, builder, signature, arguments):
        return builder.load(_pointer(builder, arguments[0]), align=8)

    return types.int64(types.int64), generate


@intrinsic
def store(address, value):
    """Store a 64-bit integer."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], _pointer(builder, arguments[0]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_acquire(address):
    """Load a 64-bit integer; earlier writes of its writer are visible to later reads."""

    def generate(context, builder, signature, arguments):
        _delay(builder)
        return builder.load_atomic(_pointer(builder, arguments[0]), ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(address, value):
    """Store a 64-bit integer after all earlier reads and writes."""

    def generate(context, builder, signature, arguments):
        _delay(builder)
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), ordering="release", align=8)
        _delay(builder)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def field_address(record, field):
    """Return the address of a field."""

    def generate(context, builder, signature, arguments):
        return builder.add(arguments[0], builder.mul(arguments[1], _WORD(8)))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def copy(target, source, num_bytes):
    """Copy with the C library's memcpy."""

    def generate(context, builder, signature, arguments):
        target, source = (builder.inttoptr(address, _BYTE_POINTER) for address in arguments[:2])
        _delay(builder)
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _lines_copier(*, past: bool) -> Any:
    """Generate a copy of four cache lines; with `past` by non-temporal stores to an aligned target."""

    def generate(context, builder, signature, arguments):
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
def copy_lines(target, source):
    """Copy four cache lines of 64 bytes."""
    return types.void(types.int64, types.int64), _lines_copier(past=False)


@intrinsic
def copy_lines_past(target, source):
    """Copy four cache lines to an aligned target with non-temporal stores, which do not read the target first."""
    return types.void(types.int64, types.int64), _lines_copier(past=True)


def _lines_prefetcher(is_write: int, locality: int) -> Any:
    """Generate prefetches of four cache lines; the address may be invalid."""

    def generate(context, builder, signature, arguments):
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
def prefetch_lines(address):
    """Prefetch four cache lines for reading, into the second-level cache."""
    return types.void(types.int64), _lines_prefetcher(0, 2)


@intrinsic
def claim_lines(address):
    """Prefetch four cache lines for writing."""
    return types.void(types.int64), _lines_prefetcher(1, 3)


def _nanoseconds(builder: Any) -> Any:
    """Generate a reading of the monotonic clock."""
    kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _WORD.as_pointer()])
    function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
    time = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
    fields = builder.bitcast(time, _WORD.as_pointer())
    builder.call(function, [ir.Constant(ir.IntType(32), 1), fields])  # CLOCK_MONOTONIC
    seconds, rest = (builder.load(builder.gep(fields, [_WORD(index)])) for index in range(2))
    return builder.add(builder.mul(seconds, _WORD(1_000_000_000)), rest)


@intrinsic
def now():
    """Return nanoseconds of the monotonic clock."""

    def generate(context, builder, signature, arguments):
        return _nanoseconds(builder)

    return types.int64(), generate


@intrinsic
def ticks():
    """Return the time stamp counter of the processor; where it cannot be read, the monotonic clock with a minus."""

    def generate(context, builder, signature, arguments):
        if platform.machine() not in ("x86_64", "AMD64"):
            return builder.neg(_nanoseconds(builder))
        kind = ir.FunctionType(_WORD, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@intrinsic
def fence():
    """Order all earlier memory accesses before all later ones, including non-temporal stores."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def reduce(function, outs, num_outs, sources, num_sources, numel):
    """Call a reduction function by its address (see torchmpi.shared_memory.kernels.reduction)."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 5)
        _delay(builder)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def pointer_to(number: Any) -> Any:
    """Return an intrinsic that makes an address a pointer to numbers of a Numba type, which can be indexed."""

    @intrinsic
    def pointer(address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.int64), generate

    return pointer


@intrinsic
def float_of_bits(bits):
    """Reinterpret an unsigned 32-bit integer as a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(number):
    """Return the bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def half_conversions(*, has_half: bool) -> tuple[Any, Any]:
    """Return intrinsics that convert the bits of a float16 to float32, and that round back.

    Without `has_half` they use integer arithmetic, for processors without instructions for float16.
    """
    half, one_half = ir.HalfType(), ir.VectorType(ir.HalfType(), 1)
    number, one_number = ir.FloatType(), ir.VectorType(ir.FloatType(), 1)

    @intrinsic
    def widened(bits):
        def generate(context, builder, signature, arguments):
            if has_half:
                return builder.fpext(builder.bitcast(arguments[0], half), number)
            lanes = Lanes(builder, "f16", has_half=False)
            return builder.bitcast(lanes.widen_half(builder.bitcast(arguments[0], one_half)), number)

        return types.float32(types.uint16), generate

    @intrinsic
    def narrowed(value):
        def generate(context, builder, signature, arguments):
            if has_half:
                return builder.bitcast(builder.fptrunc(arguments[0], half), ir.IntType(16))
            lanes = Lanes(builder, "f16", has_half=False)
            return builder.bitcast(lanes.narrow_half(builder.bitcast(arguments[0], one_number)), ir.IntType(16))

        return types.uint16(types.float32), generate

    return widened, narrowed


@intrinsic
def compare_and_swap(address, expected, value):
    """Store `value` if the memory contains `expected`, atomically; return the previous value."""

    def generate(context, builder, signature, arguments):
        pair = builder.cmpxchg(_pointer(builder, arguments[0]), arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def call_rule(function, arrays, sent, numel, coefficients, steps):
    """Call a rule of the parameter server by its address (see torchmpi.parameterserver.kernels.server_rules)."""

    def generate(context, builder, signature, arguments):
        results = [cgutils.alloca_once(builder, _WORD), cgutils.alloca_once(builder, _BYTE_POINTER)]
        kind = ir.FunctionType(ir.IntType(32), [*(result.type for result in results), *[_WORD] * 5])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [*results, *arguments[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _caller(*kinds: Any) -> Any:
    """Generate the call of a function of MPI or of CUDA's driver by its address, which returns its error.

    Handles are passed as words. Where they are an `int`, as in MPICH, the functions ignore the upper half.
    """

    def generate(context, builder, signature, arguments):
        values = [
            builder.trunc(value, kind) if kind == _INT else value
            for value, kind in zip(arguments[1:], kinds, strict=True)
        ]
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(_INT, kinds).as_pointer())
        return builder.sext(builder.call(pointer, values), _WORD)

    return generate


@intrinsic
def call_isend(function, memory, count, kind, peer, tag, comm, request):
    """Call MPI_Isend or MPI_Irecv by its address; return its error."""
    return types.int64(*[types.int64] * 8), _caller(_WORD, _INT, _WORD, _INT, _INT, _WORD, _WORD)


@intrinsic
def call_test(function, request, status):
    """Call MPI_Test by its address; return its error, or -1 while the request is not complete."""
    call = _caller(_WORD, _WORD, _WORD)

    def generate(context, builder, signature, arguments):
        function, request, status = arguments
        flag = cgutils.alloca_once(builder, _INT)
        error = call(context, builder, signature, [function, request, builder.ptrtoint(flag, _WORD), status])
        waits = builder.and_(
            builder.icmp_signed("==", error, _WORD(0)), builder.icmp_signed("==", builder.load(flag), _INT(0))
        )
        return builder.select(waits, _WORD(-1), error)

    return types.int64(*[types.int64] * 3), generate


@intrinsic
def call_get_count(function, status, kind):
    """Call MPI_Get_count by its address; return the count."""
    call = _caller(_WORD, _WORD, _WORD)

    def generate(context, builder, signature, arguments):
        function, status, kind = arguments
        count = cgutils.alloca_once(builder, _INT)
        call(context, builder, signature, [function, status, kind, builder.ptrtoint(count, _WORD)])
        return builder.sext(builder.load(count), _WORD)

    return types.int64(*[types.int64] * 3), generate


@intrinsic
def call_batch(function, stream, count, operations):
    """Call cuStreamBatchMemOp by its address, without flags; return its error."""
    call = _caller(_WORD, _INT, _WORD, _INT)

    def generate(context, builder, signature, arguments):
        return call(context, builder, signature, [*arguments, _WORD(0)])

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def call_launch(function, kernel, num_blocks, num_threads, stream, parameters):
    """Call cuLaunchKernel by its address, for blocks and threads in one dimension; return its error."""
    call = _caller(_WORD, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _WORD, _WORD, _WORD)

    def generate(context, builder, signature, arguments):
        function, kernel, num_blocks, num_threads, stream, parameters = arguments
        one, none = _WORD(1), _WORD(0)
        grid = [num_blocks, one, one, num_threads, one, one]
        return call(context, builder, signature, [function, kernel, *grid, none, stream, parameters, none])

    return types.int64(*[types.int64] * 6), generate


@intrinsic
def this_core():
    """Return the core on which this thread runs now."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        number = builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_getcpu"), [])
        return builder.sext(number, _WORD)

    return types.int64(), generate


@intrinsic
def give_way():
    """Yield the core to another thread (`sched_yield`)."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def read_memory(process, target, source, num_bytes):
    """Copy from the memory of another process; return the number of bytes, -1 if the system refuses."""

    def generate(context, builder, signature, arguments):
        process, target, source, num_bytes = arguments
        vector = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 4))  # two pairs of address and length: local, remote
        fields = builder.bitcast(vector, _WORD.as_pointer())
        for index, value in enumerate((target, num_bytes, source, num_bytes)):
            builder.store(value, builder.gep(fields, [_WORD(index)]))
        number = ir.IntType(32)
        kind = ir.FunctionType(_WORD, [number, fields.type, _WORD, fields.type, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "process_vm_readv")
        remote = builder.gep(fields, [_WORD(2)])
        return builder.call(function, [builder.trunc(process, number), fields, _WORD(1), remote, _WORD(1), _WORD(0)])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


def _sleep(builder: Any, microseconds: Any) -> None:
    """Generate a call of `usleep`."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT, [_INT]), "usleep")
    builder.call(function, [builder.trunc(microseconds, _INT)])


@intrinsic
def sleep(microseconds):
    """Sleep (`usleep`)."""

    def generate(context, builder, signature, arguments):
        _sleep(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _futex(builder: Any, address: Any, operation: int, value: Any, time: Any) -> None:
    """Generate a call of `futex` on the lower half of a word that processes share."""
    kind = ir.FunctionType(_WORD, [_WORD], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    builder.call(function, [_WORD(FUTEX), address, _WORD(operation), value, time])


@intrinsic
def sleep_until_woken(address, value, nanoseconds):
    """Sleep while the word has this value and nobody calls `wake`, for less than a second; it may end sooner."""

    def generate(context, builder, signature, arguments):
        address, value, nanoseconds = arguments
        if FUTEX is None:
            _sleep(builder, builder.udiv(nanoseconds, _WORD(1000)))
            return context.get_dummy_value()
        time = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
        fields = builder.bitcast(time, _WORD.as_pointer())
        for index, part in enumerate((_WORD(0), nanoseconds)):
            builder.store(part, builder.gep(fields, [_WORD(index)]))
        _futex(builder, address, 0, value, builder.ptrtoint(time, _WORD))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def wake(address):
    """Wake all threads, of any process, that sleep on a word."""

    def generate(context, builder, signature, arguments):
        if FUTEX is not None:
            _futex(builder, arguments[0], 1, _WORD(0x7FFFFFFF), _WORD(0))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def pause():
    """Issue the processor's hint for a polling loop."""

    def generate(context, builder, signature, arguments):
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
