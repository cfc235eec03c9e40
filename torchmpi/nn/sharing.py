"""Gradients that stay where they are move into shared memory, so that ranks of one host add them up in place.

``zero_grad()`` drops gradients, and backward makes new ones: those travel through the slots. But where they are kept,
with ``zero_grad(set_to_none=False)`` or over several backward passes, the memory behind them is exchanged at the second
call. The tensors remain the same objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from .. import runtime
from .buckets import aligned_offsets, allocate_flat, dense_view
from .replica import Attachment, attach, attached

_LEAST_BYTES = 32 << 10
SHARED_GRADIENTS = "torchmpi_shared_gradients"


class SharedGradients(Attachment):
    """Which gradients of a net were there at the last call, and where."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def move(self, parameters: Sequence[Tensor]) -> None:
        """Move the gradients that were there before, and are still private."""
        kept: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.nbytes < _LEAST_BYTES:
                continue
            place = gradient.data_ptr()
            reference, seen_at = self._seen.get(id(parameter), (None, 0))
            if reference is None or reference() is not gradient:
                self._seen[id(parameter)] = weakref.ref(gradient), place
            elif seen_at == place:
                self._seen[id(parameter)] = reference, 0  # once is enough
                if not runtime.current().heap.holds(place):
                    kept.append(gradient)
        for dtype in {gradient.dtype for gradient in kept}:
            _exchange_memory([gradient for gradient in kept if gradient.dtype is dtype])


def _exchange_memory(gradients: Sequence[Tensor]) -> None:
    """One segment for all of them: each costs descriptors."""
    offsets, numel = aligned_offsets(gradients)
    flat = allocate_flat(numel, gradients[0])
    for gradient, offset in zip(gradients, offsets, strict=True):
        view = dense_view(flat, offset, gradient)
        gradient.data = view.copy_(gradient)


def share_kept_gradients(net: nn.Module | None, parameters: Sequence[Tensor]) -> None:
    """What `synchronize_gradients` does before it sends, within a host."""
    if net is None or not parameters or parameters[0].device.type != "cpu":
        return
    shared = attached(net, SHARED_GRADIENTS)
    if shared is None:
        shared = SharedGradients()
        attach(net, SHARED_GRADIENTS, shared)
    shared.move(parameters)
