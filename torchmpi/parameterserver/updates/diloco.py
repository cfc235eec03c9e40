"""DiLoCo: local training, and now and then an outer step of SGD with momentum on how far all have come on average.

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
from ..tensors import FlatViews, pieces
from .downpour import restore_flats
from .localsgd import LocalSGDUpdate
from .periodic import broadcast_many


class DiLoCoUpdate(LocalSGDUpdate):
    """Every `update_frequency` steps the average way of all ranks is the gradient of an outer step.

    The way is anchor - parameters, the anchor being where all began; the outer optimizer steps as
    ``torch.optim.SGD(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)`` does, and its result is the next anchor
    and the parameters of all ranks. With ``outer_lr=1, outer_momentum=0`` it is local SGD.

    `update()` is called once per step, *after* the (inner) optimizer's, by all ranks equally often: it is collective,
    and so is making it. The first anchor is rank 0's network, when this is made or after `init_delay` steps.

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
        # Averaged where it lies: memory that ranks of one host share is not copied.
        self._way = FlatViews(self._parameters, allocate=self._allocate)
        self._anchor = FlatViews(self._parameters)
        self._momentum = FlatViews(self._parameters)
        for flat in self._momentum.flats:
            flat.zero_()
        self._has_anchor = False
        if init_delay == 0:
            self._drop_anchor()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate_flat(numel, self._parameters[0].detach().new_empty(0, dtype=dtype))

    def _drop_anchor(self) -> None:
        self._anchor.gather(self._parameters)
        broadcast_many(self._anchor.flats, self.communicator)
        self._has_anchor = True

    def _take_step(self) -> bool:
        if self._has_anchor:
            return super()._take_step()
        if self.step + 1 >= self.init_delay:  # later, if steps are given that do not come by it
            self._drop_anchor()
        return False

    def _integrate(self) -> None:
        for way, anchor, own in pieces(self._way.views, self._anchor.views, self._parameters):
            torch._foreach_copy_(way, anchor)
            torch._foreach_sub_(way, own)
        for flat in self._way.flats:
            collectives.allreduce(flat, op="avg", comm=self.communicator)
        lists = (self._way.views, self._momentum.views, self._anchor.views, self._parameters)
        for way, momentum, anchor, own in pieces(*lists):
            if self.outer_momentum:
                torch._foreach_mul_(momentum, self.outer_momentum)
                torch._foreach_add_(momentum, way)
                if self.nesterov:
                    torch._foreach_add_(way, momentum, alpha=self.outer_momentum)
                else:
                    way = momentum
            torch._foreach_sub_(anchor, way, alpha=self.outer_lr)
            torch._foreach_copy_(own, anchor)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later, apart from the network: the anchor and the outer momentum too."""
        return {
            **super().state_dict(),
            "has_anchor": self._has_anchor,
            "anchor": [flat.clone() for flat in self._anchor.flats],
            "momentum": [flat.clone() for flat in self._momentum.flats],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        super().load_state_dict(state)
        self._has_anchor = state["has_anchor"]
        restore_flats(self._anchor.flats, state["anchor"])
        restore_flats(self._momentum.flats, state["momentum"])
