"""The LLVM code of a reduction: vectors of elements in the outer loop, sources in the inner one.

LLVM's own vectorizer would ask at run time whether `out` overlaps a source, find that it does (reductions are done in
place) and fall back to single elements. So the vectors are written out here, and the same generator called with ever
fewer lanes makes the end of the buffer, down to single elements. Nothing depends on the processor: LLVM
splits the vectors into what the machine has.

There are no fast-math flags: nothing is reordered or fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

_BOOL, _BYTE, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_FLOAT = ir.FloatType()
# Name of a lane: type in memory, type in which it is combined, bytes in memory, bytes while being combined.
_LANES: dict[str, tuple[Any, Any, int, int]] = {
    "f64": (ir.DoubleType(), ir.DoubleType(), 8, 8),
    "f32": (_FLOAT, _FLOAT, 4, 4),
    "f16": (ir.HalfType(), _FLOAT, 2, 4),
    "bf16": (_I16, _FLOAT, 2, 4),
    "i8": (_BYTE, _BYTE, 1, 1),
    "i16": (_I16, _I16, 2, 2),
    "i32": (_I32, _I32, 4, 4),
    "i64": (_I64, _I64, 8, 8),
}
# Bytes of accumulators in flight: four of the widest registers there are, eight of AVX2.
_BLOCK_BYTES = 256


def module_text(lane: str, op: str, num_parts: int, *, has_half: bool = True) -> str:
    """A module with the one function `reduce`; `num_parts` lanes make an element (2 for complex numbers).

    Without `has_half`, 16-bit floats are converted by integer arithmetic: for processors that cannot.

    >>> "fadd <64 x float>" in module_text("f32", "sum", 1)
    True
    """
    module = ir.Module(name="reduction")
    pointer = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, pointer.as_pointer(), _I64, _I64])
    function = ir.Function(module, kind, "reduce")
    function.attributes.add("nounwind")
    _Reduction(function, (lane, op, num_parts), has_half).emit()
    return str(module)


def _constant(vector: Any, value: int | float) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _loop(builder: Any, bounds: tuple[Any, Any, Any], carried: list[Any], body: Callable) -> tuple[Any, list[Any]]:
    """``for index in range(*bounds): carried = body(index, carried)``; returns both as they are at the end."""
    begin, end, step = bounds
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
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


class _Reduction:
    """One function in the making."""

    def __init__(self, function: Any, key: tuple[str, str, int], has_half: bool) -> None:
        self.lane, self.op, self.num_parts = key
        self.memory_type, self.wide_type, self.itemsize, self.wide_itemsize = _LANES[self.lane]
        self.has_half = has_half
        self.out, self.sources, self.num_sources, self.numel = function.args
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.is_pairwise = self.op == "cprod"
        self.lanes = 0  # of the vectors being emitted

    def emit(self) -> None:
        """All of it: ever smaller vectors, each going as far as it can from where the one before ended."""
        b = self.builder
        if self.op == "avg":
            self.divisor = b.sitofp(self.num_sources, self.wide_type)
        num_bytes = b.mul(self.numel, ir.Constant(_I64, self.itemsize * self.num_parts))
        offset = ir.Constant(_I64, 0)
        for lanes in self._lane_counts():
            self.lanes = lanes
            step = lanes * self.itemsize * (2 if self.is_pairwise else 1)
            end = b.and_(num_bytes, ir.Constant(_I64, -step))
            offset, _ = _loop(b, (offset, end, ir.Constant(_I64, step)), [], self._block)
        b.ret_void()

    def _lane_counts(self) -> Iterator[int]:
        lanes = _BLOCK_BYTES // self.wide_itemsize // (2 if self.is_pairwise else 1)
        while lanes > 1:
            yield lanes
            lanes //= 4
        yield 1

    def _block(self, offset: Any, _: list[Any]) -> list[Any]:
        """One vector of elements over all sources. It is stored after everything was read: `out` may be a source."""
        one = ir.Constant(_I64, 1)
        first = self._load(ir.Constant(_I64, 0), offset)
        _, total = _loop(
            self.builder,
            (one, self.num_sources, one),
            first,
            lambda source, values: self._combine(values, self._load(source, offset)),
        )
        self._store(self._finish(total), offset)
        return []

    # Memory. Of a list of two vectors the first has the even places or the real parts, the other the rest.

    def _load(self, source: Any, offset: Any) -> list[Any]:
        b = self.builder
        numel = self.lanes * (2 if self.is_pairwise else 1)
        base = b.load(b.gep(self.sources, [source]))
        address = b.bitcast(b.gep(base, [offset]), ir.VectorType(self.memory_type, numel).as_pointer())
        value = b.load(address, align=1)
        if self.lane == "bf16":
            return self._widen_bfloat(value)
        if self.lane == "f16":
            value = b.fpext(value, self._vector(_FLOAT, value)) if self.has_half else self._widen_half(value)
        if self.op == "lxor":
            value = self._truth(value)
        if self.is_pairwise:
            return [self._pick(value, value, range(part, numel, 2)) for part in (0, 1)]
        return [value]

    def _store(self, values: list[Any], offset: Any) -> None:
        b = self.builder
        value = values[0]
        if self.is_pairwise:
            order = [part * self.lanes + index for index in range(self.lanes) for part in (0, 1)]
            value = self._pick(values[0], values[1], order)
        if self.lane == "bf16":
            value = self._narrow_bfloat(values)
        if self.lane == "f16":
            value = b.fptrunc(value, self._vector(ir.HalfType(), value)) if self.has_half else self._narrow_half(value)
        b.store(value, b.bitcast(b.gep(self.out, [offset]), value.type.as_pointer()), align=1)

    def _pick(self, first: Any, second: Any, order: Any) -> Any:
        indices = list(order)
        return self.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(indices)), indices))

    def _vector(self, element: Any, like: Any) -> Any:
        return ir.VectorType(element, like.type.count)

    # A bfloat16 is the upper half of a float32. Two neighbours are taken as one word, whose halves are the two
    # numbers: a shift and a mask widen them where they are, without a move from lane to lane.

    def _widen_bfloat(self, value: Any) -> list[Any]:
        b = self.builder
        if self.lanes == 1:
            bits = self._vector(_I32, value)
            return [b.bitcast(b.shl(b.zext(value, bits), _constant(bits, 16)), self._vector(_FLOAT, value))]
        bits, number = (ir.VectorType(element, self.lanes // 2) for element in (_I32, _FLOAT))
        words = b.bitcast(value, bits)
        halves = b.shl(words, _constant(bits, 16)), b.and_(words, _constant(bits, 0xFFFF0000))
        return [b.bitcast(half, number) for half in halves]

    def _narrow_bfloat(self, values: list[Any]) -> Any:
        """Round to even, not by LLVM's conversion: what it may choose flushes the smallest numbers to zero."""
        b = self.builder
        bits = self._vector(_I32, values[0])
        rounded = []
        for value in values:
            raw = b.bitcast(value, bits)
            is_even = b.icmp_unsigned("==", b.and_(raw, _constant(bits, 0x10000)), _constant(bits, 0))
            nearest = b.add(raw, b.select(is_even, _constant(bits, 0x7FFF), _constant(bits, 0x8000)))
            # Every NaN becomes the one that torch's own conversion writes.
            rounded.append(b.select(b.fcmp_unordered("uno", value, value), _constant(bits, 0xFFFFFFFF), nearest))
        even = b.lshr(rounded[0], _constant(bits, 16))
        if len(values) == 1:
            return b.trunc(even, self._vector(_I16, even))
        words = b.or_(even, b.and_(rounded[1], _constant(bits, 0xFFFF0000)))
        return b.bitcast(words, ir.VectorType(_I16, self.lanes))

    # Operations.

    def _combine(self, values: list[Any], others: list[Any]) -> list[Any]:
        if self.is_pairwise:
            return self._complex_product(values, others)
        return [self._combine_one(value, other) for value, other in zip(values, others, strict=True)]

    def _combine_one(self, value: Any, other: Any) -> Any:
        b, op = self.builder, self.op
        is_float = self.lane in ("f64", "f32", "f16", "bf16")
        if op in ("sum", "avg"):
            return (b.fadd if is_float else b.add)(value, other)
        if op == "prod":
            return (b.fmul if is_float else b.mul)(value, other)
        if op in ("min", "max"):
            # Torch keeps the first or the second zero of (0, -0), and makes this or that NaN, by the element's place
            # in the buffer. Here it is always the first in source order.
            is_better = b.fcmp_unordered("<" if op == "min" else ">", other, value)
            return b.select(b.and_(is_better, b.fcmp_ordered("ord", value, value)), other, value)
        if op in ("smin", "smax"):
            return b.select(b.icmp_signed("<" if op == "smin" else ">", other, value), other, value)
        if op in ("umin", "umax"):
            return b.select(b.icmp_unsigned("<" if op == "umin" else ">", other, value), other, value)
        if op == "land":
            zero = _constant(other.type, 0)
            return b.select(b.icmp_unsigned("==", other, zero), zero, value)
        return {"band": b.and_, "bor": b.or_, "bxor": b.xor, "lor": b.or_, "lxor": b.xor}[op](value, other)

    def _complex_product(self, a: list[Any], other: list[Any]) -> list[Any]:
        b = self.builder
        real = b.fsub(b.fmul(a[0], other[0]), b.fmul(a[1], other[1]))
        return [real, b.fadd(b.fmul(a[0], other[1]), b.fmul(a[1], other[0]))]

    def _finish(self, values: list[Any]) -> list[Any]:
        b = self.builder
        if self.op == "avg":
            vector = values[0].type
            one_lane = b.insert_element(ir.Constant(vector, ir.Undefined), self.divisor, ir.Constant(_I32, 0))
            divisor = self._pick(one_lane, one_lane, [0] * vector.count)
            return [b.fdiv(value, divisor) for value in values]
        if self.op in ("land", "lor"):
            return [self._truth(values[0])]
        return values

    def _truth(self, value: Any) -> Any:
        b = self.builder
        return b.zext(b.icmp_unsigned("!=", value, _constant(value.type, 0)), value.type)

    # Half precision by hand. An infinity's exponent stays an infinity's; powers of two scale all others.

    def _widen_half(self, value: Any) -> Any:
        b = self.builder
        bits, number = self._vector(_I32, value), self._vector(_FLOAT, value)
        raw = b.zext(b.bitcast(value, self._vector(_I16, value)), bits)
        magnitude = b.and_(raw, _constant(bits, 0x7FFF))
        shifted = b.shl(magnitude, _constant(bits, 13))
        finite = b.bitcast(b.fmul(b.bitcast(shifted, number), _constant(number, 2.0**112)), bits)
        special = b.or_(shifted, _constant(bits, 0x7F800000))
        magnitude = b.select(b.icmp_unsigned(">=", magnitude, _constant(bits, 0x7C00)), special, finite)
        sign = b.shl(b.and_(raw, _constant(bits, 0x8000)), _constant(bits, 16))
        return b.bitcast(b.or_(magnitude, sign), number)

    def _narrow_half(self, value: Any) -> Any:
        b = self.builder
        bits = self._vector(_I32, value)
        raw = b.bitcast(value, bits)
        magnitude = b.and_(raw, _constant(bits, 0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, _constant(bits, 13)), _constant(bits, 1))
        rebased = b.sub(b.add(magnitude, odd), _constant(bits, (112 << 23) - 0xFFF))
        half = b.lshr(rebased, _constant(bits, 13))
        # The last bit of a number next to 0.5 is the last bit of half precision's smallest numbers.
        added = b.fadd(b.bitcast(magnitude, value.type), _constant(value.type, 0.5))
        tiny = b.sub(b.bitcast(added, bits), _constant(bits, 0x3F000000))
        half = b.select(b.icmp_unsigned("<", magnitude, _constant(bits, 0x38800000)), tiny, half)
        half = b.select(b.icmp_unsigned(">=", magnitude, _constant(bits, 0x47800000)), _constant(bits, 0x7C00), half)
        half = b.select(b.icmp_unsigned(">", magnitude, _constant(bits, 0x7F800000)), _constant(bits, 0x7E00), half)
        sign = b.and_(b.lshr(raw, _constant(bits, 16)), _constant(bits, 0x8000))
        return b.bitcast(b.trunc(b.or_(half, sign), self._vector(_I16, value)), self._vector(ir.HalfType(), value))
