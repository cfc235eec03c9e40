"""Sparse gradients: every rank gathers the indices and values of all ranks and adds up what meets."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import collectives
from ..groups import Communicator
from .reduction import Reduction


def reduce_sparse(parameter: Tensor, reduction: Reduction, comm: Communicator) -> None:
    """Replace the sparse gradient of `parameter` by the reduction over all ranks; no gradient counts as zero.

    The result is sparse and coalesced, and the same on all ranks: each adds the same values in the same
    order.
    """
    gradient = parameter.grad
    if gradient is None:
        # Which dimensions are sparse is known only to those who have a gradient; rows of a table are the one
        # kind that autograd makes.
        indices = torch.empty(0, 1, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.detach().coalesce()
        indices = gradient.indices().t().contiguous()  # one row per entry, so that ranks can be concatenated
        values = gradient.values()
    all_indices = collectives.allgather(indices, comm=comm)
    all_values = collectives.allgather(values.contiguous(), comm=comm)
    if all_values.element_size() < 4 and all_values.is_floating_point():
        all_values = all_values.float()  # 16-bit values are added in float32 and rounded once
    total = torch.sparse_coo_tensor(all_indices.t(), all_values, parameter.shape, check_invariants=False).coalesce()
    if reduction.divisor > 1:
        total = total / reduction.divisor
    parameter.grad = total.to(parameter.dtype).coalesce()
