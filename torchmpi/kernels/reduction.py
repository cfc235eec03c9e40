"""Reductions as native code: for each dtype and operation a function that combines any number of sources.

Its signature, in C and as numba writes it (see `address`)::

    void reduce(uint8_t *out, uint8_t **sources, int64_t num_sources, int64_t numel);
    types.void(types.CPointer(types.uint8), types.CPointer(types.CPointer(types.uint8)), types.int64, types.int64)

* Element by element, `out = (s0 op s1) op s2 ...` in the order of `sources`. Each source is read once and `out` is
  written once, with the accumulators in vector registers. The bits are those of `backends.ordered.combine`,
  wherever in the buffer an element is.
* `num_sources` is at least 1; `numel` counts elements, 0 is allowed. No address needs an alignment.
* `out` may be one of the sources, exactly; it must not overlap one in part.
* It neither allocates nor calls anything, never fails, and needs no GIL: any thread may call it, also from nopython
  code through its address.

16-bit floats are widened to float32 and rounded once, at the end. Integers wrap around. `avg` divides the sum by
`num_sources`. Complex products are those of the definition, nothing fused. `land`, `lor` and everything on bool give 0
or 1, for any byte that is not 0 is true. `min` and `max` give NaN where there is one, the first; of two zeros also the
first. Of several NaNs that are added or multiplied, which one's sign and payload are kept is up to the processor.
"""

from __future__ import annotations

from functools import partial

import torch

from .. import dtypes

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
"""What an element is made of, by its name in lanes_ir; complex numbers have two."""
_BOOL_OPS = {"min": "land", "band": "land", "land": "land", "max": "lor", "bor": "lor", "lor": "lor", "bxor": "lxor"}

_addresses: dict[tuple[str, str, int], int] = {}


def address(dtype: torch.dtype, op: str) -> int:
    """The address of the function that reduces `dtype` with `op`, valid until the process ends.

    The first call for a combination compiles it, or loads what an earlier process compiled. From Python, for a test::

        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        kind(address(torch.float32, "sum"))(out.data_ptr(), pointers.data_ptr(), len(pointers), out.numel())

    >>> address(torch.int32, "sum") == address(torch.uint32, "sum")
    True
    """
    dtypes.check_reduction(dtype, op)
    key = function_key(dtype, op)
    if key not in _addresses:
        _addresses[key] = _compiled(key)  # threads wait for each other there
    return _addresses[key]


def function_key(dtype: torch.dtype, op: str) -> tuple[str, str, int]:
    """(lane, operation on it, lanes per element): what dtypes whose bits are treated alike have in common.

    >>> function_key(torch.uint8, "max"), function_key(torch.complex64, "prod")
    (('i8', 'umax', 1), ('f32', 'cprod', 2))
    """
    lane = LANES[dtype]
    if dtype.is_complex:
        return lane, "cprod" if op == "prod" else op, 2
    if dtype is torch.bool:
        return lane, _BOOL_OPS[op], 1
    if not dtype.is_floating_point and op in ("min", "max"):
        return lane, ("s" if dtype.is_signed else "u") + op, 1
    return lane, op, 1


def _compiled(key: tuple[str, str, int]) -> int:
    # Imported here: whoever never reduces through shared memory need not load LLVM.
    from . import native, reduction_ir

    lane, op, num_parts = key
    name = f"torchmpi_reduce_{lane}_{op}_{num_parts}"
    return native.compiler().function(name, partial(reduction_ir.module_text, lane, op, num_parts))
