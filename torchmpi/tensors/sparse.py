"""Sums of sparse tensors: every rank gathers the entries of all ranks and adds those with equal indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import dtypes

Gather = Callable[[Tensor], Tensor]
"""Concatenates the rows of all ranks, in rank order, on every rank."""


def entries(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices, one row per entry so that those of all ranks can be concatenated, and the values.

    >>> entries(torch.eye(2).to_sparse())
    (tensor([[0, 0],
            [1, 1]]), tensor([1., 1.]))
    """
    whole = tensor.detach().to(_accumulator(tensor.dtype)).coalesce()
    return whole.indices().t().contiguous(), whole.values().to(tensor.dtype).contiguous()


def total(indices: Tensor, values: Tensor, shape: tuple[int, ...], gather: Gather, *, divisor: int = 1) -> Tensor:
    """Return the sum over all ranks, divided by `divisor`.

    The result is sparse, and the same on all ranks, since each adds the same values in the same order.

    >>> total(*entries(torch.eye(2).to_sparse()), (2, 2), gather=lambda rows: rows).to_dense()
    tensor([[1., 0.],
            [0., 1.]])
    """
    all_indices, all_values = gather(indices), gather(values).to(_accumulator(values.dtype))
    summed = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False).coalesce()
    return (summed / divisor if divisor > 1 else summed).to(values.dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, which are rounded once; torch cannot add complex32."""
    return dtypes.info(dtype).accumulator or dtype
