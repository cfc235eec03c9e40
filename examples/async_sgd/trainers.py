"""Base class of all methods: a network and an optimizer; and the two methods without communication periods."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import torchmpi.nn as mpinn


class Sequential:
    """Plain SGD in one process, on all images."""

    momentum = 0.0

    def __init__(self, network: nn.Module, *, lr: float, period: int = 1) -> None:
        self.network, self.lr, self.period = network, lr, period
        parameters = list(network.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr, self.momentum, nesterov=self.momentum > 0)
        self.num_bytes = sum(parameter.nbytes for parameter in parameters)
        self.num_steps = 0

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.network(images), labels).backward()
        self.before_step()
        self.optimizer.step()
        self.after_step()
        self.num_steps += 1

    def before_step(self) -> None:
        """Hook for the gradients."""

    def after_step(self) -> None:
        """Hook for the new parameters."""

    def finish(self) -> None:
        """Complete communication in progress."""

    def center(self) -> Tensor:
        """A flat copy of the parameters to test; called on rank 0 at the end of a period."""
        return parameters_to_vector(self.network.parameters()).detach()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank."""
        return 0

    @property
    def staleness(self) -> float:
        """Mean number of updates of other ranks that a gradient does not include."""
        return 0.0


class AllReduce(Sequential):
    """Data-parallel SGD: gradients are averaged at every step."""

    def before_step(self) -> None:
        mpinn.synchronize_gradients(self.network)

    @property
    def bytes_sent(self) -> int:
        # Bytes passed to allreduce, as torchmpi's updates count them.
        return self.num_steps * self.num_bytes
