"""The guard of gradients that are used too early: after backward has written them, and before they are synchronized.

Such a use makes the replicas differ without an error, as each rank steps, clips or scales by gradients of its own. A
gradient is pending from the hook that sees it until its synchronization; a :class:`GradientGuard` knows the pending
gradients of one net or optimizer, and refuses their uses at once, or, where a use shows in the gradients only, when the
ranks synchronize. Nets without hooks have no guard: of these, the gradients that the last step has used are compared at
the synchronization. All messages are made by :func:`early_use`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, GradientError, rank_prefix
from .join_state import JOIN_STATE
from .replica import Replica, attached
from .sharding import sharding_of

IN_ONE_CALL = "synchronize_gradients(net) after backward"
ASYNCHRONOUS = "synchronize_gradients_async(net) after backward, also in a closure"
BY_OPTIMIZER = "step() of the DistributedOptimizer, or its synchronize()"
"""What synchronizes gradients: the remedy in messages."""


def early_use(use: str, names: Sequence[str], call: str) -> str:
    """Return the message about gradients that are used before they are synchronized, without the rank.

    Args:
        use: Who uses them, and how.
        names: The names of their parameters; none for shards of other ranks.
        call: What synchronizes them.

    >>> print(early_use("step() of SGD uses", ["0.weight", "0.bias"], IN_ONE_CALL))
    step() of SGD uses the gradient of '0.weight' and 1 other before it is synchronized. Call \
