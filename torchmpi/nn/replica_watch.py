"""Comparison of the replicas of all ranks every some steps of an optimizer, while a program trains."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..config import ReplicaCheck
from ..errors import ArgumentError, ReplicaError, rank_prefix
from ..log import logger
from ..session import runtime
from .agreement import check_same_layout
from .join_state import refuse_inside_join
from .replica import Net, Replica
from .replica_check import Difference, compare, compared_tensors, in_words, listed


class ReplicaWatch:
    """The result of :func:`watch_replicas`.

    Attributes:
        num_steps: The steps of the optimizer since the watch has begun.
        different: What the last comparison has found: which ranks agree, by the name of the tensor, on all ranks.
    """

    def __init__(
        self,
        net: Net,
        optimizer: torch.optim.Optimizer,
        every: int,
        check: ReplicaCheck,
        comm: Communicator,
        *,
        buffers: bool,
        state: bool,
    ) -> None:
        self.num_steps = 0
        self.different: dict[str, str] = {}
        self._net, self._optimizer = net, weakref.ref(optimizer)
        self._every, self._check, self._comm, self._buffers, self._state = every, check, comm, buffers, state
        self._equal_after = 0
        self.hook: RemovableHandle | None = None
        """The hook of the optimizer, if that calls `after_step`."""

    def remove(self) -> None:
        """End the watch. Call it on all ranks after the same step; a second call has no effect.

        Example:
            watch.remove()
        """
        if self.hook is not None:
            self.hook.remove()

    def after_step(self, *_: object) -> None:
        """Count a step of the optimizer, and compare the replicas after every so many. Collective."""
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._compare()

    def _compare(self) -> None:
        refuse_inside_join(self._net, "watch_replicas")
        tensors = self._tensors()
        found = compare(tensors, self._comm)
        before, self.different = self.different, {name: each.text for name, each in found.items()}
        if not found:
            self._equal_after = self.num_steps
            return
        text = self._in_words(found, len(tensors))
        if self._check == "raise" or (self._check == "mend" and any(each.is_missing for each in found.values())):
            raise ReplicaError(f"rank {self._comm.rank}: {text}")
        if self._check == "mend":
            self._mend(tensors, found)
            text += "\nThe ranks that differ have got the tensors of the others."
        if self._comm.rank == 0 and self.different.keys() != before.keys():
            logger.warning(text)
        if self._check == "mend":
            self.different, self._equal_after = {}, self.num_steps

    def _in_words(self, found: Mapping[str, Difference], num_tensors: int) -> str:
        before = f"equal after step {self._equal_after}" if self._equal_after else "not compared before"
        return f"{in_words(found, num_tensors)} after step {self.num_steps} ({before}):\n{listed(found)}"

    def _tensors(self) -> dict[str, tuple[Tensor, Communicator]]:
        tensors = compared_tensors(Replica(self._net), self._comm, buffers=self._buffers)
        optimizer = self._optimizer()
        if self._state and optimizer is not None:
            for name, (parameter, comm) in list(tensors.items()):
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        tensors[f"{name}: {key}"] = value, comm
        return tensors

    @torch.no_grad()
    def _mend(self, tensors: Mapping[str, tuple[Tensor, Communicator]], found: Mapping[str, Difference]) -> None:
        """Copy the tensors of the ranks that agree to those that differ. Collective."""
        for name, difference in found.items():
            tensor, comm = tensors[name]
            if difference.model is not None:
                root = comm.intra.world_ranks.index(self._comm.intra.world_ranks[difference.model])
                whole = tensor if tensor.is_contiguous() else tensor.contiguous()
                collectives.broadcast(whole, root, comm=comm)
                if whole is not tensor:
                    tensor.copy_(whole)


@checks_types
def watch_replicas(
    net: Net,
    optimizer: torch.optim.Optimizer,
    *,
    every: int = 100,
    check: ReplicaCheck = "raise",
    buffers: bool = False,
    state: bool = False,
    comm: Comm = None,
) -> ReplicaWatch:
    """Compare the parameters of all ranks after every so many steps of an optimizer. Collective, as the steps are.

    A comparison is a checksum of all bits and one number that the ranks exchange, without a message within a host. Only
    if it differs, they exchange the checksum of each tensor, and all ranks learn which tensors differ on which ranks.

    Args:
        net: Module, or iterable of tensors, as for ``check_with_allreduce``; also a DistributedDataParallel.
        optimizer: The optimizer whose steps are counted: one of torch, or a ``DistributedOptimizer``.
        every: The number of steps between two comparisons.
        check: What follows from a difference: ``raise`` an error on all ranks; ``warn`` in the log of the first rank,
            and go on; ``mend``: warn, and copy the tensors of most ranks (of the lowest ones, if there are as many) to
            the others.
        buffers: Also compare buffers, as the running statistics of batch norm, which usually differ.
        state: Also compare the state of the optimizer.
        comm: Communicator, group or level; default: the current communicator.

    Returns:
        The watch, with the attributes `num_steps` and `different`, and the method `remove()`.

    Raises:
        ReplicaError: On all ranks: the nets differ in names, shapes or dtypes. In a step: tensors differ, with
            ``raise``; or a rank has no such tensor, with ``mend`` too.
        ArgumentError: `every` is less than 1; in a step: it is inside ``join``.

    Example:
        watch = mpinn.watch_replicas(model, optimizer, every=100, check="raise")
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            mpinn.synchronize_gradients(model)
            optimizer.step()
        watch.remove()
    """
    if every < 1:
        raise ArgumentError(f"{rank_prefix()}watch_replicas: every={every} must be at least 1.")
    if check not in get_args(ReplicaCheck):
        raise ArgumentError(
            f"{rank_prefix()}watch_replicas: check={check!r} is not one of {', '.join(get_args(ReplicaCheck))}."
        )
    communicator, replica = runtime.communicator(comm), Replica(net)
    check_same_layout(replica, replica.parameters + (replica.buffers if buffers else []), communicator)
    kept: Any = net if isinstance(net, nn.Module) else list(net)
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # of a DistributedOptimizer
    watch = ReplicaWatch(kept, inner, every, check, communicator, buffers=buffers, state=state)
    watch.hook = inner.register_step_post_hook(watch.after_step)
    return watch
