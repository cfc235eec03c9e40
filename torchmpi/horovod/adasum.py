"""Adasum: a sum of vectors that adds orthogonal ones and averages equal ones (Maleki et al., 2020).

Ranks combine their vectors in pairs at distance 1, 2, 4, ...; both ranks of a pair compute the same result.
"""

from __future__ import annotations

import math
import sys

from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..communicators.handle import Handle
from ..tensors.dtypes import short_name

_LEAST = math.sqrt(sys.float_info.min)


def start(tensor: Tensor, comm: Communicator) -> Handle[Tensor]:
    """Reduce a tensor in place, in the background."""
    if comm.size & (comm.size - 1):
        raise NotImplementedError(f"op=Adasum needs a power of two as the number of ranks, not {comm.size}.")
    if not tensor.is_floating_point():
        raise ValueError(f"op=Adasum takes floating-point tensors, not {tensor.dtype}.")
    group = comm.intra

    def reduce() -> Tensor:
        # In float64: dot products of 16-bit values would overflow, and rounding between the rounds would add up.
        values = tensor.double()
        distance = 1
        while distance < comm.size:
            other = comm.rank ^ distance
            received: Tensor = collectives.sendreceive(values.clone(), other, other, comm=comm)
            pair = (values, received) if comm.rank < other else (received, values)
            values = combine(*pair)
            distance *= 2
        return tensor.copy_(values)

    names = "allreduce", "adasum", short_name(tensor.dtype), -1
    shown = group.shown(reduce, group.described, names, tensor)
    return group.call_queue.submit(shown, f"{group.where}: allreduce(op=Adasum)", tensor)


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Return the Adasum of two vectors.

    >>> import torch
    >>> combine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])), combine(torch.ones(2), torch.ones(2))
    (tensor([1., 1.]), tensor([1., 1.]))
    """
    a, b = first.reshape(-1), second.reshape(-1)
    product = float(a @ b)
    return _weight(a, product) * first + _weight(b, product) * second


def _weight(vector: Tensor, product: float) -> float:
    squared = float(vector @ vector)
    return 1.0 if squared < _LEAST else 1.0 - product / (2 * squared)
