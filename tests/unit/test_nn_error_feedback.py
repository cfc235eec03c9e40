"""To a user of compressors: their arithmetic is within its limits, without another rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchmpi.nn as mpinn
from torchmpi.nn import PowerSGD, error_feedback


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 1 << 30), st.floats(1e-3, 1e3))
def test_a_value_is_within_half_a_unit_of_its_byte(num_rows, num_blocks, seed, scale):
    """A unit is 1/127 of the largest value of a block, which itself is exact up to rounding."""
    length = num_blocks * error_feedback._BLOCK
    rows = scale * torch.randn(num_rows, length, generator=torch.Generator().manual_seed(seed))
    sent = error_feedback._quantize(rows)
    assert sent.dtype == torch.uint8 and sent.shape == (num_rows, length + 4 * num_blocks)
    blocks = rows.view(num_rows, num_blocks, -1)
    lost = (error_feedback._dequantize(sent).view(blocks.shape) - blocks).abs()
    largest = blocks.abs().amax(2, keepdim=True)
    assert (lost <= largest * (1 / 254 + 4 * torch.finfo(torch.float32).eps)).all()
    assert (lost[blocks.abs() == largest] <= 4 * torch.finfo(torch.float32).eps * largest.max()).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_infinite_value_makes_its_block_and_no_other_infinite(value):
    rows = torch.ones(1, 2 * error_feedback._BLOCK)
    rows[0, 3] = value
    first, second = error_feedback._dequantize(error_feedback._quantize(rows)).view(2, -1)
    assert not first.isfinite().any() and torch.equal(second, torch.ones(error_feedback._BLOCK))


def test_zeros_are_sent_as_zeros():
    zeros = torch.zeros(2, error_feedback._BLOCK)
    assert torch.equal(error_feedback._dequantize(error_feedback._quantize(zeros)), zeros)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_only_matrices_that_two_narrow_ones_make_smaller_are_narrowed(rank):
    compressor = PowerSGD(rank)
    for height in range(8):
        for width in range(8):
            is_smaller = rank * height + rank * width < height * width and rank <= min(height, width)
            assert compressor._is_narrowed(torch.empty(height, width)) == is_smaller
            assert compressor._is_narrowed(torch.empty(height, width, 1)) == is_smaller
    assert not compressor._is_narrowed(torch.empty(100))


def test_products_and_packing():
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(5, 3, generator=generator), torch.randn(4, 3, generator=generator)
    torch.testing.assert_close(error_feedback._product(left, right), left @ right.t())
    flat = error_feedback._packed([left, right], left)
    for one, other in zip(error_feedback._unpacked(flat, [left, right]), (left, right), strict=True):
        assert torch.equal(one, other)
    assert error_feedback._packed([], left).shape == (0,)


def test_a_rank_alone_exchanges_nothing_that_could_be_compressed():
    kinds = (mpinn.EightBit, mpinn.TopK, mpinn.PowerSGD)
    for within_hosts in (False, True):
        for num_ranks, num_nodes in ((1, 1), (4, 1), (4, 2)):
            comm = SimpleNamespace(size=num_ranks, num_nodes=num_nodes)
            applies = num_ranks > 1 and (within_hosts or num_nodes > 1)
            assert [kind(within_hosts=within_hosts).applies(comm) for kind in kinds] == [applies] * 3
