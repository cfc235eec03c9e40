"""Generation of SIMD code in LLVM: load, combine and store vectors of numbers of one kind.

LLVM's own vectorizer would check at run time whether results overlap the operands, and use scalar code where they may.
So vectors are generated explicitly; the same code with fewer lanes handles the end of a buffer. The code does not
depend on the processor: LLVM splits the vectors into the registers of the machine.

There are no fast-math flags: nothing is reordered or fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from llvmlite import ir

BYTE, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()


Body = Callable[[Any, list[Any]], list[Any]]


class Kind(NamedTuple):
    """Types of one lane of a vector."""

    memory_type: Any
    wide_type: Any  # for arithmetic
    itemsize: int
    wide_itemsize: int


KINDS = {
    "f64": Kind(DOUBLE, DOUBLE, 8, 8),
    "f32": Kind(FLOAT, FLOAT, 4, 4),
    "f16": Kind(ir.HalfType(), FLOAT, 2, 4),
    "bf16": Kind(I16, FLOAT, 2, 4),
    "i8": Kind(BYTE, BYTE, 1, 1),
    "i16": Kind(I16, I16, 2, 2),
    "i32": Kind(I32, I32, 4, 4),
    "i64": Kind(I64, I64, 8, 8),
}


def constant(vector: Any, value: int | float) -> Any:
    """Return a vector with the same number in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def pick(builder: Any, first: Any, second: Any, order: Iterable[int]) -> Any:
    """Select lanes of two vectors by their numbers."""
    indices = list(order)
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def spread(builder: Any, scalar: Any, vector: Any) -> Any:
    """Copy a number that is computed at run time to every lane."""
    one_lane = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return pick(builder, one_lane, one_lane, [0] * vector.count)


