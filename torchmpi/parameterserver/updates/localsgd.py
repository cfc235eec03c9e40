"""Local SGD: each rank trains on its own, and every so many steps all take the average.

Stich, Local SGD Converges Fast and Communicates Little, 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...collectives.tensor_lists import allreduce_many
from ...communicators.levels import Comm
from ...session import runtime
from .periodic import PeriodicUpdate


class LocalSGDUpdate(PeriodicUpdate):
    """Averages the parameters over the ranks of `comm` every `update_frequency` steps, without servers.

    `update()` is called once per step, *after* the optimizer's, by all ranks equally often: it is collective. The
    first `init_delay` steps do not count. The ranks should begin with equal parameters
    (``mpinn.synchronize_parameters``). With ``update_frequency=1`` and plain SGD it is data-parallel training.

        with ps.LocalSGDUpdate(model, update_frequency=16) as update:
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
        self._has_news = False
        """Whether a step has been taken since the last average."""

    def _take_step(self) -> bool:
        num_steps = self.step + 1 - self.init_delay
        if num_steps <= 0:
            return False
        self._has_news = True
        if num_steps % self.update_frequency:
            return False
        self._communicate()
        return True

    @torch.no_grad()
    def _communicate(self) -> None:
        self._check_parameters()
        self._integrate()
        self._has_news = False
        self.num_integrations += 1
        self.num_sends += 1
        # What is given to allreduce and comes back, however it travels.
        num_bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._bytes_sent += num_bytes
        self._bytes_received += num_bytes

    def _integrate(self) -> None:
        """Make the parameters of all ranks equal."""
        allreduce_many(self._parameters, op="avg", comm=self.communicator)

    def finish(self) -> None:
        """Average a last time, if there were steps since. Collective."""
        if not self.is_finished:
            super().finish()
            if self._has_news:
                self._communicate()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later, apart from the network."""
        return {**super().state_dict(), "has_news": self._has_news}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        super().load_state_dict(state)
        self._has_news = state["has_news"]
