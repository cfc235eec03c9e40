"""Clipping of synchronized gradients, with the same result on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, GradientError, rank_prefix
from ..session import runtime
from .gradient_guard import IN_ONE_CALL, GradientGuard, early_use, guards_of
from .join_state import JOIN_STATE
from .replica import Net, Replica, attached
from .sharding import sharding_of

_MIN_TOLERANCE = 1e-4
"""Relative difference of norms of equal gradients: the order of additions depends on the number of threads."""


@checks_types
@torch.no_grad()
def clip_grad_norm_(
    net: Net | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    comm: Comm = None,
) -> Tensor:
    """Clip the norm of all gradients together, after they are synchronized. Collective.

    Like ``torch.nn.utils.clip_grad_norm_``, but reductions of asynchronous hooks are finished first, the norm includes
    the shards of other ranks, and it has the same bits on all ranks.

    Args:
        net: A module, an iterable of parameters, or one parameter.
        max_norm: The largest norm; gradients with a larger one are scaled down.
        norm_type: The p of the p-norm; ``math.inf`` is possible.
        error_if_nonfinite: Raise if the norm is NaN or infinite.
        comm: The communicator over which the gradients are synchronized; default: that of
            ``register_async_backward``, otherwise the current communicator.

    Returns:
        The norm before clipping, the same on all ranks.

    Raises:
        ArgumentError: `max_norm` is negative or not a number.
        GradientError: The norms of the ranks differ: the gradients are not synchronized; or as
            ``synchronize_gradients_async``. Raised on all ranks.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set; raised on all ranks.

    Example:
        loss.backward()
        mpinn.synchronize_gradients(model)
        mpinn.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    _check_limit("clip_grad_norm_: max_norm", max_norm)
    parameters = _parameters(net)
    guards = guards_of(parameters)
    communicator, is_inside_join = _finish_pending(net, guards, comm)
    norm = _total_norm(parameters, norm_type)
    if not is_inside_join:  # ranks without data make no other calls there
        call = guards[0].call if guards else IN_ONE_CALL
        norm = _same_norm(norm, communicator, net if isinstance(net, nn.Module) else parameters, call)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"{rank_prefix()}clip_grad_norm_: the total norm of order {norm_type} of the gradients is {norm.item()}. "
            "Pass error_if_nonfinite=False to scale the gradients by it."
        )
    nn.utils.clip_grads_with_norm_([each for each in parameters if not _is_sparse(each)], max_norm, norm)
    for parameter in parameters:
        if _is_sparse(parameter):
            values = _values(parameter)
            values.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(values.device))
    return norm


@checks_types
@torch.no_grad()
def clip_grad_value_(net: Net | Tensor, clip_value: float, *, comm: Comm = None) -> None:
    """Limit each gradient value to ``[-clip_value, clip_value]``, after the gradients are synchronized. Collective.

    Like ``torch.nn.utils.clip_grad_value_``, but reductions of asynchronous hooks are finished first.

    Args:
        net: A module, an iterable of parameters, or one parameter.
        clip_value: The largest absolute value.
        comm: As for :func:`clip_grad_norm_`.

    Raises:
        ArgumentError: `clip_value` is negative or not a number.
        GradientError: As ``synchronize_gradients_async``; raised on all ranks.

    Example:
        mpinn.clip_grad_value_(model, 0.5)
    """
    _check_limit("clip_grad_value_: clip_value", clip_value)
    parameters = _parameters(net)
    _finish_pending(net, guards_of(parameters), comm)
    clamp_gradients(parameters, clip_value)


@torch.no_grad()
def clamp_gradients(parameters: Sequence[Tensor], clip_value: float) -> None:
    """Limit each gradient value. ``clip_grad_value_`` of torch fails for sparse gradients, and if there are none."""
    for parameter in parameters:
        if parameter.grad is not None:
            _values(parameter).clamp_(-clip_value, clip_value)


def _check_limit(name: str, value: object) -> None:
    if not isinstance(value, (int, float, Tensor)) or not value >= 0:  # also of nan
        raise ArgumentError(f"{rank_prefix()}{name}={value!r}: expected a number from 0.")


def _parameters(net: Net | Tensor) -> list[Tensor]:
    if isinstance(net, nn.Module):
        return list(net.parameters())
    return [net] if isinstance(net, Tensor) else list(net)


def _finish_pending(net: Net | Tensor, guards: Sequence[GradientGuard], comm: Comm) -> tuple[Communicator, bool]:
    """Finish the reductions of the gradients of `net`, whose guards are `guards`.

    Returns:
        The communicator over which the gradients are equal, and whether a net is inside ``join``.
    """
    communicator = guards[0].comm if comm is None and guards else runtime.communicator(comm)
    is_inside_join = attached(net, JOIN_STATE) is not None or any(guard.is_inside_join for guard in guards)
    for guard, is_pending in zip(guards, _any_pending(guards, communicator, is_inside_join), strict=True):
        if is_pending:
            guard.synchronize()
    return communicator, is_inside_join


def _any_pending(guards: Sequence[GradientGuard], comm: Communicator, is_inside_join: bool) -> Sequence[bool]:
    """Return which nets have gradients to reduce on any rank: a rank may have used none of the parameters."""
    pending = [guard.is_pending for guard in guards]
    if not guards or is_inside_join:
        return pending
    flags: list[bool] = collectives.allreduce(torch.tensor(pending, dtype=torch.uint8), op="max", comm=comm).tolist()
    return flags


def _total_norm(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the gradients of a complete net: those on this rank, and the shards on other ranks."""
    replicated: list[Tensor] = []
    shards: dict[int, tuple[Communicator, list[Tensor]]] = {}
    for parameter in parameters:
        sharding = sharding_of(parameter)
        comm = None if sharding is None else sharding.comm
        own = replicated if comm is None else shards.setdefault(id(comm.intra), (comm, []))[1]
        if parameter.grad is not None:
            own.append(_values(parameter))
    norm = nn.utils.get_total_norm(replicated, norm_type)
    if not shards:
        return norm
    norms = [_exact(norm)]
    for comm, gradients in shards.values():
        norms.append(collectives.allgather(_exact(nn.utils.get_total_norm(gradients, norm_type)), comm=comm))
    total: Tensor = torch.linalg.vector_norm(torch.cat(norms), norm_type).to(parameters[0])
    return total


def _exact(norm: Tensor) -> Tensor:
    return norm.double().view(1).cpu()


def _same_norm(norm: Tensor, comm: Communicator, net: Net, call: str) -> Tensor:
    """Return the norm of rank 0; raise on all ranks if another norm differs by more than rounding.

    `call` is what synchronizes the gradients of `net`, for the message.
    """
    norms = collectives.allgather(_exact(norm), comm=comm)
    tolerance = max(_MIN_TOLERANCE, 4 * torch.finfo(norm.dtype).eps)
    if not torch.allclose(norms, norms[0].expand_as(norms), rtol=tolerance, atol=0.0, equal_nan=True):
        text = ", ".join(f"{value:.6g}" for value in norms.tolist())
        replica = Replica(net)
        names = replica.names([each for each in replica.parameters if each.grad is not None])
        use = f"clip_grad_norm_(), with norms that differ between the ranks ({text}), uses"
        raise GradientError(rank_prefix() + early_use(use, names, call))
    first: Tensor = norms[0].to(norm)
    return first


def _is_sparse(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.sparse_coo


def _values(parameter: Tensor) -> Tensor:
    """Return the values of a gradient; a sparse one becomes coalesced."""
    gradient = parameter.grad
    assert gradient is not None  # callers pass such parameters
    if gradient.layout is torch.strided:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad._values()
