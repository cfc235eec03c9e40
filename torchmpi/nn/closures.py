"""Comparison of the ranks after steps with a closure: an optimizer that calls it several times decides by the loss."""

from __future__ import annotations

from torch import Tensor, float64, int64, tensor
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import GradientError, MismatchError

REMEDY = (
    "An optimizer such as LBFGS decides by the loss how often it calls its closure, which must return the loss "
    'averaged over the ranks: mpi.allreduce(loss.detach().clone(), op="avg"). A DistributedOptimizer '
    "averages it in step()."
)


class Synchronizations:
    """The synchronizations of gradients since the last step of any optimizer began or ended, possibly in a closure.

    Attributes:
        comm: The communicator of the last one.
        count: Their number.
    """

    def __init__(self) -> None:
        self.comm: Communicator | None = None
        self.count = 0


synchronizations = Synchronizations()


def _forget(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    synchronizations.comm, synchronizations.count = None, 0


def _compare(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raise on all ranks unless they have called the closure equally often, and LBFGS has found the same loss."""
    comm, count = synchronizations.comm, synchronizations.count
    synchronizations.comm, synchronizations.count = None, 0
    if comm is None or not count or (args[1] if len(args) > 1 else kwargs.get("closure")) is None:
        return
    loss = 0.0
    if isinstance(optimizer, LBFGS):
        loss = optimizer.state[optimizer.param_groups[0]["params"][0]].get("prev_loss", 0.0)
    mine = tensor([[count, loss]], dtype=float64)
    name = type(optimizer).__name__
    try:
        every: Tensor = collectives.allgather(mine, comm=comm)
    except MismatchError as error:
        raise MismatchError(f"{error} This rank has just finished a step of {name} with a closure. {REMEDY}") from error
    bits = every.view(int64)  # a NaN equals itself
    if bool((bits != bits[0]).any()):
        calls = ", ".join(f"{calls:.0f} calls and loss {loss:.6g}" for calls, loss in every.tolist())
        raise GradientError(
            f"rank {comm.rank}: the closure of {name}.step() did not give the same on all ranks: {calls}. {REMEDY}"
        )


register_optimizer_step_pre_hook(_forget)
register_optimizer_step_post_hook(_compare)
