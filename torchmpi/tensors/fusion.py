"""Many small tensors as few large messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from . import buffers


def plan_buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Indices of the tensors that travel together: one dtype and device each, in order, up to `bucket_bytes`.

    A tensor larger than that travels alone. Buckets are ordered by their first tensor: every rank makes the same.

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


def alike(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of each dtype and device, in the order of the first of each: the same on all ranks.

    >>> a, b, c = torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)
    >>> [[tensor.numel() for tensor in tensors] for tensors in alike([a, b, c])]
    [[1, 3], [2]]
    """
    return [[tensors[index] for index in indices] for indices in plan_buckets(tensors, sys.maxsize)]


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive pieces of `flat` into the tensors.

    >>> a, b = torch.zeros(2), torch.zeros(1)
    >>> unpack(torch.arange(3.0), [a, b])
    >>> a, b
    (tensor([0., 1.]), tensor([2.]))
    """
    pieces = flat.split([tensor.numel() for tensor in tensors])
    shaped = [piece.view(tensor.shape) for tensor, piece in zip(tensors, pieces, strict=True)]
    if any(tensor.is_inference() for tensor in tensors):
        for tensor, piece in zip(tensors, shaped, strict=True):
            buffers.overwrite(tensor, piece)
    else:  # all at once: a call for each would take longer than its copy
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in tensors], shaped)
