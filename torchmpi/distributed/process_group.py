"""The process group: every call of torch.distributed as calls of torchmpi."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import dispatch
from ..errors import ArgumentError
from . import torch_names, transfers
from .monitored import meet
from .moving import Moving
from .reducing import Reducing
from .rows import one_of
from .work import PendingMessage


def create(options: Any) -> ProcessGroup:
    """What torch calls to make a group: for its members, collectively."""
    torch_names.warn_if_untested()
    torch_names.keep_works_of_join()
    _refuse_others()
    return ProcessGroup(options)


def _refuse_others() -> None:
    """Torch takes a process group written in Python for all devices, and would drop another backend without a word."""
    config = torch_names.variable_of_caller("_new_process_group_helper", "backend_config")
    names = set() if config is None else set(config.get_device_backend_map().values())
    if len(names) > 1:
        raise ArgumentError(
            f"the backend {str(config)!r} mixes torchmpi with others, which torch cannot do: it would use torchmpi "
            "for all devices. Use 'torchmpi' alone, which takes CPU and CUDA tensors, or the others without it."
        )


class ProcessGroup(Reducing, Moving):
    """A group of ranks, as torch.distributed uses it."""

    _num_monitored = 0

    def barrier(self, opts: Any = torch_names.BARRIER) -> dist.Work:
        """Return when everybody has come."""
        plan = dispatch.plan_for(self._communicator, ("barrier", None, None, "cpu", True, None, False))
        limit = opts.timeout.total_seconds() if opts.timeout.total_seconds() > 0 else self._group.timeout_seconds

        def task() -> None:
            usual, self._group.timeout_seconds = self._group.timeout_seconds, limit
            try:
                self._group.perform(plan, None, None, 0)
            finally:
                if self._group.timeout_seconds == limit:  # otherwise somebody has set another one meanwhile
                    self._group.timeout_seconds = usual

        return self._launch(task, [], opts, "barrier")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that tells which ranks did not come; see :func:`torchmpi.distributed.monitored_barrier`."""
        seconds = self._group.timeout_seconds if timeout is None else timeout.total_seconds()
        self._num_monitored += 1
        meet(self._group, seconds, self._num_monitored, wait_all_ranks=wait_all_ranks)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Send one tensor to one rank."""
        tensor = one_of(tensors)
        transfer = transfers.send(self._group, tensor, dst, tag)
        return PendingMessage(transfer, [tensor], self._group.timeout_seconds)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from one rank."""
        return self._receive(one_of(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive one tensor from whoever sends one."""
        return self._receive(one_of(tensors), None, tag)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> dist.Work:
        transfer = transfers.receive(self._group, tensor, peer, tag)
        return PendingMessage(transfer, [tensor], self._group.timeout_seconds)


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """``torch.distributed.monitored_barrier``, which torch itself allows for gloo only.

    Rank 0 of the group waits for all others and raises an error that names the first rank which does not come in time,
    or all of them with `wait_all_ranks`; ranks that have come raise too.

        from torchmpi.distributed import monitored_barrier
        monitored_barrier(timeout=timedelta(seconds=30))
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return  # as for every collective of torch
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, ProcessGroup):
        raise ArgumentError("monitored_barrier needs a group with the backend 'torchmpi'; torch has one for gloo.")
    chosen.monitored_barrier(timeout, wait_all_ranks)
