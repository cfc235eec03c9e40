"""To a user of GPUs: reductions by operations of torch have the bits of the compiled ones, and of references.

The numbers and the comparison of bits are those of the tests of the compiled reductions.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernel_values import ALL, REAL, differing, seeded, special_values, values

from torchmpi.backends.rank_order import combine, combiner
from torchmpi.tensors import dtypes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def check(parts: list[torch.Tensor], op: str) -> None:
    before = [part.view(torch.uint8).clone().view(part.dtype) for part in parts]  # a clone of a bool is 0 or 1
    found, expected = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    combine(parts, op, found)
    combiner(parts[0].dtype, op)(parts, expected)
    assert not differing(found, expected), (op, len(parts))
    assert not any(map(differing, parts, before)), "a part was overwritten"


@pytest.mark.parametrize("dtype", ALL, ids=dtypes.short_name)
def test_torch_gives_the_bits_of_the_compiled_reductions(dtype):
    for op, num_sources, numel in itertools.product(dtypes.info(dtype).ops, (1, 2, 3, 5), (0, 1, 65, 1000)):
        check([values(dtype, numel, seeded(num_sources, source)) for source in range(num_sources)], op)


@pytest.mark.parametrize("dtype", REAL, ids=dtypes.short_name)
def test_special_values(dtype):
    specials = special_values(dtype)
    parts = [part.reshape(-1).contiguous() for part in torch.meshgrid(specials, specials, specials, indexing="ij")]
    for op, num_sources in itertools.product(dtypes.info(dtype).ops, (1, 2, 3)):
        check(parts[:num_sources], op)


@pytest.mark.parametrize("dtype", REAL, ids=dtypes.short_name)
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_the_error_is_that_of_32_bits_and_one_rounding(dtype, op):
    """Compared with float64: rounding after each rank would give several times the error in 16 bits."""
    parts = [values(dtype, 2000, seeded(source)) + 1 for source in range(16 if op != "prod" else 3)]
    wide = torch.stack(parts).double()
    expected = {"sum": wide.sum(0), "avg": wide.mean(0), "prod": wide.prod(0)}[op]
    magnitude = wide.abs().prod(0) if op == "prod" else wide.abs().sum(0) / (len(parts) if op == "avg" else 1)
    found = torch.empty_like(parts[0])
    combine(parts, op, found)
    carried = torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps * len(parts) * magnitude
    limits = torch.finfo(dtype)
    rounded = limits.eps / 2 * expected.abs().clamp(limits.smallest_normal) if dtype.itemsize == 2 else 0
    assert bool(((found.double() - expected).abs() <= (carried + rounded) * 1.001).all())
