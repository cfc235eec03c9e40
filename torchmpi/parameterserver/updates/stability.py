"""Whether elastic averaging with momentum is stable: the linear map of a round on a quadratic loss."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...argument_types import checks_types
from ...errors import ArgumentError

__all__ = ["elastic_growth"]

_MOST_CLIENTS, _MOST_STEPS = 8, 64


@checks_types
def elastic_growth(
    rate: float, *, momentum: float = 0.9, alpha: float = 0.225, num_clients: int = 4, period: int = 10
) -> float:
    """Return by which factor a round of EAMSGD multiplies an error on a quadratic loss: more than 1 diverges.

    The clients come in turn, as in the analysis of Zhang, Choromanska, LeCun (2015): each moves towards the center, and
    the center towards it, by `alpha` of their distance, and takes `period` steps of SGD with Nesterov's momentum.

    Args:
        rate: Learning rate times the curvature of the loss.
        momentum: Nesterov's momentum; 0 for EASGD.
        alpha: The fraction of their distance by which network and center move: `beta` divided by the clients.
        num_clients: Number of clients; of more than 8, 8.
        period: Steps between two integrations; of more than 64, 64.

    Returns:
        The spectral radius of the round.

    Raises:
        ArgumentError: A number is negative.

    Example:
        >>> elastic_growth(0.1) < 1 < elastic_growth(2.5)
        True
    """
    if not min(rate, momentum, alpha, num_clients, period) >= 0:
        raise ArgumentError("elastic_growth: expected numbers from 0.")
    clients = max(1, min(num_clients, _MOST_CLIENTS))
    # Rows of the identity are initial errors: of each client its point and its momentum, and last of the center.
    state = np.eye(2 * clients + 1)
    for client in range(clients):
        point, speed = state[2 * client], state[2 * client + 1]
        for step in range(max(1, min(period, _MOST_STEPS))):
            gradient = point.copy()
            if step == 0:  # the gradient of a step is older than its integration
                distance = state[-1] - (point + rate * momentum * speed)
                point += alpha * distance
                state[-1] -= alpha * distance
            speed *= momentum
            speed += gradient
            point -= rate * (gradient + momentum * speed)
    return float(np.abs(np.linalg.eigvals(state)).max())


def largest_rate(rate: float, **options: float) -> float:
    """Return the largest stable rate below an unstable one.

    >>> 1.0 < largest_rate(4.0, momentum=0.9, alpha=0.1, num_clients=2, period=2) < 2.0
    True
    """
    low, high = 0.0, rate
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if elastic_growth(middle, **options) <= 1 + 1e-9 else (low, middle)  # type: ignore[arg-type]
    return low


class CurvatureMeter:
    """The curvature of a loss along the steps that are taken: ``<change of gradient, step> / <step, step>``.

    It is summed over a window of steps, so that the noise of a gradient has little effect.

    >>> import torch
    >>> meter = CurvatureMeter(2)
    >>> [meter.add([torch.tensor([x])], [torch.tensor([3.0 * x])]) for x in (1.0, 2.0, 4.0)]
    [None, None, 3.0]
    """

    def __init__(self, window: int) -> None:
        self._window, self._count = window, 0
        self._products = self._squares = 0.0
        self._last: tuple[list[Tensor], list[Tensor]] | None = None

    def add(self, points: list[Tensor], gradients: list[Tensor]) -> float | None:
        """Add a point with its gradient; return the curvature at the end of a window of steps."""
        own, last = ([point.clone() for point in points], [each.clone() for each in gradients]), self._last
        self._last = own
        if last is None:
            return None
        for point, gradient, old_point, old_gradient in zip(*own, *last, strict=True):
            step = (point - old_point).double().flatten()
            self._products += float(step @ (gradient - old_gradient).double().flatten())
            self._squares += float(step @ step)
        self._count += 1
        if self._count < self._window:
            return None
        found = self._products / self._squares if self._squares > 0 else 0.0
        self._count, self._products, self._squares = 0, 0.0, 0.0
        return found
