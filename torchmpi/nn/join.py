"""Training on uneven data: ranks without data take part in the synchronizations of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from .. import collectives
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime
from .async_backward import AsyncBackward
from .join_state import JOIN_STATE, JoinRound, JoinState, refuse_inside_join
from .replica import Replica, attach, attached
from .sync import ASYNC_BACKWARD, broadcast_replica, reduce_gradients


@contextmanager
def join(
    net: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    divide_by: Literal["active", "size"] = "active",
    comm: Comm = None,
) -> Iterator[None]:
    """Train with different numbers of batches on the ranks, including none, inside a ``with`` block. Collective.

    A rank that reaches the end of the block takes part, with zeros, in every synchronization of `net`'s gradients by
    the other ranks: ``synchronize_gradients``, ``synchronize_gradients_async`` or the step of a
    ``DistributedOptimizer``. When all ranks have reached the end, all get the parameters and buffers of a rank that
    took part until the last synchronization.

    Other collectives inside the block, on the same communicator, would wait for the ranks without data.

    Args:
        net: Module without sharded parameters.
        optimizer: Optimizer whose state (momentum, moments of Adam) is copied at the end too. Without the copy an
            optimizer with a state would make the replicas differ in the next epoch.
        divide_by: Divisor of averages: ``"active"``, the number of ranks with data, or ``"size"``, that of all ranks.
        comm: Communicator, group or level; default: the current communicator, or that of ``register_async_backward``.

    Returns:
        A context manager.

    Raises:
        ArgumentError: The net is inside ``join`` already or has sharded parameters, `divide_by` is unknown, or `comm`
            is given for a net that is registered for asynchronous backward.
        GradientError: The block ended with gradients that ``synchronize_gradients_async`` has not reduced.
        MismatchError: The ranks synchronize with different functions or options.

    Example:
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
            f"{rank_prefix()}join(comm=...): the net was registered for asynchronous backward with a communicator "
            "already."
        )
    refuse_inside_join(net, "join")
    if Replica(net).shards:
        raise ArgumentError(
            f"{rank_prefix()}join: a net with sharded parameters communicates in its forward pass, which ranks "
            "without data do not run."
        )
    state = JoinState(runtime.communicator(comm) if backward is None else backward.comm, divide_by)
    attach(net, JOIN_STATE, state)
    try:
        yield
        if backward is not None:
            also = " After fewer passes than sync_gradient_frequency, pass flush=True."
            backward.guard.refuse("the end of the join block drops", also=also)
        while (joint := state.announce_finished()) is not None:
            _contribute_zeros(net, joint, state)
    finally:
        attach(net, JOIN_STATE, None)
    _copy_final_state(net, optimizer, state)


def _contribute_zeros(net: nn.Module, joint: JoinRound, state: JoinState) -> None:
    net.zero_grad(set_to_none=True)
    backward: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if backward is not None:
        backward.finish(flush=True, shadowed=joint)
    else:
        with torch.no_grad():
            reduce_gradients(Replica(net), state.reduction(joint), joint.bucket_bytes, state.comm)
    net.zero_grad(set_to_none=True)


@torch.no_grad()
def _copy_final_state(net: nn.Module, optimizer: torch.optim.Optimizer | None, state: JoinState) -> None:
    """Broadcast from the lowest of the ranks that had data in the most rounds."""
    rounds = collectives.allgather(torch.tensor([state.num_rounds]), comm=state.comm).tolist()
    if min(rounds) == max(rounds):
        return
    root = rounds.index(max(rounds))
    broadcast_replica(Replica(net), root, state.comm)
    if optimizer is not None:
        optimizer.load_state_dict(collectives.broadcast_object(optimizer.state_dict(), root, comm=state.comm))
