"""Reference results: inputs that every rank can compute for every other, and a reference of each collective.

The references are written from the definitions, in plain torch, independently of the implementation.
"""

from __future__ import annotations

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
MOVABLE = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1025,), (65, 33))
OPS_OF = {
    **{dtype: ("sum", "avg", "prod", "min", "max") for dtype in FLOATS},
    **{dtype: ("sum", "avg", "prod") for dtype in COMPLEX},
    **{dtype: ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor") for dtype in INTEGERS},
    torch.bool: ("min", "max", "band", "bor", "bxor", "land", "lor"),
}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By definition: torch's complex product rounds differently at the end of a vector register than in its middle."""
    if not a.is_complex():
        return a * b
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


_STEP = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "prod": _product,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "land": lambda a, b: (a != 0) & (b != 0),
    "lor": lambda a, b: (a != 0) | (b != 0),
}


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """The input of a rank, the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTEGERS:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    if dtype in COMPLEX:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order, 16-bit floats in 32 bits, rounded once."""
    dtype = inputs[0].dtype
    wide = _WIDE.get(dtype, dtype)
    # torch has no arithmetic on uint16 and wider; 64 bits and wrapping around give the same bits.
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = torch.int64
    result = inputs[0].to(wide)
    if op in ("land", "lor"):
        result = result != 0
    for other in inputs[1:]:
        result = _STEP[op](result, other.to(wide))
    if op == "avg":
        parts = torch.view_as_real(result) if result.is_complex() else result
        result = parts / len(inputs)
        result = torch.view_as_complex(result) if inputs[0].is_complex() else result
    return result.to(dtype)


def reduced_by_host(inputs: list[torch.Tensor], op: str, hosts: list[list[int]]) -> torch.Tensor:
    """Host by host, in rank order within, and rounded once; `hosts` has the ranks of each."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) and op not in ("min", "max") else dtype
    total_op = "sum" if op == "avg" else op
    totals = [reduced([inputs[rank].to(wide) for rank in ranks], total_op) for ranks in hosts]
    total = reduced(totals, total_op)
    if op == "avg":
        size = len(inputs)
        total = torch.view_as_complex(torch.view_as_real(total) / size) if total.is_complex() else total / size
    return total.to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory with gaps and another order of dimensions."""
    spread = torch.zeros((*reversed(tensor.shape), 2), dtype=tensor.dtype, device=tensor.device)[..., 1]
    view = spread.permute(tuple(reversed(range(tensor.dim()))))
    view.copy_(tensor)
    return view


def rows(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rows of a rank: an even partition, in which the first ranks have one row more."""
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    least, more = divmod(tensor.shape[0], size)
    begin = rank * least + min(rank, more)
    return tensor[begin : begin + least + (rank < more)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
