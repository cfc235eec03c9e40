"""Elastic averaging: each rank trains independently, attracted by a center that the servers hold.

Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, 2015. Equations are cited by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...errors import ArgumentError
from ...log import logger
from ...tensors.flat_buffers import cache_blocks
from ..rules import scaled_add
from .stability import CurvatureMeter, elastic_growth, largest_rate
from .update import Schedule, Update, shown

__all__ = ["EAMSGDUpdate", "EASGDUpdate"]

_CHECKED_STEPS = 64


@checks_types
class EASGDUpdate(Update):
    """Moves network and center towards each other: ``d = alpha * (local - center)``, ``local -= d``, ``center += d``.

    alpha is `beta` divided by the number of clients. With the call between ``backward()`` and ``optimizer.step()``, a
    step is eq. 3 and 4 of the paper. The center is the result of the training: :meth:`pull` copies it into the network.

    Args:
        network: The network.
        beta: Strength of the attraction: a number, or a function of the step.
        **options: The other options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid.

    Example:
        update = ps.EASGDUpdate(model, beta=0.9, update_frequency=10, init_delay=0)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            update.update()
            optimizer.step()
        update.finish()
        mpi.barrier()
        update.pull()
    """

    def __init__(self, network: nn.Module, *, beta: Schedule = 0.9, **options: Any) -> None:
        super().__init__(network, **options)
        if not callable(beta) and not beta > 0:
            raise ArgumentError(f"beta={beta!r} must be greater than zero, or the ranks train independently.")
        if self.fetch_rows != "all":
            raise ArgumentError(f"{type(self).__name__}: fetch_rows='used' is for updates that send gradients.")
        self.beta = beta

    @property
    def alpha(self) -> float:
        """The fraction of their distance by which a network and the center move."""
        return self.at(self.beta) / max(self.num_clients, 1)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "beta": shown(self.beta)}

    def integrate(self, center: list[Tensor]) -> None:
        """Move the network towards the center."""
        # The fetched values are replaced by the distances, which send() sends.
        _attract(center, self.parameters, alpha=self.alpha)

    def send(self, integrated: bool) -> None:
        """Move the center towards the network."""
        if integrated:
            self.begin_send(scaled_add(-self.alpha), self.servers.incoming)


@checks_types
class EAMSGDUpdate(EASGDUpdate):
    """Elastic averaging with Nesterov's momentum, eq. 5 of the paper.

    The method diverges at rates at which SGD without momentum converges. During its first 64 steps with servers, a rank
    measures the curvature of the loss along its steps, and warns once if a round would enlarge an error on a quadratic
    loss of this curvature (:func:`elastic_growth`); the warning has the largest stable rate.

    The local steps are those of `optimizer`. A ``torch.optim.SGD`` with ``nesterov=True`` keeps the network at the
    point ``x + momentum * v`` of the next gradient. The attraction of the paper acts on x, so this class, unlike
    :class:`EASGDUpdate`, subtracts the momentum from the distance.

    Args:
        network: The network.
        optimizer: A ``torch.optim.SGD`` with ``nesterov=True`` for all trainable parameters of `network`.
        **options: ``beta`` and the options of :class:`Update`.

    Raises:
        ArgumentError: An option is invalid, or the optimizer does not use Nesterov's momentum.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        update = ps.EAMSGDUpdate(model, optimizer, update_frequency=10, init_delay=0)
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(network, **options)
        if not all(group.get("nesterov") and group.get("momentum") for group in optimizer.param_groups):
            raise ArgumentError(
                "EAMSGDUpdate needs an optimizer with Nesterov's momentum: "
                "torch.optim.SGD(parameters, lr=..., momentum=..., nesterov=True)."
            )
        self.optimizer = optimizer
        self._meter: CurvatureMeter | None = CurvatureMeter(_CHECKED_STEPS // 4)
        self._num_measured = 0

    def _check_stability(self) -> None:
        """Measure the curvature at the point of this step's gradient, and warn if the method diverges there."""
        meter, gradients = self._meter, [gradient for gradient in self.gradients() if gradient is not None]
        if meter is None or len(gradients) < len(self.parameters) or any(each.is_sparse for each in gradients):
            return
        curvature = meter.add(self.parameters, gradients)
        self._num_measured += 1
        if curvature is not None and curvature > 0:
            self._warn_if_unstable(curvature)
        if self._num_measured > _CHECKED_STEPS:
            self._meter = None

    def _warn_if_unstable(self, curvature: float) -> None:
        group, period = self.optimizer.param_groups[0], int(self.at(self.update_frequency))
        rate, momentum = group["lr"], group["momentum"]
        options: dict[str, Any] = {"momentum": momentum, "alpha": self.alpha}
        options |= {"num_clients": self.num_clients, "period": period}
        growth = elastic_growth(rate * curvature, **options)
        if growth > 1 + 1e-6:
            self._meter = None
            limit = largest_rate(rate * curvature, **options) / curvature
            logger.warning(
                f"{self.workers.where}: EAMSGDUpdate probably diverges: with lr={rate:g}, momentum={momentum:g}, "
                f"alpha={self.alpha:.3g} and curvature {curvature:.3g}, measured along the last steps, a round "
                f"multiplies an error by {growth:.3g}. Lower lr to less than {limit:.2g}, or the momentum."
            )

    def send(self, integrated: bool) -> None:
        """Move the center towards the network."""
        if not integrated:
            self._check_stability()
        super().send(integrated)

    def integrate(self, center: list[Tensor]) -> None:
        """Move the network, without its momentum, towards the center."""
        self._check_stability()
        by_factor: dict[float, list[tuple[Tensor, ...]]] = {}
        groups = self.optimizer.param_groups
        factors = {id(own): group["lr"] * group["momentum"] for group in groups for own in group["params"]}
        for distance, local in zip(center, self.parameters, strict=True):
            if id(local) not in factors:
                raise ArgumentError("EAMSGDUpdate: the optimizer does not train all parameters of the network.")
            momentum = self.optimizer.state.get(local, {}).get("momentum_buffer")
            if momentum is None or not factors[id(local)]:  # before the first step, or with lr=0
                by_factor.setdefault(0.0, []).append((distance, local))
            else:
                by_factor.setdefault(factors[id(local)], []).append((distance, local, momentum))
        for factor, members in by_factor.items():
            _attract(*zip(*members, strict=True), alpha=self.alpha, ahead=factor)


def _attract(
    centers: Sequence[Tensor],
    positions: Sequence[Tensor],
    momenta: Sequence[Tensor] = (),
    *,
    alpha: float,
    ahead: float = 0.0,
) -> None:
    """Move positions by alpha towards their centers, and replace the centers by the distances.

    With `momenta` the distances are those of ``position + ahead * momentum``.

    >>> center, position = torch.zeros(1), torch.ones(1)
    >>> _attract([center], [position], alpha=0.25); center, position
    (tensor([-1.]), tensor([0.7500]))
    """
    for distances, own, *rest in cache_blocks(centers, positions, *([momenta] if momenta else [])):
        torch._foreach_sub_(distances, own)
        if rest:
            torch._foreach_sub_(distances, rest[0], alpha=ahead)
        torch._foreach_add_(own, distances, alpha=alpha)