def loop(builder: Any, bounds: tuple[Any, Any, Any], carried: list[Any], body: Body) -> tuple[Any, list[Any]]:
    """Emit ``for index in range(*bounds): carried = body(index, carried)``; return the final values of both."""
    begin, end, step = bounds
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(begin, before)
    current = [builder.phi(value.type) for value in carried]
    for phi, value in zip(current, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    changed = body(index, current)
    index.add_incoming(builder.add(index, step), builder.block)
    for phi, value in zip(current, changed, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return index, current


def in_vectors(builder: Any, num_bytes: Any, sizes: tuple[int, int], body: Callable[[int, Any], Any]) -> None:
    """Emit loops over ``body(lanes, offset)`` with decreasing numbers of lanes; each continues after the previous one.

    `sizes` are the bytes of a lane, and the number of lanes of the first loop.
    """
    lane_bytes, lanes = sizes
    offset = ir.Constant(I64, 0)
    while lanes:
        step = lanes * lane_bytes
        end = builder.and_(num_bytes, ir.Constant(I64, -step))

        def block(offset: Any, _: list[Any], lanes: int = lanes) -> list[Any]:
            body(lanes, offset)
            return []

        offset, _ = loop(builder, (offset, end, ir.Constant(I64, step)), [], block)
        lanes = lanes // 4 or (1 if lanes > 1 else 0)


class Lanes:
    """Code that loads, combines and stores vectors of numbers of one kind.

    A vector of bfloat16 becomes two of float32, of its even and its odd lanes: this is cheaper than a vector in the
    order of memory.
    """

    def __init__(self, builder: Any, name: str, has_half: bool) -> None:
        self.builder, self.name, self.has_half = builder, name, has_half
        self.kind = KINDS[name]
        self.is_float = name in ("f64", "f32", "f16", "bf16")

    def load(self, base: Any, offset: Any, count: int) -> list[Any]:
        """Load `count` numbers at `base + offset` bytes, and widen them; no alignment is required."""
        b = self.builder
        address = b.bitcast(b.gep(base, [offset]), ir.VectorType(self.kind.memory_type, count).as_pointer())
        value = b.load(address, align=1)
        if self.name == "bf16":
            return self._widen_bfloat(value)
        if self.name == "f16":
            return [b.fpext(value, _like(value, FLOAT)) if self.has_half else self.widen_half(value)]
        return [value]

    def store(self, values: list[Any], base: Any, offset: Any) -> None:
        """Narrow and store numbers."""
        b = self.builder
        value = values[0]
        if self.name == "bf16":
            value = self._narrow_bfloat(values)
        if self.name == "f16":
            value = b.fptrunc(value, _like(value, ir.HalfType())) if self.has_half else self.narrow_half(value)
        b.store(value, b.bitcast(b.gep(base, [offset]), value.type.as_pointer()), align=1)

    def combine(self, op: str, value: Any, other: Any) -> Any:
        """Emit ``value op other`` for two vectors; integers are compared as signed (`smin`) or unsigned (`umin`)."""
        b = self.builder
        if op == "sum":
            return (b.fadd if self.is_float else b.add)(value, other)
        if op == "prod":
            return (b.fmul if self.is_float else b.mul)(value, other)
        if op in ("min", "max"):
            # In torch, the position in the buffer determines which zero of (0, -0), or which NaN, is kept. Here that of
            # the first argument is kept.
            is_better = b.fcmp_unordered("<" if op == "min" else ">", other, value)
            return b.select(b.and_(is_better, b.fcmp_ordered("ord", value, value)), other, value)
        if op in ("smin", "smax"):
            return b.select(b.icmp_signed("<" if op == "smin" else ">", other, value), other, value)
        if op in ("umin", "umax"):
            return b.select(b.icmp_unsigned("<" if op == "umin" else ">", other, value), other, value)
        return {"band": b.and_, "bor": b.or_, "bxor": b.xor}[op](value, other)

    # A bfloat16 is the upper half of a float32. Two neighbors form one 32-bit lane: a shift and a mask widen them in
    # place, without shuffles.

    def _widen_bfloat(self, value: Any) -> list[Any]:
        b = self.builder
        if value.type.count == 1:
            bits = _like(value, I32)
            return [b.bitcast(b.shl(b.zext(value, bits), constant(bits, 16)), _like(value, FLOAT))]
        bits, number = (ir.VectorType(element, value.type.count // 2) for element in (I32, FLOAT))
        fields = b.bitcast(value, bits)
        halves = b.shl(fields, constant(bits, 16)), b.and_(fields, constant(bits, 0xFFFF0000))
        return [b.bitcast(half, number) for half in halves]

    def _narrow_bfloat(self, values: list[Any]) -> Any:
        """Round to even by integer arithmetic: LLVM's conversion may flush the smallest numbers to zero."""
        b = self.builder
        bits = _like(values[0], I32)
        rounded = []
        for value in values:
            raw = b.bitcast(value, bits)
            is_even = b.icmp_unsigned("==", b.and_(raw, constant(bits, 0x10000)), constant(bits, 0))
            nearest = b.add(raw, b.select(is_even, constant(bits, 0x7FFF), constant(bits, 0x8000)))
            # Every NaN becomes the one that torch's own conversion writes.
            rounded.append(b.select(b.fcmp_unordered("uno", value, value), constant(bits, 0xFFFFFFFF), nearest))
        even = b.lshr(rounded[0], constant(bits, 16))
        if len(values) == 1:
            return b.trunc(even, _like(even, I16))
        fields = b.or_(even, b.and_(rounded[1], constant(bits, 0xFFFF0000)))
        return b.bitcast(fields, ir.VectorType(I16, 2 * fields.type.count))

    # Half precision by integer arithmetic. Infinities stay infinities; powers of two scale all other numbers.

    def widen_half(self, value: Any) -> Any:
        """Convert a vector of float16 to float32."""
        b = self.builder
        bits, number = _like(value, I32), _like(value, FLOAT)
        raw = b.zext(b.bitcast(value, _like(value, I16)), bits)
        magnitude = b.and_(raw, constant(bits, 0x7FFF))
        shifted = b.shl(magnitude, constant(bits, 13))
        finite = b.bitcast(b.fmul(b.bitcast(shifted, number), constant(number, 2.0**112)), bits)
        special = b.or_(shifted, constant(bits, 0x7F800000))
        magnitude = b.select(b.icmp_unsigned(">=", magnitude, constant(bits, 0x7C00)), special, finite)
        sign = b.shl(b.and_(raw, constant(bits, 0x8000)), constant(bits, 16))
        return b.bitcast(b.or_(magnitude, sign), number)

    def narrow_half(self, value: Any) -> Any:
        """Round a vector of float32 to float16."""
        b = self.builder
        bits = _like(value, I32)
        raw = b.bitcast(value, bits)
        magnitude = b.and_(raw, constant(bits, 0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, constant(bits, 13)), constant(bits, 1))
        rebased = b.sub(b.add(magnitude, odd), constant(bits, (112 << 23) - 0xFFF))
        half = b.lshr(rebased, constant(bits, 13))
        # The last bit of a number next to 0.5 is the last bit of half precision's smallest numbers.
        added = b.fadd(b.bitcast(magnitude, value.type), constant(value.type, 0.5))
        tiny = b.sub(b.bitcast(added, bits), constant(bits, 0x3F000000))
        half = b.select(b.icmp_unsigned("<", magnitude, constant(bits, 0x38800000)), tiny, half)
        half = b.select(b.icmp_unsigned(">=", magnitude, constant(bits, 0x47800000)), constant(bits, 0x7C00), half)
        half = b.select(b.icmp_unsigned(">", magnitude, constant(bits, 0x7F800000)), constant(bits, 0x7E00), half)
        sign = b.and_(b.lshr(raw, constant(bits, 16)), constant(bits, 0x8000))
        return b.bitcast(b.trunc(b.or_(half, sign), _like(value, I16)), _like(value, ir.HalfType()))


def _like(vector: Any, element: Any) -> Any:
    return ir.VectorType(element, vector.type.count)
