"""Dtypes, values and comparisons for tests of compiled arithmetic."""

from __future__ import annotations

import torch

REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)
INTEGERS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
ALL = (*REAL, *COMPLEX, *INTEGERS, torch.bool)
GUARD_BYTES = 320  # more than a vector of any kind


def seeded(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) % (1 << 40))


def values(dtype: torch.dtype, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return integers and bools of any bits, floating-point numbers of moderate size."""
    if dtype.is_complex:
        return torch.view_as_complex(values(dtype.to_real(), 2 * numel, generator).view(numel, 2))
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def differing(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """The positions whose bits differ. All NaNs are equal, since the payload depends on the processor."""
    assert a.shape == b.shape and a.dtype is b.dtype
    if not a.numel():
        return []
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    unlike = (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(-1, a.dtype.itemsize).any(1)
    if a.is_floating_point():
        unlike &= ~(a.isnan() & b.isnan()).view(-1)
    return unlike.nonzero().view(-1).tolist()


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Numbers at the limits of the type: rounded to infinity, rounded to even, and nearly zero."""
    limits = torch.finfo(dtype)
    tiny = limits.smallest_normal
    numbers = [0.0, 1.0, limits.max, tiny, tiny * limits.eps, tiny * 3 * limits.eps, limits.eps, 1 + limits.eps]
    numbers = [sign * number for number in [*numbers, float("inf"), limits.eps / 2] for sign in (1, -1)]
    return torch.tensor([*numbers, float("nan")], dtype=torch.float64).to(dtype)
