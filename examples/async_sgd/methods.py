"""The compared methods, by name. Those that communicate once per period use the updates of torchmpi."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from trainers import AllReduce, Sequential

import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps


class Periodic(Sequential):
    """Base of the methods that communicate once per period."""

    def __init__(self, network: nn.Module, *, lr: float, period: int) -> None:
        super().__init__(network, lr=lr, period=period)
        self.update = self.make_update()

    def make_update(self) -> Any:
        raise NotImplementedError

    def finish(self) -> None:
        self.update.finish()

    @property
    def bytes_sent(self) -> int:
        return self.update.bytes_sent


class Server(Periodic):
    """Base of the asynchronous methods: no rank waits for another."""

    def __init__(self, network: nn.Module, *, lr: float, period: int) -> None:
        super().__init__(network, lr=lr, period=period)
        self.update.start()

    def before_step(self) -> None:
        self.update.update()

    def center(self) -> Tensor:
        return ps.receive(self.update.servers.servers[0]).wait()  # one server has all parameters of a dtype

    @property
    def staleness(self) -> float:
        return self.update.staleness.mean


class Downpour(Server):
    """The sum of the gradients of a period is sent to the server, whose parameters replace those of the rank."""

    def make_update(self) -> Any:
        every = self.period
        return ps.DownpourUpdate(self.network, lr=self.lr, send_frequency=every, update_frequency=every, init_delay=0)


class EASGD(Server):
    """Each rank trains independently, attracted by a center on the server."""

    def make_update(self) -> Any:
        return ps.EASGDUpdate(self.network, beta=0.9, update_frequency=self.period, init_delay=0)

    def finish(self) -> None:
        self.update.update()  # the last period
        super().finish()


class EAMSGD(EASGD):
    """The same, with Nesterov's momentum in the steps of the ranks."""

    momentum = 0.9

    def make_update(self) -> Any:
        return ps.EAMSGDUpdate(self.network, self.optimizer, beta=0.9, update_frequency=self.period, init_delay=0)


class LocalSGD(Periodic):
    """Each rank trains independently; at the end of a period all take the average."""

    def make_update(self) -> Any:
        return mpinn.LocalSGDUpdate(self.network, update_frequency=self.period)

    def after_step(self) -> None:
        self.update.update()


class DiLoCo(LocalSGD):
    """The same, but with an outer step with Nesterov's momentum along the average change."""

    def make_update(self) -> Any:
        return mpinn.DiLoCoUpdate(self.network, outer_lr=0.7, outer_momentum=0.9, update_frequency=self.period)


METHODS: dict[str, type[Sequential]] = {
    "sequential": Sequential,
    "allreduce": AllReduce,
    "downpour": Downpour,
    "easgd": EASGD,
    "eamsgd": EAMSGD,
    "localsgd": LocalSGD,
    "diloco": DiLoCo,
}
PERIODIC = tuple(name for name, method in METHODS.items() if issubclass(method, Periodic))
LEARNING_RATES: dict[str, dict[int, float]] = {
    "sequential": {0: 0.5},
    "allreduce": {0: 1.0},
    "downpour": {1: 0.5, 4: 0.2, 16: 0.02, 64: 0.005},
    "easgd": {1: 1.0, 4: 1.0, 16: 0.5, 64: 0.5},
    "eamsgd": {1: 0.5, 4: 0.1, 16: 0.05, 64: 0.2},
    "localsgd": {1: 1.0, 4: 1.0, 16: 0.5, 64: 1.0},
    "diloco": {1: 0.5, 4: 0.5, 16: 0.5, 64: 0.5},
}
"""By method and period: the result of one ``compare.py --tune --seeds 1`` on 4 ranks. Asynchronous runs differ."""


def learning_rate(name: str, period: int) -> float:
    """Of this period, or of the longest tuned period below it."""
    return LEARNING_RATES[name][max(tuned for tuned in LEARNING_RATES[name] if tuned <= period)]
