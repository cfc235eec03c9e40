"""DiLoCo: local training, and periodically an outer step of SGD with momentum along the average change of all ranks.

Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import collectives
from ...communicators.levels import Comm
from ...errors import ArgumentError
from ...nn.buckets import allocate_flat
from ..parameter_lists import FlatBuffers, cache_blocks
from .localsgd import LocalSGDUpdate


class DiLoCoUpdate(LocalSGDUpdate):
    """Takes an outer step every `update_frequency` steps, without servers.

    The outer gradient is ``anchor - parameters``, averaged over the ranks; the anchor is the result of the previous
    outer step. The outer step is that of ``torch.optim.SGD``, and its result is the new anchor and the parameters of
    all ranks. With ``outer_lr=1, outer_momentum=0`` it is :class:`LocalSGDUpdate`.

    Call ``update()`` once per step, *after* the step of the inner optimizer. The call and the constructor are
    collective. The first anchor is the network of rank 0, at the beginning or after `init_delay` steps.

    Args:
        network: The network.
        update_frequency: Steps between two outer steps.
        init_delay: Number of first steps that are not counted.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step.
        nesterov: Whether the outer step uses Nesterov's momentum.
        comm: Communicator, or its level. Default: the current communicator.

    Raises:
        ArgumentError: An option is invalid, or the network has no trainable parameters.

    Example:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with ps.DiLoCoUpdate(model, update_frequency=100) as update:
            for x, y in batches:
                inner.zero_grad()
                loss(model(x), y).backward()
                inner.step()
                update.update()
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        update_frequency: int = 100,
        init_delay: int = 0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        comm: Comm = None,
    ) -> None:
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay, comm=comm)
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ArgumentError(
                f"outer_lr={outer_lr!r} must be greater than zero, outer_momentum={outer_momentum!r} from 0 to below 1."
            )
        self.outer_lr, self.outer_momentum, self.nesterov = outer_lr, outer_momentum, nesterov
        self._gradient = FlatBuffers(self._parameters, allocate=self._allocate)
        """The outer gradient; if possible in shared memory, which allreduce does not copy."""
        self._anchor = FlatBuffers(self._parameters)
        self._momentum = FlatBuffers(self._parameters)
        for buffer in self._momentum.buffers:
            buffer.zero_()
        self._has_anchor = False
        if init_delay == 0:
            self._set_anchor()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate_flat(numel, self._parameters[0].detach().new_empty(0, dtype=dtype))

    def _set_anchor(self) -> None:
        self._anchor.gather(self._parameters)
        for buffer in self._anchor.buffers:
            collectives.broadcast(buffer, 0, comm=self.communicator)
        self._has_anchor = True

    def _take_step(self) -> bool:
        if self._has_anchor:
            return super()._take_step()
        if self.step + 1 >= self.init_delay:  # greater if update(step) skips steps
            self._set_anchor()
        return False

    def _integrate(self) -> None:
        for gradient, anchor, own in cache_blocks(self._gradient.views, self._anchor.views, self._parameters):
            torch._foreach_copy_(gradient, anchor)
            torch._foreach_sub_(gradient, own)
        for buffer in self._gradient.buffers:
            collectives.allreduce(buffer, op="avg", comm=self.communicator)
        lists = (self._gradient.views, self._momentum.views, self._anchor.views, self._parameters)
        for gradient, momentum, anchor, own in cache_blocks(*lists):
            step = gradient
            if self.outer_momentum:
                torch._foreach_mul_(momentum, self.outer_momentum)
                torch._foreach_add_(momentum, gradient)
                if self.nesterov:
                    torch._foreach_add_(gradient, momentum, alpha=self.outer_momentum)
                else:
                    step = momentum
            torch._foreach_sub_(anchor, step, alpha=self.outer_lr)
            torch._foreach_copy_(own, anchor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, including anchor and outer momentum, without the network."""
        return {
            **super().state_dict(),
            "has_anchor": self._has_anchor,
            "anchor": self._anchor.clones(),
            "momentum": self._momentum.clones(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        super().load_state_dict(state)
        self._has_anchor = state["has_anchor"]
        self._anchor.restore(state["anchor"])
        self._momentum.restore(state["momentum"])
