"""What is done with the gradients of several ranks: summed, or divided by a number of ranks as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import collectives
from ..collectives import fused
from ..communicators.communicator import Communicator
from ..tensors import streams


class Reduction(NamedTuple):
    """Sum over `size` ranks, divided by `divisor`: 1 sums, `size` averages, less averages over some ranks."""

    divisor: int
    size: int

    def run(self, flat: Tensor, comm: Communicator) -> None:
        """Reduce `flat` in place."""
        if self.divisor in (self.size, 1):
            collectives.allreduce(flat, op="avg" if self.divisor == self.size else "sum", comm=comm)
        else:
            self.start(flat, comm)()

    def run_many(self, tensors: Sequence[Tensor], comm: Communicator) -> None:
        """Reduce them in place, in few calls."""
        if self.divisor in (self.size, 1):
            fused.allreduce_many(tensors, op="avg" if self.divisor == self.size else "sum", comm=comm)
            return
        wide = [_widened(tensor) for tensor in tensors]
        fused.allreduce_many(wide, comm=comm)
        for tensor, total in zip(tensors, wide, strict=True):
            torch.div(total, self.divisor, out=total)
            if total is not tensor:
                tensor.copy_(total)

    def start(self, flat: Tensor, comm: Communicator) -> Callable[[], object]:
        """Launch the reduction of `flat` in place; call what is returned to finish it."""
        if self.divisor == self.size:
            return collectives.allreduce_async(flat, op="avg", comm=comm).wait
        if self.divisor == 1:
            return collectives.allreduce_async(flat, op="sum", comm=comm).wait
        wide = _widened(flat)
        handle = collectives.allreduce_async(wide, op="sum", comm=comm)

        def finish() -> None:
            handle.wait()
            streams.use_here(wide)  # which was made on the stream of a hook, perhaps
            torch.div(wide, self.divisor, out=wide)
            if wide is not flat:
                flat.copy_(wide)

        return finish


def _widened(tensor: Tensor) -> Tensor:
    """For a sum that is divided afterwards, in the tail of a join: two roundings to 16 bit would be one too many."""
    return tensor.float() if tensor.element_size() < 4 and tensor.is_floating_point() else tensor
