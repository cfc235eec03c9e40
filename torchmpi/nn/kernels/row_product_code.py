"""The product of a matrix with one row in machine code, at the pace of memory.

The rows of the four quarters of the matrix are read side by side: four long streams. BLAS libraries read neighboring
rows, whose streams end after a row, and the processor does not read ahead in the next ones.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from ...shared_memory.compiler.compilation import kernel
from ...shared_memory.compiler.simd_ir import BYTE, FLOAT, I64, Lanes, constant, loop, pick
from ...shared_memory.compiler.target import intrinsic

_STREAMS, _LANES = 4, (16, 1)


@intrinsic
def store_dots(output, matrix, row, output_step, matrix_step, num_bytes):
    """Store the scalar products of a row of float32 with four others; the steps are from one of these to the next."""

    def generate(context, builder, signature, arguments):
        output, matrix, row = (builder.inttoptr(address, BYTE.as_pointer()) for address in arguments[:3])
        output_step, matrix_step, num_bytes = arguments[3:]

        def places(base, step):
            return [builder.gep(base, [builder.mul(step, I64(index))]) for index in range(_STREAMS)]

        numbers, offset, totals = Lanes(builder, "f32", False), I64(0), [FLOAT(0.0)] * _STREAMS
        sources = places(matrix, matrix_step)
        for lanes in _LANES:
            step, begin = 4 * lanes, [constant(ir.VectorType(FLOAT, lanes), 0.0)] * _STREAMS

            def add_products(offset, sums, lanes=lanes):
                (factor,) = numbers.load(row, offset, lanes)
                loaded = [numbers.load(source, offset, lanes)[0] for source in sources]
                return [
                    builder.fadd(total, builder.fmul(factor, each)) for total, each in zip(sums, loaded, strict=True)
                ]

            offset, sums = loop(builder, (offset, builder.and_(num_bytes, I64(-step)), I64(step)), begin, add_products)
            totals = [builder.fadd(total, _sum(builder, each)) for total, each in zip(totals, sums, strict=True)]
        for target, total in zip(places(output, output_step), totals, strict=True):
            builder.store(total, builder.bitcast(target, FLOAT.as_pointer()))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _sum(builder, vector):
    """Add the lanes of a vector, halves first."""
    while (count := vector.type.count) > 1:
        halves = [pick(builder, vector, vector, range(begin, begin + count // 2)) for begin in (0, count // 2)]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


@kernel
def multiply_row(output, matrix, row, num_outputs, num_inputs):
    """Store the scalar products of a row with all rows of a matrix, numbers of float32 at these addresses."""
    row_bytes, quarter = 4 * num_inputs, num_outputs // _STREAMS
    for index in range(quarter):
        store_dots(output + 4 * index, matrix + row_bytes * index, row, 4 * quarter, row_bytes * quarter, row_bytes)
    for index in range(_STREAMS * quarter, num_outputs):  # the same row four times
        store_dots(output + 4 * index, matrix + row_bytes * index, row, 0, 0, row_bytes)
    return 0
