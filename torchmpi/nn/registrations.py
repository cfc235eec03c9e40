"""Nets whose gradients will be synchronized, and checks that no gradient is used before.

An optimizer step with gradients that are not synchronized makes the replicas differ without an error. The gradients of
registered nets are known from hooks. For other nets ``synchronize_gradients`` compares its gradients with those that
the last step has used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import count
from typing import Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..communicators.communicator import Communicator
from ..errors import ArgumentError, GradientError, rank_prefix
from .gradients import note_use


class Registration(Protocol):
    """A net of which hooks see the gradients."""

    known: set[int]
    """The ids of the parameters."""

    @property
    def outer_comm(self) -> Communicator:
        """The communicator over which gradients are synchronized, as the caller named it."""

    @property
    def is_pending(self) -> bool:
        """Whether this rank has gradients that are not synchronized."""

    @property
    def is_inside_join(self) -> bool:
        """Whether the net is inside ``join``."""

    def finish(self, *, flush: bool = False) -> bool:
        """Synchronize the gradients."""


_registrations: weakref.WeakValueDictionary[int, Registration] = weakref.WeakValueDictionary()
"""By a number that increases: in the order of registration, which is the same on all ranks."""
_numbers = count()


def add_registration(registration: Registration) -> int:
    """Check the uses of the gradients of a net from now on, and return the number of the registration."""
    number = next(_numbers)
    _registrations[number] = registration
    return number


def remove_registration(number: int) -> None:
    """End the checks."""
    _registrations.pop(number, None)


def registered_for(parameters: Iterable[Tensor]) -> list[Registration]:
    """Return the registrations of some of `parameters`, in the same order on all ranks."""
    ids = {id(parameter) for parameter in parameters}
    return [registration for registration in _registrations.values() if not ids.isdisjoint(registration.known)]


def refuse_shared(net: nn.Module, own: Registration | None) -> None:
    """Raise if another net than that of `own` has registered some of the parameters of `net`.

    The gradient of a parameter is in one bucket, and after a synchronization of one net it has changed for the other.
    """
    for other in registered_for(net.parameters()):
        if other is not own:
            shared = [name for name, parameter in net.named_parameters() if id(parameter) in other.known]
            raise ArgumentError(
                f"{rank_prefix()}The parameters {', '.join(map(repr, shared))} belong to another net too, which "
                "is registered or has "
                "a DistributedOptimizer. Pass one module that contains both nets, such as nn.ModuleList([a, b]), or "
                "unregister the other net, or delete its optimizer, before."
            )


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _refuse_pending(optimizer, "step()")
    note_use(optimizer)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _refuse_pending(optimizer, "step()")


def _checked(unscale: Callable[[GradScaler, Optimizer], None]) -> Callable[[GradScaler, Optimizer], None]:
    @wraps(unscale)
    def checked(self: GradScaler, optimizer: Optimizer) -> None:
        _refuse_pending(optimizer, "a GradScaler")
        unscale(self, optimizer)
        note_use(optimizer)

    return checked


def _refuse_pending(optimizer: Optimizer, user: str) -> None:
    """Raise if gradients of `optimizer` belong to a registered net and are not synchronized."""
    if not any([registration.is_pending for registration in _registrations.values()]):
        return
    for registration in registered_for(each for group in optimizer.param_groups for each in group["params"]):
        if registration.is_pending:
            raise GradientError(
                f"rank {registration.outer_comm.rank}: {user} uses gradients of {type(optimizer).__name__} that are "
                "not synchronized. Call synchronize_gradients_async(net) after backward, also in a closure; with a "
                "DistributedOptimizer call its step(), and its synchronize() before a GradScaler."
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)  # a closure may have run backward without a synchronization
# Its operation changes gradients without a change of their version counters, and torch has no hook there.
setattr(GradScaler, "unscale_", _checked(GradScaler.unscale_))  # noqa: B010, assignment is refused by mypy
