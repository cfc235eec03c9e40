"""Asynchronous SGD whose gradients are corrected for the change of the weights since their values were fetched.

Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017. Barkai, Hakimi, Schuster, Gap
Aware Mitigation of Gradient Staleness, 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...errors import ArgumentError
from .asgd import ASGDUpdate
from .update import Schedule, Update

__all__ = ["CompensatedUpdate", "DCASGDUpdate", "GapAwareUpdate"]


class CompensatedUpdate(ASGDUpdate):
    """Base of :class:`ASGDUpdate` with gradients that :meth:`compensated` corrects before they are sent.

    At each step a rank fetches the values, corrects its gradient by their difference to its own weights, sends it, and
    takes the values with its own step: what the servers hold if no other rank has sent meanwhile. What arrives between
    the fetch and the send is not compensated, but counted as staleness.

    Args:
        network: The network.
        lr: The rate: a number, or a function of the step.
        **options: The options of :class:`Update`.

    Example:
        class Halved(ps.CompensatedUpdate):
            def compensated(self, index, gradient, center, own):
                return gradient / 2
    """

    def __init__(self, network: nn.Module, *, lr: Schedule, **options: Any) -> None:
        super().__init__(network, lr=lr, **options)
        self._corrected: list[Tensor | None] = []

    def compensated(self, index: int, gradient: Tensor, center: Tensor, own: Tensor) -> Tensor:
        """Return the corrected gradient of a parameter, as a tensor of its own.

        Args:
            index: The number of the parameter.
            gradient: The gradient at `own`.
            center: The values of the servers.
            own: The values with which the gradient was computed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement compensated().")

    def fetch(self) -> None:
        """Start to receive the values; the gradient is sent afterwards."""
        Update.fetch(self)

    def integrate(self, center: list[Tensor]) -> None:
        """Correct the gradients, and take the values of the servers with the own step."""
        lists = zip(self.gradients(), center, self.parameters, strict=True)
        self._corrected = [
            None if gradient is None else self.compensated(index, gradient.to_dense(), value, own)
            for index, (gradient, value, own) in enumerate(lists)
        ]
        torch._foreach_copy_(self.parameters, center)

    def send(self, integrated: bool) -> None:
        """Send the gradients, corrected if values have been fetched, and take the own step."""
        gradients = self._corrected if integrated else self.gradients()
        for own, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                own.sub_(gradient, alpha=self.at(self.lr or 0.0))
        self.push(gradients, self.rule(), base=self.gradient_base)


@checks_types
class DCASGDUpdate(CompensatedUpdate):
    """DC-ASGD: ``g + lambda * g * g * (w(t + tau) - w(t))``, a first-order correction with the diagonal of g g^T.

    With `mean_square`, lambda is divided by the root of a moving average of the squared gradient, as in DC-ASGD-a:
    ``m = mean_square * m + (1 - mean_square) * g * g``, ``lambda / sqrt(m + 1e-7)``.

    Args:
        network: The network.
        variance_control: lambda: a number, or a function of the step.
        mean_square: Decay rate of the moving average; None for a constant lambda.
        **options: ``lr`` and the options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.DCASGDUpdate(model, lr=0.1, variance_control=0.04)
    """

    def __init__(
        self, network: nn.Module, *, variance_control: Schedule = 0.04, mean_square: float | None = None, **options: Any
    ) -> None:
        super().__init__(network, **options)
        if mean_square is not None and not 0 <= mean_square < 1:
            raise ArgumentError(f"mean_square={mean_square!r}: expected a number from 0 to below 1, or None.")
        self.variance_control, self.mean_square = variance_control, mean_square
        self._squares: dict[int, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, without the network and the shards."""
        return {**super().state_dict(), "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; call it before ``start()`` and the first step."""
        super().load_state_dict(state)
        self._squares = state["squares"]

    def compensated(self, index: int, gradient: Tensor, center: Tensor, own: Tensor) -> Tensor:
        """Return ``g + lambda * g * g * (center - own)``."""
        square, control = gradient * gradient, self.at(self.variance_control)
        correction = square * (center - own)
        if self.mean_square is None:
            return gradient + control * correction
        mean = self._squares.setdefault(index, torch.zeros_like(square))
        mean.mul_(self.mean_square).add_(square, alpha=1 - self.mean_square)
        return gradient + control * correction / (mean + 1e-7).sqrt()


@checks_types
class GapAwareUpdate(CompensatedUpdate):
    """Gap-aware: ``g / (1 + gap)``, where the gap counts steps: ``|w(t + tau) - w(t)| / (lr * mean |g|)``.

    The norms are those of each parameter, and the mean is that over all gradients of the rank so far. A gradient whose
    weights have hardly changed is not reduced, however many updates there were.

    Args:
        network: The network.
        **options: ``lr`` and the options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.GapAwareUpdate(model, lr=0.1)
    """

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, **options)
        self._norms: dict[int, tuple[float, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, without the network and the shards."""
        return {**super().state_dict(), "norms": self._norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; call it before ``start()`` and the first step."""
        super().load_state_dict(state)
        self._norms = state["norms"]

    def compensated(self, index: int, gradient: Tensor, center: Tensor, own: Tensor) -> Tensor:
        """Return ``g / (1 + gap)``."""
        total, count = self._norms.get(index, (0.0, 0))
        self._norms[index] = total, count = total + float(gradient.norm()), count + 1
        step = self.at(self.lr or 0.0) * total / count
        gap = float((center - own).norm()) / step if step > 0 else 0.0
        return gradient / (1.0 + gap)
