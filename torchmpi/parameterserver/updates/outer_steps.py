"""Local training, and outer steps that the servers take when the change of a rank arrives: DiLoCo and FedBuff.

Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024. Nguyen et al., Federated Learning with Buffered
Asynchronous Aggregation, 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...errors import ArgumentError
from ...tensors.flat_buffers import FlatBuffers
from ..rules import Rule, buffered, damped, sgd
from .update import Schedule, Update, shown

__all__ = ["AsyncDiLoCoUpdate", "FedBuffUpdate"]


@checks_types
class AsyncDiLoCoUpdate(Update):
    """DiLoCo without waiting: every `update_frequency` steps a rank sends its change, and takes the new anchor.

    The outer gradient ``d = anchor - parameters`` of a rank is a gradient for the servers, which take a step of SGD
    with Nesterov's momentum when it arrives: ``m = momentum * m + d``, ``anchor -= outer_lr * (d + momentum * m)``. All
    ranks share the momentum. Ranks of different speed may have different periods.

    Args:
        network: The network, which an inner optimizer trains.
        update_frequency: Inner steps between two outer steps of a rank.
        init_delay: Step at which the servers are created.
        outer_lr: Rate of the outer step: a number, or a function of the step. The changes of all ranks add up.
        outer_momentum: Momentum of the outer step.
        nesterov: Whether it is Nesterov's.
        power: The outer rate is divided by this power of the staleness, see :func:`damped`; 0 for a constant rate.
        **options: The other options of :class:`Update`, except `prefetch`: values are fetched after the send.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with ps.AsyncDiLoCoUpdate(model, update_frequency=100, outer_lr=0.7 / mpi.size()) as update:
            for x, y in batches:
                inner.zero_grad()
                loss(model(x), y).backward()
                update.update()
                inner.step()
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        update_frequency: Schedule = 100,
        init_delay: int = 0,
        outer_lr: Schedule = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        power: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay, **options)
        if self.prefetch:
            raise ArgumentError(f"{type(self).__name__}: prefetch={self.prefetch}: values are fetched after a send.")
        self.outer_lr, self.outer_momentum, self.nesterov, self.power = outer_lr, outer_momentum, nesterov, power
        self.rule()  # raises unless the options are valid
        self._anchor: FlatBuffers | None = None

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "outer_lr": shown(self.outer_lr), "outer_momentum": self.outer_momentum}

    def rule(self) -> Rule:
        """Return the outer step of the servers."""
        momentum = self.outer_momentum
        plain = sgd(self.at(self.outer_lr), momentum, nesterov=self.nesterov and momentum > 0)
        return damped(plain, self.power) if self.power else plain

    @property
    def anchor(self) -> list[Tensor]:
        """The values from which the change of this rank is counted."""
        if self._anchor is None:
            self._anchor = FlatBuffers(self.parameters)
            self._anchor.gather(self.parameters)
        return self._anchor.views

    def start(self) -> None:
        """Create the servers now instead of at step `init_delay`. Collective over the sharding communicator."""
        super().start()
        _ = self.anchor  # begins here

    def fetch(self) -> None:
        """Send the change, and start to receive an anchor that contains it."""
        change = torch._foreach_sub(self.anchor, self.parameters)
        self.push(change, self.rule())
        super().fetch()

    def integrate(self, center: list[Tensor]) -> None:
        """Continue from the new anchor."""
        torch._foreach_copy_(self.parameters, center)
        torch._foreach_copy_(self.anchor, center)

    def send(self, integrated: bool) -> None:
        """Do nothing: the change was sent before the fetch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, with its anchor, without the network and the shards."""
        return {**super().state_dict(), "anchor": None if self._anchor is None else self._anchor.clones()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; call it before ``start()`` and the first step."""
        super().load_state_dict(state)
        if state["anchor"] is not None:
            self._anchor = FlatBuffers(self._adopt_parameters())
            self._anchor.restore(state["anchor"])


@checks_types
class FedBuffUpdate(AsyncDiLoCoUpdate):
    """FedBuff: the servers add up `size` changes, each with a weight by its staleness, and then take one step.

    ``w(t+1) = w(t) - outer_lr / size * sum(d / sqrt(1 + tau))`` over the `size` changes d that arrived since the last
    step; tau is the staleness of each. See :func:`buffered`.

    Args:
        network: The network, which an inner optimizer trains.
        size: Changes for a step of the servers.
        outer_lr: Rate of the step: a number, or a function of the step.
        power: Power of ``1 + tau`` by which a change is divided; 0 for equal weights.
        **options: ``update_frequency``, ``init_delay`` and the options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.FedBuffUpdate(model, size=4, update_frequency=20)
    """

    def __init__(
        self, network: nn.Module, *, size: int, outer_lr: Schedule = 1.0, power: float = 0.5, **options: Any
    ) -> None:
        self.size = size
        super().__init__(network, outer_lr=outer_lr, power=power, **options)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "size": self.size}

    def rule(self) -> Rule:
        """Return the rule of the servers."""
        rule = buffered(self.at(self.outer_lr), self.size)
        return damped(rule, self.power, offset=1.0) if self.power else rule
