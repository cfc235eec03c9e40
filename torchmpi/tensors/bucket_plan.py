"""Packing of small tensors into few large messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import buffers


def plan_buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Assign tensors to buckets of one dtype and device with up to `bucket_bytes`.

    A larger tensor gets a separate bucket. Buckets are ordered by their first tensor, so that they are equal on all
    ranks. Returns the indices of the tensors of each bucket.

    >>> plan_buckets([torch.ones(2), torch.ones(3), torch.ones(1, dtype=torch.int8), torch.ones(9)], 32)
    [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        key, num_bytes = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        members, filled = open_buckets.get(key, ([], 0))
        if not members or filled + num_bytes > bucket_bytes:
            members, filled = [], 0
            buckets.append(members)
        members.append(index)
        open_buckets[key] = members, filled + num_bytes
    return buckets


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of several tensors as one flat tensor.

    >>> pack([torch.zeros(2), torch.ones(1, 1)])
    tensor([0., 0., 1.])
    """
    with torch.no_grad():  # one call of C++: a call of Python per tensor would take longer than its copy
        flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of `flat` into the tensors.

    >>> a, b = torch.zeros(2), torch.zeros(1)
    >>> unpack(torch.arange(3.0), [a, b])
    >>> a, b
    (tensor([0., 1.]), tensor([2.]))
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]  # of empty ones torch does not keep the shape
    parts = torch._utils._unflatten_dense_tensors(flat, tensors)
    if any(tensor.is_inference() or tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        for tensor, part in zip(tensors, parts, strict=True):
            buffers.overwrite(tensor, part)
    elif tensors:
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in tensors], parts)
