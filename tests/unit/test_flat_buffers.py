"""To an author of updates: lists of tensors in flat buffers, and passes over them in blocks, change no value."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchmpi.tensors.flat_buffers import FlatBuffers, cache_blocks

SHAPES = [(3, 4), (5,), (), (0, 2), (2, 2, 2)]


def test_flat_buffers_fuse_by_dtype_and_keep_the_order():
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES for dtype in (torch.float32, torch.float64)]
    flat = FlatBuffers(tensors)
    assert [(buffer.dtype, buffer.numel()) for buffer in flat.buffers] == [(torch.float32, 26), (torch.float64, 26)]
    flat.gather(tensors)
    for view, tensor in zip(flat.views, tensors, strict=True):
        assert torch.equal(view, tensor) and view.dtype is tensor.dtype
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    flat.scatter(copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_gather_adds_dense_sparse_and_missing_gradients():
    like = [torch.zeros(4, 3), torch.zeros(3, 4), torch.zeros(2)]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3))
    transposed = torch.arange(12.0).view(4, 3).t()
    flat = FlatBuffers(like)
    flat.buffers[0].fill_(math.nan)  # uninitialized memory must be overwritten
    flat.gather([sparse, transposed, None])
    expected = [sparse.to_dense(), transposed.contiguous(), torch.zeros(2)]
    assert all(torch.equal(view, value) for view, value in zip(flat.views, expected, strict=True))
    flat.gather([sparse, transposed, None], add=True)
    assert all(torch.equal(view, 2 * value) for view, value in zip(flat.views, expected, strict=True))


def test_scatter_writes_to_parameters():
    layer = nn.Linear(3, 2)
    parameters = list(layer.parameters())
    flat = FlatBuffers(parameters)
    flat.gather([torch.ones_like(parameter) for parameter in parameters])
    flat.scatter(parameters)
    assert all(bool((parameter == 1).all()) and parameter.requires_grad for parameter in parameters)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 200))
def test_cache_blocks_cover_everything_once(numels, block_bytes):
    first = [torch.zeros(numel) for numel in numels]
    second = [torch.zeros(numel) for numel in numels]
    for ones, twos in cache_blocks(first, second, block_bytes=block_bytes):
        assert [tensor.shape for tensor in ones] == [tensor.shape for tensor in twos]
        assert sum(tensor.nbytes for tensor in ones[:-1]) < block_bytes
        torch._foreach_add_(ones, 1.0)
        torch._foreach_add_(twos, 2.0)
    assert all(bool((tensor == 1).all()) for tensor in first)
    assert all(bool((tensor == 2).all()) for tensor in second)


def test_cache_blocks_do_not_split_strided_tensors():
    a, b = torch.zeros(64, 64).t(), torch.ones(64, 64)
    ((left, right),) = cache_blocks([a], [b], block_bytes=128)
    assert left[0] is a and right[0] is b
