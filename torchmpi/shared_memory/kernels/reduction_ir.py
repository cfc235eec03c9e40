"""LLVM code of reductions: vectors of elements in the outer loop, sources in the inner one.

The vectors are written out (see `simd_ir`): LLVM would not vectorize reductions in place.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..compiler.simd_ir import BYTE, I64, KINDS, Lanes, constant, in_vectors, loop, pick, spread
from .reduction_key import FunctionKey

# Bytes of accumulators in flight: four of the widest registers there are, eight of AVX2.
_BLOCK_BYTES = 256


def module_text(key: FunctionKey, *, has_half: bool = True) -> str:
    """Return a module with one function, `function`.

    Without `has_half`, 16-bit floats are converted by integer arithmetic: for processors without such instructions.

    >>> "fadd <64 x float>" in module_text(FunctionKey("f32", "sum"))
    True
    """
    module = ir.Module(name="reduction")
    pointer = BYTE.as_pointer()
    pointers = pointer.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointers, I64, pointers, I64, I64])
    function = ir.Function(module, kind, "function")
    function.attributes.add("nounwind")
    (_Conversion if key.result else _Reduction)(function, key, has_half).emit()
    return str(module)


class _Reduction:
    def __init__(self, function: Any, key: FunctionKey, has_half: bool) -> None:
        self.key, self.num_parts = key, key.num_parts
        self.outs, self.num_outs, self.sources, self.num_sources, self.numel = function.args
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.numbers = Lanes(self.builder, key.lane, has_half)
        self.is_pairwise = self.key.combine == "cprod"
        self.lanes = 0  # of the vectors being emitted

    def emit(self) -> None:
        b, kind = self.builder, self.numbers.kind
        if self.key.finish == "divide":
            self.divisor = b.sitofp(self.num_sources, kind.wide_type)
        num_bytes = b.mul(self.numel, ir.Constant(I64, kind.itemsize * self.num_parts))
        each = 2 if self.is_pairwise else 1
        in_vectors(b, num_bytes, (kind.itemsize * each, _BLOCK_BYTES // kind.wide_itemsize // each), self._block)
        b.ret_void()

    def _block(self, lanes: int, offset: Any) -> None:
        """Emit one vector of elements over all sources, stored after all loads: an out may be a source."""
        self.lanes = lanes
        one = ir.Constant(I64, 1)
        first = self._load(ir.Constant(I64, 0), offset)
        _, total = loop(
            self.builder,
            (one, self.num_sources, one),
            first,
            lambda source, values: self._combine(values, self._load(source, offset)),
        )
        self._store(self._finish(total), offset)

    # Memory. Of two vectors the first has the even lanes or the real parts, the second the others.

    def _load(self, source: Any, offset: Any) -> list[Any]:
        b = self.builder
        count = self.lanes * (2 if self.is_pairwise else 1)
        values = self.numbers.load(b.load(b.gep(self.sources, [source])), offset, count)
        if self.key.prepare == "truth":
            return [self._truth(values[0])]
        if self.is_pairwise:
            return [pick(b, values[0], values[0], range(part, count, 2)) for part in (0, 1)]
        return values

    def _store(self, values: list[Any], offset: Any) -> None:
        if self.is_pairwise:
            order = [part * self.lanes + index for index in range(self.lanes) for part in (0, 1)]
            values = [pick(self.builder, values[0], values[1], order)]

        def store(index: Any, _: list[Any]) -> list[Any]:
            self.numbers.store(values, self.builder.load(self.builder.gep(self.outs, [index])), offset)
            return []

        loop(self.builder, (ir.Constant(I64, 0), self.num_outs, ir.Constant(I64, 1)), [], store)

    # Operations.

    def _combine(self, values: list[Any], others: list[Any]) -> list[Any]:
        if self.is_pairwise:
            return self._complex_product(values, others)
        return [
            self.numbers.combine(self.key.combine, value, other) for value, other in zip(values, others, strict=True)
        ]

    def _complex_product(self, a: list[Any], other: list[Any]) -> list[Any]:
        b = self.builder
        real = b.fsub(b.fmul(a[0], other[0]), b.fmul(a[1], other[1]))
        return [real, b.fadd(b.fmul(a[0], other[1]), b.fmul(a[1], other[0]))]

    def _finish(self, values: list[Any]) -> list[Any]:
        if self.key.finish == "divide":
            divisor = spread(self.builder, self.divisor, values[0].type)
            return [self.builder.fdiv(value, divisor) for value in values]
        return values

    def _truth(self, value: Any) -> Any:
        b = self.builder
        return b.zext(b.icmp_unsigned("!=", value, constant(value.type, 0)), value.type)


class _Conversion(_Reduction):
    """Another form of the numbers of one source in one out, divided by the argument `num_outs` if they are averages."""

    def emit(self) -> None:
        b, key, kind = self.builder, self.key, self.numbers.kind
        self.results = Lanes(b, key.result, self.numbers.has_half)
        if key.finish == "divide":
            self.divisor = b.sitofp(self.num_outs, kind.wide_type)
        num_bytes = b.mul(self.numel, ir.Constant(I64, kind.itemsize * self.num_parts))
        in_vectors(b, num_bytes, (kind.itemsize, _BLOCK_BYTES // kind.wide_itemsize), self._block)
        b.ret_void()

    def _block(self, lanes: int, offset: Any) -> None:
        """Emit one vector, loaded before it is stored: narrower results may be where the source is."""
        b, zero = self.builder, ir.Constant(I64, 0)
        values = self.numbers.load(b.load(b.gep(self.sources, [zero])), offset, lanes)
        if len(values) == 2:
            order = [part * (lanes // 2) + index for index in range(lanes // 2) for part in (0, 1)]
            values = [pick(b, values[0], values[1], order)]
        values = self._finish(values)
        if self.key.result == "bf16" and lanes > 1:
            values = [pick(b, values[0], values[0], range(part, lanes, 2)) for part in (0, 1)]
        index = b.udiv(offset, ir.Constant(I64, self.numbers.kind.itemsize))
        at = b.mul(index, ir.Constant(I64, KINDS[self.key.result].itemsize))
        self.results.store(values, b.load(b.gep(self.outs, [zero])), at)
