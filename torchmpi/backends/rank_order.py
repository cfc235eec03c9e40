"""Combining the vectors of several ranks in rank order, and rounding the result once.

An MPI library selects its allreduce algorithm by message size, and each algorithm adds in an order of its own: the sum
of a gradient can depend on whether the gradient is part of a bucket. MPI also has no 16-bit floats. Here each element
is ``((r0 op r1) op r2) op ...`` in an accumulator of at least 32 bits, rounded once. The bits depend on the values and
on the rank order only. Between hosts, :mod:`torchmpi.backends.hierarchical.hosts` adds the totals of the hosts in the
order in which :mod:`torchmpi.communicators.splits` numbers them: by their lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..shared_memory.kernels import reduction
from ..tensors import buffers, dtypes

# The result is one of the operands: nothing is rounded, so no wider type is needed.
_EXACT = ("min", "max")

Combiner = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""``combine(parts, out)``: combines flat tensors in host memory in their order; `out` may be one of them."""


def combiner(dtype: torch.dtype, op: str) -> Combiner:
    """Return the compiled function that combines vectors of a dtype; without LLVM, :func:`combine`.

    >>> total = torch.empty(2)
    >>> combiner(torch.float32, "avg")([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], total); total
    tensor([2., 4.])
    """
    dtypes.check_reduction(dtype, op)
    try:
        reduce = reduction.called(reduction.address(dtype, op))
    except (ImportError, OSError, RuntimeError):  # llvmlite is missing, or LLVM does not support this processor
        return partial(_combine_apart, op)

    def run(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        reduce([out.data_ptr()], [part.data_ptr() for part in parts], out.numel())

    return run


def combine(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Combine `parts` in their order into `out`, which must not be one of them: the readable form of `combiner`.

    >>> result = torch.empty(2)
    >>> combine([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], "avg", result)
    >>> result
    tensor([2., 4.])
    """
    if out.dtype is torch.uint16:  # torch has no arithmetic for it; sums that wrap around have the same bits signed
        out, parts = out.view(torch.int16), [part.view(torch.int16) for part in parts]
    if out.is_complex() and op in ("sum", "avg"):
        # Real and imaginary parts: torch's complex sum multiplies by (1+0j) first, which makes NaN of an infinite part.
        out, parts = torch.view_as_real(out), [torch.view_as_real(part) for part in parts]
    accumulator_dtype = dtypes.info(out.dtype).accumulator
    assert accumulator_dtype is not None
    step = _STEPS[op]
    accumulator = out if accumulator_dtype is out.dtype else torch.empty_like(out, dtype=accumulator_dtype)
    accumulator.copy_(parts[0])
    for part in parts[1:]:
        step(accumulator, part.to(accumulator_dtype), out=accumulator)
    if op == "avg":
        accumulator.div_(len(parts))
    if accumulator is not out:
        out.copy_(accumulator)


def _combine_apart(op: str, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    result = torch.empty_like(out)
    combine(parts, op, result)
    buffers.overwrite(out, result)


def _multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Multiply by the definition of a complex product.

    Torch's product uses fused operations in whole vectors but not at their ends: bits would depend on the position of
    an element.
    """
    if not a.is_complex():
        torch.mul(a, b, out=out)
        return
    real = a.real * b.real - a.imag * b.imag
    imaginary = a.real * b.imag + a.imag * b.real
    torch.complex(real, imaginary, out=out)


_STEPS: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": _multiply,
    "min": torch.minimum,
    "max": torch.maximum,
}


def accumulator_of(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype of partial results: wider than the result where rounding twice would change it.

    >>> accumulator_of(torch.bfloat16, "sum"), accumulator_of(torch.bfloat16, "max")
    (torch.float32, torch.bfloat16)
    """
    accumulator = dtypes.info(dtype).accumulator
    assert accumulator is not None
    return dtype if op in _EXACT else accumulator


def divide(total: torch.Tensor, size: int) -> None:
    """Divide a sum by the number of ranks, in place; also outside the inference mode that made the tensor."""
    with torch.inference_mode(total.is_inference()):
        values = total.detach()
        (torch.view_as_real(values) if values.is_complex() else values).div_(size)


class PartialResults:
    """The dtype of partial results that travel between groups, and the conversion of the last one to the result."""

    def __init__(self, dtype: torch.dtype, op: str, size: int) -> None:
        self.dtype, self.carrier = dtype, accumulator_of(dtype, op)
        self.is_rounded = self.carrier is not dtype
        self._divisor = size if op == "avg" else 1

    def finish(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """Divide if the result is an average, and round into `out`; overwrites `total`."""
        if self._divisor > 1:
            divide(total, self._divisor)
        if total.data_ptr() != out.data_ptr():
            buffers.overwrite(out, total)
