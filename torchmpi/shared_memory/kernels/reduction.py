"""Reduction functions in machine code: for each dtype and operation a function that combines any number of sources.

Its signature, in C (see `address`)::

    void reduce(uint8_t **outs, int64_t num_outs, uint8_t **sources, int64_t num_sources, int64_t numel);

* Computes `(s0 op s1) op s2 ...` for each element, in the order of `sources`, into each of `outs`. Each source is read
  once and each out is written once, with the accumulators in vector registers. The bits are those of
  `backends.rank_order.combine`, at every position in the buffer.
* `num_sources` is at least 1; `numel` counts elements, 0 is allowed. No address needs an alignment.
* An out may be one of the sources, but must not overlap a source partially. `outs` may be `sources`.
* The function does not allocate, call other functions, fail, or need the GIL: any thread, and nopython code, may call
  the function by its address.

16-bit floats are widened to float32 and rounded once, at the end. Integers wrap around. `avg` divides the sum by
`num_sources`. Complex products follow the definition, without fused operations. `land`, `lor` and all operations on
bool give 0 or 1; every byte other than 0 is true. `min` and `max` return the first NaN if there is one, and the first
of two zeros. For sums and products of several NaNs, the processor determines sign and payload.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from ...tensors import dtypes
from .reduction_key import FunctionKey

LANES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex128: "f64",
    torch.complex64: "f32",
    torch.complex32: "f16",
    torch.bool: "i8",
    **{getattr(torch, f"{sign}int{bits}"): f"i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""Kind of the lanes of an element (see simd_ir); complex numbers have two."""


_addresses: dict[FunctionKey, int] = {}


def address(dtype: torch.dtype, op: str) -> int:
    """Return the address of the function that reduces `dtype` with `op`, valid until the process ends.

    The first call for a combination compiles it, or loads the result of an earlier process.

    >>> address(torch.int32, "sum") == address(torch.uint32, "sum")
    True
    """
    dtypes.check_reduction(dtype, op)
    key = function_key(dtype, op)
    if key not in _addresses:
        _addresses[key] = _compiled(key)  # thread-safe
    return _addresses[key]


def converter(source: torch.dtype, result: torch.dtype, *, divides: bool = False) -> int:
    """Return the address of a function that converts one source to one out of another dtype; 0 if nothing is to do.

    It has the arguments of a reduction. With `divides`, `num_outs` is the divisor. The out may begin where the source
    does, if it is not wider.

    >>> converter(torch.float32, torch.float32)
    0
    """
    if source is result and not divides:
        return 0
    key = FunctionKey(
        LANES[source], "convert", 2 if source.is_complex else 1, "", "divide" if divides else "", LANES[result]
    )
    if key not in _addresses:
        _addresses[key] = _compiled(key)
    return _addresses[key]


def called(address: int) -> Callable[[Sequence[int], Sequence[int], int], None]:
    """Make such a function callable from Python, with the addresses of outs and sources.

    >>> a, b = torch.ones(3), torch.ones(3)
    >>> add = called(address(torch.float32, "sum"))
    >>> add([a.data_ptr()], [a.data_ptr(), b.data_ptr()], 3); a
    tensor([2., 2., 2.])
    """
    fields, number = ctypes.POINTER(ctypes.c_int64), ctypes.c_int64
    function = ctypes.CFUNCTYPE(None, fields, number, fields, number, number)(address)

    def run(outs: Sequence[int], sources: Sequence[int], numel: int) -> None:
        num_outs, num_sources = len(outs), len(sources)
        function((number * num_outs)(*outs), num_outs, (number * num_sources)(*sources), num_sources, numel)

    return run


def function_key(dtype: torch.dtype, op: str) -> FunctionKey:
    """Return the key of a function, equal for dtypes that the same function can reduce.

    >>> function_key(torch.uint8, "max")[:3], function_key(torch.complex64, "prod")[:3]
    (('i8', 'umax', 1), ('f32', 'cprod', 2))
    """
    spec, of_type = dtypes.form(op, dtype), ""
    if dtype.is_complex:
        of_type = "c" if spec.combine == "prod" else ""
    elif spec.has_order and not dtype.is_floating_point:
        of_type = "s" if dtype.is_signed else "u"
    num_parts = 2 if dtype.is_complex else 1
    return FunctionKey(LANES[dtype], of_type + spec.combine, num_parts, spec.prepare, spec.finish)


def _compiled(key: FunctionKey) -> int:
    from ..compiler import native_code
    from . import source_digest  # here, so that programs without such reductions need no llvmlite

    def text(**options: bool) -> str:
        from . import reduction_ir  # here, so that LLVM is loaded only to compile

        return reduction_ir.module_text(key, **options)

    name = "_".join(("torchmpi_reduce", *(str(part) for part in key if part)))
    return native_code.compiler().function(name, source_digest(), text)
