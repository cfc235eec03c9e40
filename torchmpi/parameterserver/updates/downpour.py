"""Downpour: gradients are sent to the servers, whose values periodically replace those of the network.

Dean et al., Large Scale Distributed Deep Networks, 2012.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...errors import ArgumentError
from ...nn.periodic_update import check_whole
from ..parameter_lists import Base, LocalUpdate, apply_local_update
from ..rules import Rule, scaled_add
from ..servers import prepared_for
from .update import Schedule, Update

__all__ = ["DownpourUpdate"]


@checks_types
class DownpourUpdate(Update):
    """Sends accumulated gradients every `send_frequency` steps, and periodically copies the values of the servers.

    Exactly one of `lr`, `local_update` and `rule` determines how the servers use the gradients; `local_update` may be
    combined with `rule`. The gradients of all ranks add up: divide `lr` by their number to move as fast as one rank.

    Args:
        network: The network.
        send_frequency: Steps for which gradients are accumulated before they are sent. With a finite `max_staleness`
            they are also sent at each integration, so that no gradient of a finished round is missing.
        lr: The servers subtract ``lr * gradient``: a number, or a function of the step. The attribute ``lr`` may be
            changed during training.
        local_update: The servers add ``local_update(gradient)``, which may change its argument in place.
        rule: The servers apply this rule to the gradient, for example ``ps.adam(1e-3)``. A parameter without a gradient
            is sent zeros, with which momentum, moments and weight decay still move it.
        **options: The other options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.DownpourUpdate(model, lr=0.1, update_frequency=5, init_delay=0)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            update.update()
            optimizer.step()
        update.finish()
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        send_frequency: int = 1,
        lr: Schedule | None = None,
        local_update: LocalUpdate | None = None,
        rule: str | Rule = "add",
        **options: Any,
    ) -> None:
        super().__init__(network, **options)
        check_whole("send_frequency", send_frequency, 1)
        given = [lr is not None, local_update is not None, rule != "add"]
        if not any(given) or (given[0] and sum(given) > 1):
            raise ArgumentError(
                "DownpourUpdate: the use of the gradients by the servers is not determined: pass lr=, or "
                "local_update=, or the rule= of an optimizer such as adam(1e-3)."
            )
        self.send_frequency, self.lr, self.local_update, self.rule = send_frequency, lr, local_update, rule
        self._bases: list[list[Base] | None] = []
        """For each accumulated gradient: the version of its weights on each server; None if unknown."""
        self._restored: list[Tensor] = []
        """Accumulated gradients of a loaded state, until there are servers."""

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "send_frequency": self.send_frequency}

    def integrate(self, center: list[Tensor]) -> None:
        """Take the values of the servers."""
        torch._foreach_copy_(self.parameters, center)

    def send(self, integrated: bool) -> None:
        """Accumulate the gradients, and send them if `send_frequency` requires it."""
        self.settle_send()  # gradients are accumulated in the buffers that are sent
        self.servers.gather(self.gradients(), add=bool(self._bases))
        self._bases.append(self.gradient_base)
        if len(self._bases) >= self.send_frequency or (integrated and self.clock is not None):
            self._send_accumulated()

    def _send_accumulated(self) -> None:
        bases, self._bases = self._bases, []
        known = [base for base in bases if base is not None]
        is_known = len(known) == len(bases)
        base = [np.mean(each, axis=0) for each in zip(*known, strict=True)] if is_known else None
        flat = self.servers.outgoing
        if self.local_update is not None:
            apply_local_update(self.local_update, self.servers.make_dense())
        self.begin_send(self.rule if self.lr is None else scaled_add(-self.at(self.lr)), flat, base=base)

    def finish(self) -> None:
        """Send the accumulated gradients, wait for the sends of this rank, and leave the clock."""
        try:
            if self._bases and not self.is_finished:
                with torch.no_grad():
                    self._send_accumulated()
        finally:
            super().finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, including accumulated gradients, without the network and the shards."""
        state = super().state_dict()
        has_own = self._bases and self._servers is not None
        accumulated = self.servers.make_dense().clones() if has_own else self._restored
        return {**state, "num_accumulated": len(self._bases), "accumulated": accumulated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; call it before ``start()`` and the first step."""
        super().load_state_dict(state)
        self._bases, self._restored = [None] * state["num_accumulated"], state["accumulated"]

    def start(self) -> None:
        """Create the servers now instead of at step `init_delay`. Collective over the sharding communicator."""
        super().start()
        for server in self.servers.servers:
            prepared_for(server, self.rule, f"{server.group.where}: DownpourUpdate")  # not as late as a send
        if self._bases:
            self.servers.outgoing.restore(self._restored)
            self._restored = []
