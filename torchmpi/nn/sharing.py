"""Gradients that stay where they are move into shared memory, so that ranks of one host add them up in place.

``zero_grad()`` drops gradients, and backward makes new ones: those travel through the slots. But where they are kept,
with ``zero_grad(set_to_none=False)`` or over several backward passes, the memory behind them is exchanged at the second
call. The tensors remain the same objects. If those are all that the net has, they then lie in one piece, and a single
call reduces them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..session import runtime
from ..tensors import fusion
from .buckets import aligned_offsets, allocate_flat, dense_view
from .replica import Attachment, attach, attached

_LEAST_BYTES = 32 << 10  # of the longest: otherwise there is nothing to gain
SHARED_GRADIENTS = "torchmpi_shared_gradients"


class Whole(NamedTuple):
    """Gradients that lie in one piece of memory for each dtype."""

    flats: list[Tensor]
    gradients: list[Tensor]


class SharedGradients(Attachment):
    """Which gradients of a net were there at the last call, and where."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._is_settled = False
        """Whether those that were seen have been moved, or are to stay where they are."""
        self._numels: list[int] = []
        """Lengths of the pieces into which they have been moved, in the order in which their dtypes appear."""

    def move(self, parameters: Sequence[Tensor]) -> None:
        """Move the gradients of all these parameters, if they are those of the last call and still private."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not self._are_seen(gradients):
            self._see(gradients)
            self._is_settled, self._numels = False, []
            return
        if self._is_settled:
            return
        self._is_settled = True
        heap, is_worthwhile = runtime.current().heap, any(gradient.nbytes >= _LEAST_BYTES for gradient in gradients)
        if not is_worthwhile or any(not each.is_contiguous() or heap.holds(each.data_ptr()) for each in gradients):
            return
        self._numels = [_exchange_memory(alike) for alike in fusion.alike(gradients)]
        self._see(gradients)

    def whole(self, parameters: Sequence[Tensor]) -> Whole | None:
        """All these gradients in few pieces, if each of them is where it was put."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not self._numels or len(gradients) != len(parameters) or not self._are_seen(gradients):
            return None
        firsts = [alike[0].detach() for alike in fusion.alike(gradients)]
        if not all(runtime.current().heap.holds(first.data_ptr()) for first in firsts):
            return None
        pieces = zip(firsts, self._numels, strict=True)
        return Whole([first.as_strided((numel,), (1,), 0) for first, numel in pieces], gradients)

    def _see(self, gradients: Sequence[Tensor]) -> None:
        self._seen = [(weakref.ref(gradient), gradient.data_ptr()) for gradient in gradients]

    def _are_seen(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were seen last, in the same places."""
        return len(gradients) == len(self._seen) and all(
            reference() is gradient and gradient.data_ptr() == place
            for gradient, (reference, place) in zip(gradients, self._seen, strict=True)
        )


def _exchange_memory(gradients: Sequence[Tensor]) -> int:
    """One segment for all of them: each costs descriptors. Gives its length."""
    offsets, numel = aligned_offsets(gradients)
    flat = allocate_flat(numel, gradients[0]).zero_()  # the gaps are sent too
    for gradient, offset in zip(gradients, offsets, strict=True):
        view = dense_view(flat, offset, gradient)
        gradient.data = view.copy_(gradient)
    return numel


def shared_gradients(net: nn.Module | None) -> SharedGradients | None:
    """What is known of the gradients of a net; None for those of a mere list."""
    if net is None:
        return None
    shared: SharedGradients | None = attached(net, SHARED_GRADIENTS)
    if shared is None:
        shared = SharedGradients()
        attach(net, SHARED_GRADIENTS, shared)
    return shared
