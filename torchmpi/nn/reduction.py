"""What is done with the gradients of several ranks: summed, or divided by a number of ranks as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import collectives, streams
from ..groups import Communicator


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

    def start(self, flat: Tensor, comm: Communicator) -> Callable[[], object]:
        """Launch the reduction of `flat` in place; call what is returned to finish it."""
        if self.divisor == self.size:
            return collectives.allreduce_async(flat, op="avg", comm=comm).wait
        if self.divisor == 1:
            return collectives.allreduce_async(flat, op="sum", comm=comm).wait
        # Only in the tail of a join. Two roundings to 16 bit would be one too many, so these are widened.
        wide = flat.float() if flat.element_size() < 4 and flat.is_floating_point() else flat
        handle = collectives.allreduce_async(wide, op="sum", comm=comm)

        def finish() -> None:
            handle.wait()
            streams.use_here(wide)  # which was made on the stream of a hook, perhaps
            torch.div(wide, self.divisor, out=wide)
            if wide is not flat:
                flat.copy_(wide)

        return finish
