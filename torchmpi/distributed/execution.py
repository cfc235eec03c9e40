"""The part of a process group that executes its calls, in the calling thread or in the group's call queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..collective_specs import spec_of
from ..collectives import dispatch
from ..communicators.handle import Handle
from ..communicators.plan import Plan, PlanKey
from ..session import runtime
from ..tensors import buffers, dtypes, writable
from ..timeline import events
from . import membership
from .properties import GroupProperties
from .torch_names import BackendOptions, CallOptions, is_asynchronous
from .work import COMPLETED, PendingWork, awaited_ranks, joined

Tensors = list[torch.Tensor]

_REPORT_SECONDS = 10.0
_NAMES = {
    "all_reduce": "allreduce", "allreduce_coalesced": "allreduce", "all_gather": "allgather",
    "all_gather_into_tensor": "allgather", "all_to_all": "alltoall", "all_to_all_single": "alltoall",
}  # fmt: skip
"""The names that collectives of torch have here."""


class GroupExecution(GroupProperties):
    """Executes the calls of a process group on its communicator."""

    def __init__(self, options: BackendOptions, backend_name: str) -> None:
        super().__init__(options, backend_name)
        self._membership = membership.current(options)
        self._communicator = self._membership.open(options)
        self._group = self._communicator.intra
        self._where = self._group.where
        # A wait inside MPI cannot be ended. Such calls run in the group's thread, and the wait of the caller can end.
        self._by_messages = self._group.size > 1 and self._group.status_board is None
        # A call in shared memory has a timeout too, and raises with a report of the missing ranks, which takes time.
        self._report_seconds = 0.0 if self._by_messages else _REPORT_SECONDS
        self._block: list[dist.Work] | None = None
        """The works of the calls so far in the block of a coalescing manager."""

    def _launch(
        self,
        task: Callable[[], object],
        given: Tensors,
        outputs: Tensors,
        options: CallOptions,
        collective: str,
        op: str = "",
        root: int = -1,
    ) -> dist.Work:
        runtime.current()  # raises in a forked child
        if root < 0 or spec_of(collective).writes(root == self._group.rank):
            for each in outputs:
                seen = writable.known.get(id(each))
                if seen is None or seen() is not each:  # as in is_writable(), without calls for a repeated tensor
                    writable.refuse_read_only(each, self._where, collective)
        tensor = outputs[0] if len(outputs) == 1 else _on_device(outputs)
        limit = options.timeout.total_seconds()
        if limit > 0:
            task = partial(self._run_within, limit, task)
        else:
            limit = self._group.timeout_seconds
        limit = limit and limit + self._report_seconds
        if events.show_call is not None:
            names = _NAMES.get(collective, collective), op, dtypes.short_name(outputs[0].dtype) if outputs else "", root
            task = self._group.shown(task, self._group.described, names, given, outputs)
        if is_asynchronous(options):
            return self._noted(PendingWork(self._submit(task, collective, tensor), outputs, limit))
        if self._by_messages:
            self._submit(task, collective, tensor).wait(limit or None)
        else:
            self._group.call_queue.run(task, subject=tensor)
        return COMPLETED

    def _run_within(self, seconds: float, task: Callable[[], object]) -> object:
        """Run a task with another timeout than that of the group."""
        usual, self._group.timeout_seconds = self._group.timeout_seconds, seconds
        try:
            return task()
        finally:
            if self._group.timeout_seconds == seconds:  # otherwise set_timeout was called meanwhile
                self._group.timeout_seconds = usual

    def _submit(self, task: Callable[[], object], collective: str, tensor: torch.Tensor | None) -> Handle[Any]:
        """Queue a task, ordered after the work on the device of `tensor` so far."""
        # A call in shared memory ends at its timeout itself, so that the thread that waits may run it.
        description, ends_itself = f"{self._where}: {collective}", not self._by_messages
        handle = self._group.call_queue.submit(task, description, tensor, in_any_thread=ends_itself)
        handle.awaited = partial(awaited_ranks, self._group)
        return handle

    def _coalesced(
        self, call: Callable[..., dist.Work], arguments: Iterable[tuple[Any, Any]], outputs: Tensors, opts: CallOptions
    ) -> dist.Work:
        pairs = list(arguments)  # lists of different lengths raise here, before the first call
        works = [call(*pair, opts) for pair in pairs]
        return joined(works, outputs)

    def _noted(self, work: dist.Work) -> dist.Work:
        """Return the work of a call; the block of a coalescing manager waits for it."""
        if self._block is not None:
            self._block.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block; its calls are queued one by one."""
        self._block = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._block = self._block or [], None
        return joined(works, [])

    def _rows_plan(self, collective: str, source: torch.Tensor, op: str | None = None) -> Plan:
        """Return the plan of a call on rows, which are made of `source` when the call runs."""
        return dispatch.plan_for(self._communicator, PlanKey(collective, op, source.dtype, source.device.type))

    def _check(self, collective: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        what = f"{self._where}: {collective}"
        for tensor in inputs:
            buffers.check(tensor, what)
        for tensor in outputs:
            buffers.check(tensor, what, written=True)
            writable.refuse_read_only(tensor, self._where, collective)


def _on_device(tensors: Tensors) -> torch.Tensor | None:
    return next((tensor for tensor in tensors if not tensor.is_cpu), None)
