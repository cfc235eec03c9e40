"""The backend `gloo`: collectives over torch's ProcessGroupGloo, which connects the ranks by TCP.

Tensors travel as bytes in messages between pairs of ranks. Reductions are combined in rank order
(:mod:`torchmpi.backends.ordered_reduction`); those of gloo would add in an order that depends on the size, and round
16-bit floats at every step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..communicators.group import Group
from ..config import Config
from ..errors import TransportError
from ..shared_memory.memory_layout import ENTERED
from . import network, ordered_reduction
from .base import Operation
from .ordered_reduction import REDUCTIONS, OrderedReduction
from .torch_groups import NO_TIMEOUT, RowMovement, TorchGroup, as_bytes, copy_own

_TAG = 0


def problem() -> str:
    """Return the reason why this torch has no gloo; '' if it has."""
    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return "" if has_gloo else "this torch was built without gloo"


class GlooBackend:
    """Collectives over gloo, on host memory."""

    name = "gloo"
    announces = True
    enqueues = False

    def __init__(self, config: Config, problem: str) -> None:
        self.config, self.problem = config, problem
        self._torch_groups: WeakKeyDictionary[Group, GlooGroup] = WeakKeyDictionary()

    def takes(self, device_type: str, collective: str) -> bool:
        """Accept host memory; CUDA tensors are staged."""
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept every collective."""
        if device_type == "cuda" and not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        return self.problem or None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        return _compared_first(group, self._operation(group, collective, dtype, op))

    def _operation(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        # Atomic: threads that bind at the same time must not create two groups.
        torch_group = self._torch_groups.setdefault(group, GlooGroup(group))
        if collective == "barrier":
            return torch_group.barrier
        if collective in REDUCTIONS:
            assert dtype is not None and op is not None
            reduction = OrderedReduction(group, torch_group, dtype, op, self.config)
            return ordered_reduction.operation(group, reduction, collective)
        operation: Operation = getattr(RowMovement(group, torch_group), collective)
        return operation


def _compared_first(group: Group, operation: Operation) -> Operation:
    """Compare a call between all ranks, by a message, before it begins.

    gloo ends a process that receives more bytes than it expects. So the comparison on the status board, which other
    calls make while they run, comes too late.
    """
    call_log, board = group.call_log, group.log_board
    if board is None:  # compared by a message already, or not at all
        return operation

    def run(source: Any, destination: Any, root: int) -> Any:
        if call_log.entered is not None:
            seq, code, shape = call_log.entered
            board.set(group.rank, ENTERED, seq)  # for stall reports; announced when no rank can leave the comparison
            # Not on group.comm: ranks that chose another backend may make other collective calls of MPI there.
            group.compare_headers(group.side_comm, code, shape)
            call_log.announce()
        return operation(source, destination, root)

    return run


class GlooGroup(TorchGroup):
    """The process group of gloo over the ranks of a group."""

    library = "gloo"
    remedy = f"Choose the network interface with {network.INTERFACE_VARIABLE}, and open the ports between the hosts."

    def open(self, store: Any) -> Any:
        """Connect each rank with every other rank."""
        from torch.distributed import ProcessGroupGloo

        hosts = self.comm.allgather((network.namespace(), network.own_interfaces()))
        names = network.wanted_interfaces()
        address = network.choose(hosts, self.rank)
        options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009, not in the stubs of torch
        options._timeout, options._threads = NO_TIMEOUT, 1
        create = ProcessGroupGloo.create_device
        options._devices = [create(interface=name) for name in names] or [create(hostname=address or "")]
        return ProcessGroupGloo(store, self.rank, self.size, options)

    def barrier(self, source: Any, destination: Any, root: int) -> None:
        """Wait until all ranks have called."""
        if self.size > 1:
            self.wait(self.opened.barrier())

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to each rank of `sends` and receive one from each of `receives`; both may include this rank."""
        works = []
        for shift in range(1, self.size):
            origin = (self.rank - shift) % self.size
            if origin in receives and receives[origin].numel():
                works.append((origin, self._begin("recv", receives[origin], origin)))
        for shift in range(1, self.size):
            target = (self.rank + shift) % self.size
            if target in sends and sends[target].numel():
                works.append((target, self._begin("send", sends[target], target)))
        copy_own(self.rank, sends, receives)
        for peer, work in works:
            self.wait(work, peer)

    def _begin(self, name: str, tensor: torch.Tensor, peer: int) -> Any:
        return self._checked(partial(getattr(self.opened, name), [as_bytes(tensor)], peer, _TAG), peer)

    def wait(self, work: Any, peer: int | None = None) -> None:
        """Wait for a work of gloo; raise TransportError if it fails."""
        self._checked(work.wait, peer)

    def _checked(self, call: Any, peer: int | None) -> Any:
        try:
            return call()
        except RuntimeError as error:
            self.opened.abort()  # the other ranks then do not wait for this rank
            whom = "another rank" if peer is None else f"rank {self.world_ranks[peer]}"
            reason = re.sub(r"^\[\S*\] ", "", str(error)).partition(". ")[0]  # without gloo's file name and advice
            raise TransportError(
                f"gloo lost the connection to {whom} ({reason}). That rank has probably ended: see its output"
            ) from error
