"""To a user of NCCL: conversions of values around its reductions, computed here by torch, lose nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import contract
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.backends.nccl.recipes import flat, lacks, recipe
from torchmpi.tensors import dtypes

CASES = [
    (dtype, op) for dtype, ops in contract.OPS_OF.items() for op in ops if lacks(dtype, op) is None
]  # fmt: skip


CARRIERS = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
STEPS = {"sum": torch.add, "prod": torch.mul, "min": torch.fmin, "max": torch.fmax}  # fmin and fmax drop a NaN


def reduced_by_nccl(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order of a ring that begins anywhere, each step in the dtype itself."""
    if op == "avg":
        inputs = [tensor * torch.tensor(1 / len(inputs), dtype=tensor.dtype) for tensor in inputs]
        op = "sum"
    begin = len(inputs) // 2
    first, *others = inputs[begin:] + inputs[:begin]
    result = first.clone()
    for other in others:
        result = STEPS[op](result, other)
    return result


def through(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Compute the result of `Reduction` without communication."""
    way = recipe(inputs[0].dtype, op, len(inputs))
    sent = [flat(tensor.clone()) if way.encode is None else way.encode(flat(tensor)) for tensor in inputs]
    got = reduced_by_nccl(sent, way.op)
    if way.decode is not None:
        got = way.decode(got)
    result = torch.empty_like(inputs[0])
    flat(result).copy_(got)
    return result


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda case: str(case).removeprefix("torch."))
def test_the_result_is_that_of_all_other_transports(dtype, op):
    for size in (1, 2, 3, 4, 7):
        inputs = [contract.values((65,), dtype, rank) for rank in range(size)]
        result, expected = through(inputs, op), contract.reduced(inputs, op)
        assert result.dtype is dtype
        if dtype.is_floating_point or dtype.is_complex:
            # Another order of addition, in at least 32 bits: an error of at most half a unit of the dtype.
            torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        else:
            assert contract.same_bits(result, expected), (size, result, expected)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_sums_of_16_bits_are_rounded_once(dtype):
    """Small numbers that would be lost one by one in the sum with a large number are not lost together."""
    inputs = [torch.tensor([1.0], dtype=dtype), *[torch.tensor([torch.finfo(dtype).eps / 2], dtype=dtype)] * 7]
    for op in ("sum", "avg"):
        assert contract.same_bits(through(inputs, op), contract.reduced(inputs, op))


def test_a_mean_of_equal_values_is_that_value():
    """NCCL multiplies by 1/n beforehand, which changes the last bit for most n."""
    for size in range(1, 12):
        value = contract.values((1000,), torch.float32, 0)
        assert contract.same_bits(through([value] * size, "avg") * size / size, contract.reduced([value] * size, "avg"))


EXTREMES = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 1e-40, -1e-40]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16))
def test_nan_and_zeros_do_not_depend_on_the_order_of_ranks(dtype):
    values = torch.tensor(EXTREMES, dtype=dtype)
    pairs = list(itertools.product(range(len(values)), repeat=2))
    one, other = (values[[pair[side] for pair in pairs]] for side in (0, 1))
    for op, step in (("min", torch.minimum), ("max", torch.maximum)):
        there, back = through([one, other, one], op), through([other, one, other], op)
        assert contract.same_bits(there, back)
        torch.testing.assert_close(there, step(one, other), rtol=0, atol=0, equal_nan=True)
        zeros = there[(one == 0) & (other == 0) & (one.signbit() != other.signbit())]
        assert (zeros.signbit() == (op == "min")).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(["min", "max"]))
def test_the_order_of_integers_is_that_of_floats_and_back(numbers, op):
    values = torch.tensor(numbers, dtype=torch.float32)
    way = recipe(torch.float32, op, 2)
    back = way.decode(way.encode(values))
    same = back.view(torch.int32) == values.view(torch.int32)
    assert (same | (values.isnan() & back.isnan())).all()


def test_bools_of_any_byte_are_true_or_false():
    inputs = [torch.tensor([2, 0, 4], dtype=torch.uint8).view(torch.bool), torch.tensor([True, False, False])]
    for op, expected in (("land", [1, 0, 0]), ("lor", [1, 0, 1]), ("bxor", [0, 0, 1]), ("min", [1, 0, 0])):
        assert through(inputs, op).view(torch.uint8).tolist() == expected
    assert through([torch.tensor([7, 0])], "land").tolist() == [1, 0]  # alone too
    assert through([torch.ones(1, dtype=torch.bool)] * 300, "bxor").item() is False


def test_every_dtype_is_converted_to_one_of_nccl_or_unsupported():
    for dtype in (*contract.MOVABLE, torch.complex32):
        for op in dtypes.info(dtype).ops:
            if lacks(dtype, op) is None:
                for size in (1, 2, 3):
                    way = recipe(dtype, op, size)
                    assert way.carrier in CARRIERS and way.op in ("avg", *STEPS)
                    # Differences of NCCL: NaN in min and max, and means of integers.
                    assert not (way.carrier.is_floating_point and way.op in ("min", "max"))
                    assert way.op != "avg" or way.carrier.is_floating_point
            else:
                assert op in ("band", "bor", "bxor", "prod")
