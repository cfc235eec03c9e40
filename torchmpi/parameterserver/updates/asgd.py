"""Asynchronous SGD whose servers take the steps: plain, of bounded staleness, and with rates that follow the staleness.

Dean et al., Large Scale Distributed Deep Networks, 2012. Ho et al., More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server, 2013. Zhang et al., Staleness-aware Async-SGD, 2015.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...errors import ArgumentError
from ..rules import Rule, damped, sgd
from .update import FetchSchedule, Schedule, Update, shown

__all__ = ["ASGDUpdate", "SSPUpdate", "StalenessAwareUpdate"]


@checks_types
class ASGDUpdate(Update):
    """Sends each gradient to the servers, which take the step, and continues with their values.

    ``w(t+1) = w(t) - lr * g(w(t - tau))``, where tau, the staleness, is the number of steps of other ranks between the
    fetch of the values of a gradient and its application. There is no local optimizer: the loop calls ``backward()``
    and ``update.update()``, no ``optimizer.step()``. On one rank it is plain SGD.

    Args:
        network: The network.
        lr: The rate of plain SGD on the servers: a number, or a function of the step. The gradients of all ranks add
            up.
        rule: In the place of `lr`: another rule, such as ``ps.adam(1e-3)``.
        update_frequency: Steps between two fetches of the values of the servers. Gradients are sent at each step.
        init_delay: Step at which the servers are created.
        **options: The other options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid, or both or none of `lr` and `rule` are given.

    Example:
        with ps.ASGDUpdate(model, lr=0.1) as update:
            for x, y in batches:
                model.zero_grad()
                loss(model(x), y).backward()
                update.update()
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        lr: Schedule | None = None,
        rule: Rule | None = None,
        update_frequency: Schedule = 1,
        init_delay: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay, **options)
        if (lr is None) == (rule is None):
            raise ArgumentError(f"{type(self).__name__}: pass either lr= or rule=, such as rule=ps.adam(1e-3).")
        self.lr, self.given_rule = lr, rule
        self._pushed_at = -1

    @property
    def schedule(self) -> FetchSchedule:
        """The steps that fetch and integrate: the first integration ends the first period of steps."""
        return super().schedule._replace(init_delay=self.init_delay - 1)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "lr": shown(self.lr), "rule": repr(self.given_rule)}

    def rule(self) -> Rule:
        """Return the rule of this step."""
        return sgd(self.at(self.lr)) if self.given_rule is None and self.lr is not None else self.given_rule or sgd(0.0)

    def fetch(self) -> None:
        """Send the gradient of this step and start to receive values that contain it."""
        self._push_gradient()
        super().fetch()

    def integrate(self, center: list[Tensor]) -> None:
        """Take the values of the servers."""
        torch._foreach_copy_(self.parameters, center)

    def send(self, integrated: bool) -> None:
        """Send the gradient, unless a fetch in this step has sent it."""
        self._push_gradient()

    def _push_gradient(self) -> None:
        if self._pushed_at != self.step:
            self._pushed_at = self.step
            self.push(self.gradients(), self.rule(), base=self.gradient_base)


@checks_types
class SSPUpdate(ASGDUpdate):
    """Stale synchronous parallel: :class:`ASGDUpdate` whose ranks are never more than `staleness` rounds apart.

    A rank at round c reads ``w0 + (all updates of rounds up to c - staleness - 1) + (its own) + (some of the newer
    ones)``: before a fetch it waits until no rank is more than `staleness` rounds behind (Ho et al., 2013).

    Args:
        network: The network.
        staleness: Rounds that a rank may be ahead of the slowest one; 0 for bulk synchronous steps.
        **options: The options of :class:`ASGDUpdate`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.SSPUpdate(model, staleness=3, lr=0.1)
    """

    def __init__(self, network: nn.Module, *, staleness: float = 3, **options: Any) -> None:
        super().__init__(network, max_staleness=staleness, **options)


@checks_types
class StalenessAwareUpdate(ASGDUpdate):
    """:class:`ASGDUpdate` whose rate is divided by the staleness of each gradient: ``lr / max(1, tau) ** power``.

    The servers know tau exactly when they apply the gradient; see :func:`damped`. With `power` 1 it is the rule of
    Zhang et al., 2015.

    Args:
        network: The network.
        power: The power of the staleness, a multiple of 0.5.
        offset: What is added to the staleness before.
        **options: The options of :class:`ASGDUpdate`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.StalenessAwareUpdate(model, lr=0.1)
    """

    def __init__(self, network: nn.Module, *, power: float = 1.0, offset: float = 0.0, **options: Any) -> None:
        super().__init__(network, **options)
        self.power, self.offset = power, offset
        damped(sgd(0.0), power, offset=offset)  # raises unless they are valid

    def rule(self) -> Rule:
        """Return the rule of this step."""
        return damped(super().rule(), self.power, offset=self.offset)
