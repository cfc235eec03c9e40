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

from .. import runtime
from .buckets import aligned_offsets, allocate_flat, dense_view
from .replica import Attachment, attach, attached

_LEAST_BYTES = 32 << 10  # of the longest: otherwise there is nothing to gain
SHARED_GRADIENTS = "torchmpi_shared_gradients"


class Whole(NamedTuple):
    """Gradients in one piece of memory."""

    flat: Tensor
    gradients: list[Tensor]


class SharedGradients(Attachment):
    """Which gradients of a net were there at the last call, and where."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._seats: list[tuple[weakref.ref[Tensor], int]] = []
        self._numel = 0

    def move(self, parameters: Sequence[Tensor]) -> None:
        """Move the gradients that were there before, and are still private."""
        kept: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            place = gradient.data_ptr()
            reference, seen_at = self._seen.get(id(parameter), (None, 0))
            if reference is None or reference() is not gradient:
                self._seen[id(parameter)] = weakref.ref(gradient), place
            elif seen_at == place:
                self._seen[id(parameter)] = reference, 0  # once is enough
                if not runtime.current().heap.holds(place):
                    kept.append(gradient)
        if max((gradient.nbytes for gradient in kept), default=0) < _LEAST_BYTES:
            return
        for dtype in {gradient.dtype for gradient in kept}:
            numel = _exchange_memory([gradient for gradient in kept if gradient.dtype is dtype])
        if len({gradient.dtype for gradient in kept}) == 1 and all(gradient.is_contiguous() for gradient in kept):
            self._seats, self._numel = [(weakref.ref(gradient), gradient.data_ptr()) for gradient in kept], numel

    def whole(self, parameters: Sequence[Tensor]) -> Whole | None:
        """All these gradients in one piece, if each of them is where it was put."""
        if not self._seats or len(parameters) != len(self._seats):
            return None
        gradients = []
        for parameter, (reference, place) in zip(parameters, self._seats, strict=True):
            gradient = parameter.grad
            if gradient is None or reference() is not gradient or gradient.data_ptr() != place:
                return None
            gradients.append(gradient)
        if not runtime.current().heap.holds(self._seats[0][1]):
            return None
        return Whole(gradients[0].detach().as_strided((self._numel,), (1,), 0), gradients)


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
