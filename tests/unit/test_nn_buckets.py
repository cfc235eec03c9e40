"""To a user of buckets: each gradient has its place in a flat tensor, and only one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchmpi.errors import ArgumentError, GradientError
from torchmpi.nn.buckets import CopiedBucket, ViewBucket, aligned_offsets, dense_view, partition_by_size


def test_partition_into_less_than_one_is_refused():
    with pytest.raises(ArgumentError, match="at least 1"):
        partition_by_size([1, 2], 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_offsets_are_aligned_and_do_not_overlap(dtype):
    tensors = [torch.empty(numel, dtype=dtype) for numel in (3, 0, 64, 1)]
    offsets, total = aligned_offsets(tensors)
    assert all(offset * tensors[0].element_size() % 64 == 0 for offset in offsets)
    ends = [offset + tensor.numel() for offset, tensor in zip(offsets, tensors, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, offsets[1:], strict=False))
    assert total == ends[-1]


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(2, 3),
        torch.empty(2, 3).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(()),
    ],
)
def test_dense_views_keep_the_order_of_dimensions(like):
    view = dense_view(torch.zeros(200), 7, like)
    assert (view.shape, view.stride(), view.storage_offset()) == (like.shape, like.stride(), 7)


def test_views_of_tensors_with_holes_are_dense():
    view = dense_view(torch.zeros(200), 0, torch.empty(8, 8)[::2, ::2])
    assert view.is_contiguous()


def test_one_contiguous_gradient_is_not_copied():
    gradient = torch.ones(2, 3)
    assert CopiedBucket([parameter(gradient, 2, 3)]).pack().data_ptr() == gradient.data_ptr()


def parameter(gradient: torch.Tensor | None, *shape: int) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(*shape))
    result.grad = gradient
    return result


def test_packing_moves_gradients_and_fills_in_zeros():
    first, second = parameter(torch.ones(2), 2), parameter(None, 3)
    bucket = ViewBucket([first, second])
    bucket.flat.fill_(9)
    bucket.pack()
    assert first.grad.data_ptr() == bucket.flat.data_ptr()
    assert second.grad is None
    assert bucket.views[1].tolist() == [0, 0, 0]


def test_moved_gradients_are_accumulated_in_place():
    weight = parameter(None, 2)
    bucket = ViewBucket([weight])
    (weight * 3).sum().backward()
    bucket.pack()
    (weight * 4).sum().backward()
    assert bucket.flat.tolist() == [7, 7]


def test_gaps_are_zero():
    bucket = ViewBucket([parameter(torch.ones(3), 3), parameter(torch.ones(3), 3)])
    assert bucket.pack().sum() == 6


def test_sparse_gradients_do_not_fit():
    bucket = ViewBucket([parameter(torch.ones(2, 1).to_sparse(), 2, 1)])
    with pytest.raises(GradientError, match="is sparse"):
        bucket.pack()


def test_a_moved_view_is_detected():
    net = nn.Linear(2, 2, bias=False)
    net.weight.grad = torch.ones(2, 2)
    bucket = ViewBucket([net.weight])
    bucket.pack()
    net.double()
    with pytest.raises(GradientError, match="moved to another dtype or device"):
        bucket.pack()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(1, 7))
def test_no_division_into_runs_has_a_smaller_largest_one(sizes, partitions):
    """And no run is empty, also if sizes are zero."""
    runs = partition_by_size(sizes, partitions)
    number = min(partitions, len(sizes))
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert len(runs) == number and all(len(run) > 0 for run in runs)
    cuts = itertools.combinations(range(1, len(sizes)), number - 1)
    bounds = ([0, *cut, len(sizes)] for cut in cuts)
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(bound)) for bound in bounds)
    assert max(sum(sizes[run.start : run.stop]) for run in runs) == best


def test_no_tensors_need_no_memory():
    assert aligned_offsets([]) == ([], 0)