synchronize_gradients(net) after backward, before gradients are clipped, unscaled, cleared, used by step(), changed \
otherwise, or added to by another backward.
    """
    which = repr(names[0]) if names else "a shard"
    if len(names) > 1:
        which += f" and {len(names) - 1} other{'s' if len(names) > 2 else ''}"
    return (
        f"{use} the gradient of {which} before it is synchronized. Call {call}, before gradients are clipped, "
        "unscaled, cleared, used by step(), changed otherwise, or added to by another backward."
    )


class GradientGuard:
    """The gradients of a net, or of an optimizer, that hooks of backward have seen, until they are synchronized.

    Args:
        net: The net; None if `names` is given.
        comm: The communicator over which gradients are synchronized, as the caller named it.
        synchronize: Synchronizes the gradients.
        call: The call that does so, for messages.
        names: Returns the names of parameters.
        error: The class of errors.

    Attributes:
        known: The ids of the parameters.
        is_pending: Whether this rank has gradients that are not synchronized.
    """

    def __init__(
        self,
        net: nn.Module | None,
        comm: Communicator,
        synchronize: Callable[[], object],
        call: str,
        *,
        names: Callable[[Sequence[Tensor]], list[str]] | None = None,
        error: type[GradientError] = GradientError,
    ) -> None:
        self._net, self.comm, self.synchronize, self.call = net, comm, synchronize, call
        self._names, self._error = names, error
        self.known: set[int] = set()
        self.is_pending = False
        self._written: dict[int, tuple[Tensor, Tensor, int]] = {}

    @property
    def is_inside_join(self) -> bool:
        return self._net is not None and attached(self._net, JOIN_STATE) is not None

    def open(self) -> None:
        """Refuse early uses from now on."""
        self._number = next(_numbers)
        _guards[self._number] = self

    def close(self) -> None:
        """End the checks."""
        _guards.pop(self._number, None)

    def note(self, parameter: Tensor, gradient: Tensor) -> None:
        """Note that autograd has written `gradient`, which is that of `parameter`."""
        self.is_pending = True
        self._written[id(parameter)] = parameter, gradient, gradient._version

    def clear(self) -> None:
        """Accept the present gradients: they are synchronized, or will be discarded."""
        self.is_pending = False
        self._written = {}

    def changed(self, *, may_be_cleared: bool = False) -> set[int]:
        """Return the ids of the parameters whose gradients were written or replaced after autograd wrote them.

        The ranks agree on them when they synchronize, so that all raise.
        """
        return {
            number
            for number, (parameter, gradient, version) in self._written.items()
            if (parameter.grad is not gradient or gradient._version != version)
            and not (may_be_cleared and parameter.grad is None)
        }

    def message(self, use: str, parameters: Sequence[Tensor]) -> str:
        """Return the message about an early use of the gradients of `parameters`, without the rank."""
        if self._names is not None:
            return early_use(use, self._names(parameters), self.call)
        assert self._net is not None
        return early_use(use, Replica(self._net).names(parameters), self.call)

    def refuse(self, use: str, parameters: Sequence[Tensor] | None = None, also: str = "") -> None:
        """Raise if gradients are pending.

        Args:
            use: Who uses them, and how.
            parameters: The parameters, of which the message names those with a gradient. Default: those of the guard.
            also: Another sentence for the message.
        """
        if self.is_pending:
            if parameters is None:
                parameters = [parameter for parameter, *_ in self._written.values()]
            used = [each for each in parameters if id(each) in self.known and each.grad is not None]
            raise self._error(rank_prefix() + self.message(use, used) + also)


_guards: weakref.WeakValueDictionary[int, GradientGuard] = weakref.WeakValueDictionary()
"""By a number that increases: in the order in which they were opened, which is the same on all ranks."""
_numbers = count()


def guards_of(parameters: Iterable[Tensor]) -> list[GradientGuard]:
    """Return the guards of some of `parameters`, in the same order on all ranks."""
    ids = {id(parameter) for parameter in parameters}
    return [guard for guard in _guards.values() if not ids.isdisjoint(guard.known)]


def refuse_shared(net: nn.Module, own: GradientGuard | None) -> None:
    """Raise if another guard than `own` has some of the parameters of `net`.

    The gradient of a parameter is in one bucket, and after a synchronization of one net it has changed for the other.
    """
    for other in guards_of(net.parameters()):
        if other is not own:
            shared = [name for name, parameter in net.named_parameters() if id(parameter) in other.known]
            raise ArgumentError(
                f"{rank_prefix()}The parameters {', '.join(map(repr, shared))} belong to another net too, which is "
                "registered or has a DistributedOptimizer. Pass one module that contains both nets, such as "
                "nn.ModuleList([a, b]), or unregister the other net, or delete its optimizer, before."
            )


# --- uses that are refused at once: by optimizers and scalers


def _refuse_pending(optimizer: Optimizer, use: str) -> None:
    if any([guard.is_pending for guard in _guards.values()]):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for guard in guards_of(parameters):
            guard.refuse(use, parameters)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _after_step(optimizer, args, kwargs)
    _note_use(optimizer)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _refuse_pending(optimizer, f"step() of {type(optimizer).__name__} uses")


def _checked(unscale: Callable[[GradScaler, Optimizer], None]) -> Callable[[GradScaler, Optimizer], None]:
    @wraps(unscale)
    def checked(self: GradScaler, optimizer: Optimizer) -> None:
        _refuse_pending(optimizer, "a GradScaler uses")
        unscale(self, optimizer)
        _note_use(optimizer)

    return checked


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)  # a closure may have run backward without a synchronization
# Its operation changes gradients without a change of their version counters, and torch has no hook there.
setattr(GradScaler, "unscale_", _checked(GradScaler.unscale_))  # noqa: B010, assignment is refused by mypy


# --- overflows of shards


def _agreed(check: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @wraps(check)
    def agreed(self: GradScaler, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        found = check(self, optimizer, *arguments)
        shardings = [sharding_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        comms = {id(each.comm.intra): each.comm for each in shardings if each is not None and each.comm is not None}
        for comm in comms.values():
            mine = torch.tensor(any(bool(each) for each in found.values()), dtype=torch.uint8, device="cpu")
            overflow = bool(collectives.allreduce(mine, op="max", comm=comm))
            for each in found.values():
                each.fill_(overflow)
        return found

    return agreed


# The only rank with a shard would skip a step alone. Steps of fused optimizers come here without `unscale_`.
setattr(GradScaler, "_unscale_grads_", _agreed(GradScaler._unscale_grads_))  # noqa: B010


# --- uses of gradients without hooks, found at their synchronization


class _Probe:
    """The first parameter of an optimizer that has a gradient: the gradients last used, and last synchronized."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.used: weakref.ref[Tensor] | None = None
        self.version = 0
        self.synchronized: weakref.ref[Tensor] | None = None  # before the first synchronization


_probes: dict[int, _Probe] = {}
"""By the id of the parameter."""


def _note_use(optimizer: Optimizer) -> None:
    """Note that a step, or a GradScaler, uses the gradients of an optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                probe = _probes.get(id(parameter))
                if probe is None or probe.parameter() is not parameter:
                    probe = _probes[id(parameter)] = _Probe(parameter)
                probe.used, probe.version = weakref.ref(gradient), gradient._version
                return


def early_uses(parameters: Sequence[Tensor]) -> set[int]:
    """Return the ids of parameters whose gradients a step or a GradScaler has used since backward.

    Called when the gradients are synchronized. The gradient was used if it is the tensor that the last step has used,
    in the same version. It was synchronized before that use if the last call has seen it; the first one knows no step.
    """
    early: set[int] = set()
    for number, probe in list(_probes.items()):
        parameter = probe.parameter()
        if parameter is None:
            del _probes[number]
            continue
        gradient, synchronized = parameter.grad, probe.synchronized
        if gradient is None or gradient.layout is not torch.strided:  # sparse ones are replaced
            continue
        probe.synchronized = weakref.ref(gradient)
        if synchronized is None or synchronized() is gradient or probe.used is None or probe.used() is not gradient:
            continue
        if probe.version == gradient._version:
            for each in parameters:
                if each is parameter:
                    early.add(number)
    return early
