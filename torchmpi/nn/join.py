"""Training on uneven data: ranks that have run out follow the others until the last one is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, GradientError
from .channel import resolve
from .hooks import AsyncBackward
from .join_state import JOIN_STATE, JoinRound, JoinState, refuse_inside_join
from .replica import SHARDED, Net, Replica, attach, attached
from .sync import ASYNC_BACKWARD, broadcast_replica, reduce_gradients


@contextmanager
def join(
    net: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    divide_by: str = "active",
    comm: int | Communicator | None = None,
) -> Iterator[None]:
    """Let ranks have different numbers of batches, none included.

    A rank that leaves the loop early takes part, with zeros, in every synchronisation of `net`'s gradients
    that others still call: ``synchronize_gradients``, ``synchronize_gradients_async`` or the step of a
    ``DistributedOptimizer``. Averages are over the ranks still active, or over all with ``divide_by="size"``.
    At the end all ranks get the parameters and buffers of one that worked to the last, and with `optimizer`
    its state too (momentum, Adam's moments), without which the replicas would part again.

    Other collectives inside the block, on the same communicator, would find ranks missing: keep them outside.

        with mpinn.join(model, optimizer=optimizer):
            for x, y in my_data:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                mpinn.synchronize_gradients(model)
                optimizer.step()
    """
    backward: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if backward is not None and comm is not None:
        raise ArgumentError(
            "join(comm=...): the net was registered for asynchronous backward with a communicator already."
        )
    refuse_inside_join(net, "join")
    _refuse_sharded(net)
    join_state = JoinState(resolve(comm) if backward is None else backward.comm, divide_by)
    attach(net, JOIN_STATE, join_state)
    try:
        yield
        if backward is not None and backward.is_under_way:
            raise GradientError("join: the block ended between a backward and its synchronize_gradients_async(net).")
        while (call := join_state.announce_finished()) is not None:
            _shadow(net, call, join_state)
    finally:
        attach(net, JOIN_STATE, None)
    _level(net, optimizer, join_state)


def _refuse_sharded(net: Net) -> None:
    if isinstance(net, nn.Module) and any(getattr(parameter, SHARDED, False) for parameter in net.parameters()):
        raise ArgumentError(
            "join: a net with sharded parameters communicates in its forward, which an idle rank never runs."
        )


def _shadow(net: nn.Module, call: JoinRound, join_state: JoinState) -> None:
    """Take part in one round with nothing to contribute, and nothing to keep."""
    net.zero_grad(set_to_none=True)
    backward: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if backward is not None:
        backward.finish(flush=True, shadowed=call)
    else:
        reduce_gradients(Replica(net), join_state.reduction(call), call.bucket_bytes, join_state.comm)
    net.zero_grad(set_to_none=True)


@torch.no_grad()
def _level(net: nn.Module, optimizer: torch.optim.Optimizer | None, join_state: JoinState) -> None:
    """Give everybody the state of the lowest rank that took part in most rounds, that is, in all."""
    comm = join_state.comm
    rounds = collectives.allgather(torch.tensor([join_state.num_rounds]), comm=comm).tolist()
    if min(rounds) == max(rounds):
        return
    root = rounds.index(max(rounds))
    broadcast_replica(Replica(net), root, comm)
    if optimizer is not None:
        optimizer.load_state_dict(collectives.broadcast_object(optimizer.state_dict(), root, comm=comm))
