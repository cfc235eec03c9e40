"""Local SGD: each rank trains independently, and periodically all ranks take the average.

Stich, Local SGD Converges Fast and Communicates Little, 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..collectives.tensor_lists import allreduce_many
from ..communicators.levels import Comm
from ..session import runtime
from .periodic_update import PeriodicUpdate

__all__ = ["LocalSGDUpdate"]


class LocalSGDUpdate(PeriodicUpdate):
    """Averages the parameters over the ranks every `update_frequency` steps.

    Call ``update()`` once per step, *after* ``optimizer.step()``. The call is collective: all ranks take the same
    number of steps. ``finish()`` averages a last time if steps were taken since the last average. Start with equal
    parameters (``mpinn.synchronize_parameters``). With ``update_frequency=1`` and plain SGD this is data-parallel
    training.

    Args:
        network: The network.
        update_frequency: Steps between two averages.
        init_delay: Number of first steps that are not counted.
        comm: Communicator, or its level. Default: the current communicator.

    Raises:
        ArgumentError: An option is invalid, or the network has no trainable parameters.

    Example:
        with mpinn.LocalSGDUpdate(model, update_frequency=16) as update:
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
                update.update()
    """

    def __init__(
        self, network: nn.Module, *, update_frequency: int = 10, init_delay: int = 0, comm: Comm = None
    ) -> None:
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay)
        self.communicator = runtime.communicator(comm)
        self._adopt_parameters()
        self._has_changed = False
        """Whether a step has been taken since the last average."""

    def _take_step(self) -> bool:
        num_steps = self.step + 1 - self.init_delay
        if num_steps <= 0:
            return False
        self._has_changed = True
        if num_steps % self.update_frequency:
            return False
        self._communicate()
        return True

    @torch.no_grad()
    def _communicate(self) -> None:
        self._check_parameters()
        self._integrate()
        self._has_changed = False
        self.num_sends += 1

    def _integrate(self) -> None:
        allreduce_many(self._parameters, op="avg", comm=self.communicator)
        self.num_integrations += 1
        self._count_bytes(sum(parameter.nbytes for parameter in self._parameters))

    def _count_bytes(self, num_bytes: int) -> None:
        """Count the bytes passed to collectives, which do not depend on their algorithms."""
        self._bytes_sent += num_bytes
        self._bytes_received += num_bytes

    def finish(self) -> None:
        """Average a last time, if steps were taken since. Collective."""
        if not self.is_finished:
            super().finish()
            if self._has_changed:
                self._communicate()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, without the network."""
        return {**super().state_dict(), "has_news": self._has_changed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        super().load_state_dict(state)
        self._has_changed = state["has_news"]
