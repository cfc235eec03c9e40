"""Combining the vectors of several ranks in rank order, and rounding the result once.

An MPI library selects its allreduce algorithm by message size, and each algorithm adds in a different order: the sum
of a gradient can depend on whether the gradient is part of a bucket. MPI also has no 16-bit floats. Here each element
is ``((r0 op r1) op r2) op ...`` in an accumulator of at least 32 bits, rounded once. The bits depend on the values and
on the rank order only. Between hosts, :mod:`torchmpi.backends.hierarchical.host_collectives` adds the totals of the
hosts in the order in which :mod:`torchmpi.communicators.splits` numbers them: by their lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..communicators import call_parts
from ..shared_memory.kernels import reduction
from ..tensors import buffers, dtypes
from ..tensors.operation_specs import OPERATIONS, OperationSpec

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
        since = call_parts.begin()
        reduce([out.data_ptr()], [part.data_ptr() for part in parts], out.numel())
        if since:
            call_parts.end("combining", since)

    return run


def combine(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Combine `parts` in their order into `out` by operations of torch, on any device.

    `out` must not overlap a part. This is the readable form of `combiner`, with the same bits on host memory, except
    for the payload of a computed NaN.

    >>> result = torch.empty(2)
    >>> combine([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], "avg", result)
    >>> result
    tensor([2., 4.])
    """
    spec, accumulator = dtypes.form(op, out.dtype), accumulator_of(out.dtype, op)
    if not (out.is_floating_point() or out.is_complex()):
        _combine_integers(parts, spec, out)
        return
    parts = _prepared(spec, parts)
    if out.is_complex() and spec.combine != "prod":
        # Real and imaginary parts: torch's complex sum multiplies by (1+0j) first, which makes NaN of an infinite part.
        accumulator, out = accumulator.to_real(), torch.view_as_real(out)
        parts = [torch.view_as_real(part) for part in parts]
    total = out if accumulator is out.dtype else torch.empty_like(out, dtype=accumulator)
    _fold(_STEPS[spec.combine], parts, total)
    if spec.finish == "divide":
        divide(total, len(parts))
    if total is not out:
        out.copy_(total)


def combination(parts: Sequence[torch.Tensor], op: str) -> Callable[[torch.Tensor], None]:
    """Return :func:`combine` for fixed parts; `out` has their dtype. What is one step skips the checks of each call.

    >>> result = torch.empty(2)
    >>> combination([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], "sum")(result)
    >>> result
    tensor([4., 8.])
    """
    dtype, spec = parts[0].dtype, OPERATIONS[op]
    is_one_step = not (spec.prepare or spec.finish) and accumulator_of(dtype, op) is dtype
    if is_one_step and dtype.is_floating_point:
        return partial(_fold, _STEPS[spec.combine], parts)
    return partial(combine, parts, op)


def _combine_integers(parts: Sequence[torch.Tensor], spec: OperationSpec, out: torch.Tensor) -> None:
    if out.dtype is torch.bool:
        out, parts = out.view(torch.uint8), [part.view(torch.uint8) for part in parts]
    flipped = 0
    signed = _SIGNED.get(out.dtype)
    if signed is not None:  # torch has no arithmetic for it; signed numbers have the same bits, but another order
        out, parts = out.view(signed), [part.view(signed) for part in parts]
        if spec.has_order:
            flipped = torch.iinfo(signed).min
            parts = [part ^ flipped for part in parts]
    _fold(_INTEGER_STEPS[spec.combine], _prepared(spec, parts), out)
    if flipped:
        out.bitwise_xor_(flipped)


def _prepared(spec: OperationSpec, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [_PREPARE[spec.prepare](part) for part in parts] if spec.prepare else parts


def _fold(step: Callable[..., Any], parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    if len(parts) == 1 or total.dtype is not parts[0].dtype:
        total.copy_(parts[0])
        rest = parts[1:]
    else:
        step(parts[0], parts[1], out=total)
        rest = parts[2:]
    for part in rest:
        step(total, part, out=total)


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


def _choose(is_better: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Return a minimum or maximum of floats: the first NaN if there is one, and the first of equal zeros."""

    def step(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.where(is_better(b, a) | (b.isnan() & ~a.isnan()), b, a, out=out)

    return step


_STEPS: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "prod": _multiply,
    "min": _choose(torch.lt),
    "max": _choose(torch.gt),
}
_INTEGER_STEPS: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
_PREPARE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"truth": lambda part: (part != 0).to(part.dtype)}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def accumulator_of(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype of partial results: wider than the result where rounding twice would change it.

    >>> accumulator_of(torch.bfloat16, "sum"), accumulator_of(torch.bfloat16, "max")
    (torch.float32, torch.bfloat16)
    """
    accumulator = dtypes.info(dtype).accumulator
    assert accumulator is not None
    return dtype if OPERATIONS[op].is_exact else accumulator


def divide(total: torch.Tensor, size: int) -> None:
    """Divide a sum by the number of ranks, in place; also outside inference mode if it was created there."""
    with torch.inference_mode(total.is_inference()):
        values = total.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        if size & size - 1 == 0:  # the reciprocal is exact
            values.mul_(1 / size)
        else:  # not by a Python number: on GPUs torch multiplies by its reciprocal, which rounds twice
            values.div_(torch.full((), size, dtype=values.dtype, device=values.device))


class PartialResults:
    """The dtype of partial results that are sent between groups, and the conversion of the last one to the result."""

    def __init__(self, dtype: torch.dtype, op: str, size: int) -> None:
        self.dtype, self.accumulator = dtype, accumulator_of(dtype, op)
        self.is_rounded = self.accumulator is not dtype
        self._divisor = size if OPERATIONS[op].finish == "divide" else 1

    def finish(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """Divide if the result is an average, and round into `out`; overwrites `total`."""
        if self._divisor > 1:
            divide(total, self._divisor)
        if total.data_ptr() != out.data_ptr():
            buffers.overwrite(out, total)
