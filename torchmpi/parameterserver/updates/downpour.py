"""Downpour: gradients go to the server as they come, and its values replace the network's now and then.

Dean et al., Large Scale Distributed Deep Networks, 2012.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, CheckpointError
from ..rules import Rule, scaled_add
from ..tensors import apply_to_each
from .periodic import check_whole
from .update import Update

LocalUpdate = Callable[[Tensor], Tensor]


class DownpourUpdate(Update):
    """Accumulates gradients, sends them every `send_frequency` steps, and copies what the server has.

    What the server does with them is one of three: with `lr`, it subtracts ``lr * gradient`` (change ``update.lr`` as
    you would in an optimizer); with `local_update`, it adds what that makes of each accumulated gradient, which it
    may change in place; with a `rule` such as ``ps.adam(1e-3)``, it takes a step of that optimizer. Other options are
    those of :class:`Update`.

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
        lr: float | None = None,
        local_update: LocalUpdate | None = None,
        rule: str | Rule = "add",
        **options: Any,
    ) -> None:
        super().__init__(network, **options)
        check_whole("send_frequency", send_frequency, 1)
        given = [lr is not None, local_update is not None, rule != "add"]
        if not any(given) or (given[0] and sum(given) > 1):
            raise ArgumentError(
                "DownpourUpdate needs to know what the server shall do with gradients: pass lr=, or local_update=, or "
                "the rule= of an optimizer such as adam(1e-3)."
            )
        self.send_frequency, self.lr, self.local_update, self.rule = send_frequency, lr, local_update, rule
        self._num_accumulated = 0
        self._restored: list[Tensor] = []
        """What had been accumulated when the state was saved, until there are servers to accumulate for."""

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "send_frequency": self.send_frequency}

    def _integrate(self) -> None:
        self._fetched().scatter(self._parameters)

    def _send(self, integrated: bool) -> None:
        self._settle_send()  # gradients are accumulated where they are sent from
        gradients = [parameter.grad for parameter in self._parameters]
        self.servers.outgoing.gather(gradients, add=self._num_accumulated > 0)
        self._num_accumulated += 1
        if self._num_accumulated >= self.send_frequency:
            self._send_accumulated()

    def _send_accumulated(self) -> None:
        self._num_accumulated = 0
        flat = self.servers.outgoing
        apply_to_each(self.local_update, flat)
        self._begin_send(self.rule if self.lr is None else scaled_add(-self.lr), flat)

    def finish(self) -> None:
        """Send what has been accumulated, wait for it, and let no other rank wait for this one."""
        try:
            if self._num_accumulated and not self.is_finished:
                with torch.no_grad():
                    self._send_accumulated()
        finally:
            super().finish()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later, the gradients that have not been sent included."""
        state = super().state_dict()
        has_own = self._num_accumulated and self._servers is not None
        flats = self.servers.outgoing.flats if has_own else self._restored
        return {**state, "num_accumulated": self._num_accumulated, "accumulated": [flat.clone() for flat in flats]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave; before ``start()`` or the first step."""
        super().load_state_dict(state)
        self._num_accumulated, self._restored = state["num_accumulated"], state["accumulated"]

    def start(self) -> None:
        """Make the servers now, and not at step `init_delay`. Collective over the sharding communicator."""
        super().start()
        if self._num_accumulated:
            restore_flats(self.servers.outgoing.flats, self._restored)
            self._restored = []


def restore_flats(flats: list[Tensor], saved: list[Tensor]) -> None:
    """Copy saved flat memory back.

    >>> restore_flats([torch.zeros(2)], [torch.zeros(3)])
    Traceback (most recent call last):
    torchmpi.errors.CheckpointError: The saved state has [3] elements, the network [2]. Resume with the same network.
    """
    lengths, expected = [flat.numel() for flat in saved], [flat.numel() for flat in flats]
    if lengths != expected:
        raise CheckpointError(
            f"The saved state has {lengths} elements, the network {expected}. Resume with the same network."
        )
    for flat, values in zip(flats, saved, strict=True):
        flat.copy_(values)
