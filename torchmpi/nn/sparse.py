"""Sparse gradients of a net."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..tensors import sparse
from .reduction import Reduction


def reduce_sparse(parameter: Tensor, reduction: Reduction, comm: Communicator) -> None:
    """Replace the sparse gradient of `parameter` by the reduction over all ranks; no gradient counts as zero.

    The result is sparse and coalesced, and the same on all ranks.
    """
    gradient = parameter.grad
    if gradient is None:
        # Which dimensions are sparse is known only to those who have a gradient; rows of a table are the one
        # kind that autograd makes.
        indices = torch.empty(0, 1, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    else:
        indices, values = sparse.entries(gradient)
    gather = partial(collectives.allgather, comm=comm)
    total = sparse.total(indices, values, parameter.shape, gather, divisor=reduction.divisor)
    parameter.grad = total.coalesce()
