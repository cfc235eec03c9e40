"""To whoever passes a tensor: its dtype is reduced as defined, or refused with a remedy; numbers keep their bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmpi import errors
from torchmpi.tensors import bucket_plan, buffers, dtypes, numbers, sparse


@pytest.mark.parametrize(
    ("dtype", "op", "size", "expected"),
    [
        (torch.int8, "sum", 2, False),
        (torch.int16, "sum", 2, False),
        (torch.int16, "bor", 3, True),
        (torch.int32, "sum", 3, True),
        (torch.float32, "sum", 2, True),
        (torch.float32, "avg", 2, True),
        (torch.float32, "sum", 3, False),
        (torch.float32, "max", 2, False),
        (torch.float32, "max", 1, True),
        (torch.complex64, "prod", 2, False),
    ],
)
def test_mpi_reduces_only_what_has_the_same_bits_in_every_order(dtype, op, size, expected):
    """Open MPI saturates sums of short integers; the order counts for floats, except for two summands."""
    assert dtypes.may_use_mpi(dtype, op, size) is expected


def test_every_dtype_and_op_is_either_in_the_table_or_refused_with_a_remedy():
    for dtype, op in itertools.product(_all_dtypes(), dtypes.OPS):
        try:
            row = dtypes.check_reduction(dtype, op)
        except errors.DtypeError as error:
            assert any(field in str(error) for field in ("Use", "Convert", "convert", "reduce", "pass"))
        else:
            assert row.accumulator is not None
            assert row.accumulator.itemsize >= min(4, dtype.itemsize) or not dtype.is_floating_point


def _all_dtypes():
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def test_codes_are_unique_and_round_trip():
    known = [dtype for dtype in _all_dtypes() if dtype in dtypes._TABLE]
    assert len({dtypes.info(dtype).code for dtype in known}) == len(known) >= 16
    assert all(dtypes.from_code(dtypes.info(dtype).code) is dtype for dtype in known)
    assert dtypes.from_code(0) is None


def test_an_unknown_op_is_refused_with_the_known_ones():
    with pytest.raises(errors.ArgumentError, match="sum, avg, prod"):
        dtypes.check_reduction(torch.float32, "mean")


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.int8, torch.bfloat16]))),
    st.integers(1, 64),
)
def test_buckets_hold_every_tensor_once_and_in_order(kinds, limit):
    tensors = [torch.zeros(numel, dtype=dtype) for numel, dtype in kinds]
    buckets = bucket_plan.plan_buckets(tensors, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({tensors[index].dtype for index in bucket}) == 1
        sizes = [tensors[index].numel() * tensors[index].element_size() for index in bucket]
        assert sum(sizes) <= limit or len(sizes) == 1 or sum(sizes[1:]) == 0


@given(
    st.one_of(
        st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)
    )
)
def test_numbers_round_trip(value):
    result = numbers.restore(numbers.as_tensor(value, "send"))
    assert result == value and type(result) is type(value)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Sparse invariant")
def test_sparse_values_of_16_bits_are_rounded_once():
    indices = torch.tensor([[0, 0, 0, 1]])
    for dtype in (torch.float16, torch.complex32):
        values = torch.tensor([2048.0, 1.0, 1.0, 3.0]).to(dtype)
        entries = sparse.entries(torch.sparse_coo_tensor(indices, values, (2,)))
        assert entries[1].dtype is dtype and entries[1].tolist() == [2050, 3]
        total = sparse.total(indices.t(), values, (2,), lambda rows: rows)
        assert total.dtype is dtype and total.values().tolist() == [2050, 3]


def test_overlap_is_found_for_strided_tensors():
    base = torch.zeros(10, 10)
    assert buffers.overlap(base[:, 0], base[5])
    assert not buffers.overlap(base[:5], base[5:])
    assert not buffers.overlap(base, torch.zeros(3))
    assert not buffers.overlap(base[:0], base)


def test_scratch_grows_and_is_reused():
    scratch = buffers.Scratch()
    small = scratch.take(4, torch.float32)
    assert scratch.take(4, torch.float32).data_ptr() == small.data_ptr()
    assert scratch.take(100, torch.bfloat16).numel() == 100
