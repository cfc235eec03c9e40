"""Elastic averaging: each rank trains on its own, held by a spring to a center that the servers keep.

Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, 2015. Its equations are quoted by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ..rules import scaled_add
from ..tensors import pieces
from .update import Update


class EASGDUpdate(Update):
    """Draws network and center together: ``d = alpha * (local - center)``, ``local -= d``, ``center += d``.

    alpha is `beta` divided by the number of clients, so that a center with all its clients moves by beta. Called
    between backward and the optimizer's step, it makes that step eq. 3 and 4 of the paper. Other options are those of
    :class:`Update`.

        update = ps.EASGDUpdate(model, beta=0.9, update_frequency=10, init_delay=0)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            update.update()
            optimizer.step()
        update.finish()
        mpi.barrier()
        update.pull()           # the center is what one keeps
    """

    def __init__(self, network: nn.Module, *, beta: float = 0.9, **options: Any) -> None:
        super().__init__(network, **options)
        if not beta > 0:
            raise ArgumentError(f"beta={beta!r} must be greater than zero: nothing would hold the ranks together.")
        self.beta = beta

    @property
    def alpha(self) -> float:
        """How far one client and the center move towards each other, as a part of their distance."""
        return self.beta / max(self.num_clients, 1)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "beta": self.beta}

    def _integrate(self) -> None:
        # What was fetched becomes the distance, and then what is sent.
        _attract(self._fetched().views, self._parameters, alpha=self.alpha)

    def _send(self, integrated: bool) -> None:
        if integrated:
            self._begin_send(scaled_add(-self.alpha), self.servers.incoming)


class EAMSGDUpdate(EASGDUpdate):
    """Elastic averaging with Nesterov's momentum, eq. 5 of the paper.

    The local steps are those of `optimizer`, a ``torch.optim.SGD`` with ``nesterov=True`` over the same parameters.
    Such an optimizer keeps the network at ``x + momentum * v``, where the next gradient is taken; the spring pulls at
    x, so the momentum is taken out of the distance. With a plain :class:`EASGDUpdate` it would pull at the point ahead.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        update = ps.EAMSGDUpdate(model, optimizer, update_frequency=10, init_delay=0)
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(network, **options)
        if not all(group.get("nesterov") and group.get("momentum") for group in optimizer.param_groups):
            raise ArgumentError(
                "EAMSGDUpdate needs an optimizer that makes Nesterov's steps: "
                "torch.optim.SGD(parameters, lr=..., momentum=..., nesterov=True)."
            )
        self.optimizer = optimizer

    def _integrate(self) -> None:
        rows: dict[float, list[tuple[Tensor, ...]]] = {}
        groups = self.optimizer.param_groups
        factors = {id(own): group["lr"] * group["momentum"] for group in groups for own in group["params"]}
        for distance, local in zip(self._fetched().views, self._parameters, strict=True):
            if id(local) not in factors:
                raise ArgumentError("EAMSGDUpdate: the optimizer does not train all parameters of the network.")
            momentum = self.optimizer.state.get(local, {}).get("momentum_buffer")
            if momentum is None or not factors[id(local)]:  # before the first step, or standing still
                rows.setdefault(0.0, []).append((distance, local))
            else:
                rows.setdefault(factors[id(local)], []).append((distance, local, momentum))
        for factor, members in rows.items():
            _attract(*zip(*members, strict=True), alpha=self.alpha, ahead=factor)


def _attract(
    centers: Sequence[Tensor],
    positions: Sequence[Tensor],
    momenta: Sequence[Tensor] = (),
    *,
    alpha: float,
    ahead: float = 0.0,
) -> None:
    """Move positions by alpha towards their centers, which become the distances; passes over memory once.

    With `momenta` the distances are those of ``position + ahead * momentum``.

    >>> center, position = torch.zeros(1), torch.ones(1)
    >>> _attract([center], [position], alpha=0.25); center, position
    (tensor([-1.]), tensor([0.7500]))
    """
    for distances, own, *rest in pieces(centers, positions, *([momenta] if momenta else [])):
        torch._foreach_sub_(distances, own)
        if rest:
            torch._foreach_sub_(distances, rest[0], alpha=ahead)
        torch._foreach_add_(own, distances, alpha=alpha)
