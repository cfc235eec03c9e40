"""The part of a process group that executes its calls, in the calling thread or in the group's call queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..collective_specs import SPECS, spec_of
from ..collectives import dispatch
from ..collectives.exchange import PartsExchange
from ..communicators.communicator import Communicator
from ..communicators.handle import Handle
from ..communicators.plan import PlanKey
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers, dtypes, writable
from ..tensors.modes import get_tracing_state
from ..timeline import events
from . import bucket_memory, membership
from .arguments import divide, is_composed, op_name, scaled
from .properties import GroupProperties
from .repeated_calls import NO_LIMIT
from .rows import deliver, empty_rows, in_memory, packed, result_rows
from .torch_calls import FORMS, TorchCall
from .torch_names import BackendOptions, CallOptions, is_asynchronous
from .work import COMPLETED, GroupWorks, PendingWork, awaited_ranks, joined

Tensors = list[torch.Tensor]

_REPORT_SECONDS = 10.0
_NAMES = {spec.torch_name: spec.name for spec in SPECS.values() if spec.torch_name}
_NAMES |= {"allreduce_coalesced": "allreduce", "all_to_all_single": "alltoall"}
"""The names that collectives of torch have here, if they differ."""


class GroupExecution(GroupProperties):
    """Executes the calls of a process group on its communicator."""

    def __init__(self, options: BackendOptions, backend_name: str) -> None:
        super().__init__(options, backend_name)
        self._membership = membership.current(options)
        self._communicator = self._membership.open(options)
        self._group = self._communicator.intra
        self._where, self._size = self._group.where, self._group.size
        # A wait inside MPI cannot be ended. Such calls run in the group's thread, and the wait of the caller can end;
        # machine code polls for its messages, and can be ended.
        self._by_messages = self._group.size > 1 and self._group.status_board is None
        self._works = GroupWorks(partial(awaited_ranks, self._group))
        self._may_share = True
        """False once a bucket of DDP could not be moved to shared memory."""
        self._shared: set[int] = set()
        """The addresses of those that were."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of the group."""
        return self._communicator

    def may_be_moved(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor would be moved to shared memory if it was a bucket of DDP."""
        if not (self._may_share and tensor.is_cpu and tensor.layout is torch.strided):
            return False
        return tensor.nbytes >= bucket_memory.MIN_BYTES and tensor.data_ptr() not in self._shared

    def _on_plain(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        options: CallOptions,
        reduction: Any = None,
        root: int = 0,
        *,
        is_new: bool = False,
    ) -> dist.Work | None:
        """Make the native call; return None if it is not plain: for its tensors, its operation or a timeout of its own.

        `given` are the tensors that this rank passes, `outputs` those that it receives apart from them. Each of the two
        may be empty, one tensor, or several that are rows. `is_new`: machine code has not seen the call yet, of one
        tensor each.
        """
        dtype = outputs[0].dtype if outputs else given[0].dtype if given else None
        number = None if reduction is None else hash(reduction)
        calls, key = self._group.plans, (name, number, dtype, root)
        call: TorchCall | None = calls.get(key)
        if call is None:
            op = None
            if reduction is not None and dtype is not None:
                if is_composed(reduction, dtype):
                    return None
                op = op_name(reduction, dtype)
            call = calls[key] = TorchCall(self._communicator, name, op, dtype, root)
        if options.timeout > NO_LIMIT:
            return None
        writable.refuse_read_only(self._where, name, *(given if call.changes else outputs))
        if is_new:
            (sent,), (received,) = given, outputs
            if is_asynchronous(options):
                if call.find(sent, received, call, self._group, None) is not None:
                    return PendingWork(call.begin(sent, received), [received], self._works)
            elif call.run_fast(sent, received) is not None:
                return COMPLETED
        self._refuse_tracing(name)
        is_here = not (self._by_messages or is_asynchronous(options))
        source = in_memory(given) if given else None
        target = in_memory(outputs) if outputs else None
        are_rows = (source is not None or not given) and (target is not None or not outputs)
        if source is not None and target is not None:
            are_rows = call.can_use(source, target)
        if not are_rows:
            return None if is_asynchronous(options) else self._on_copies(call, given, outputs)
        if is_here:
            call.run(source, target)
            return COMPLETED
        runtime.current()  # raises in a forked child
        return self._work(call.begin(source, target), list(outputs or given), options)

    def _exchanged(self, given: Tensors, received: Tensors, written: Tensors, options: CallOptions) -> dist.Work | None:
        """Exchange parts by machine code; return None if Python must do it. `written`: what consists of parts."""
        is_left = self._by_messages and is_asynchronous(options)  # the exchange in Python waits inside MPI
        call = PartsExchange.known(self._group, received[0].dtype)
        if call is None or is_left or options.timeout > NO_LIMIT:
            return None
        writable.refuse_read_only(self._where, "all_to_all", *written)
        if is_asynchronous(options):
            if call.find(given, received, call, self._group, None) is None:
                return None
            handle = call.begin(given, received, lambda _: buffers.touch_all(written))
            return PendingWork(handle, written, self._works)
        if call.run_fast(given, received) is None:
            return None
        buffers.touch_all(written)
        return COMPLETED

    def _on_copies(
        self, call: TorchCall, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        """Make a synchronous call on plain tensors that are no rows in their own memory, or share it.

        Over hosts only machine code makes it here: its wait can be ended.
        """
        tensors = *given, *outputs
        if not all(map(buffers.is_plain, tensors)) or len({each.dtype for each in tensors}) > 1:
            return None
        if self._group.call_queue.pending:  # copies are made in the order of the calls
            return None
        source = packed(given, call.num_rows[0]) if given else None
        target = empty_rows(outputs, call.num_rows[1]) if outputs else None
        if self._by_messages:
            if call.run_fast(source, target) is None:
                call.cache()
                return None
        else:
            call.run(source, target)
        if target is not None:
            deliver(target, outputs)
        return COMPLETED

    def _on_rows(
        self,
        name: str,
        given: Tensors,
        outputs: Tensors,
        opts: CallOptions,
        *,
        reduction: Any = None,
        root: int | None = None,
    ) -> dist.Work:
        """Make a call of which a rank passes rows, the elements of `given` in their order, and receives `outputs`.

        Both tables are in the memory of the tensors, if these are plain, and otherwise in copies.
        """
        work = self._on_plain(name, given, outputs, opts, reduction, root or 0)
        if work is not None:
            return work
        first = (outputs or given)[0]
        op = None if reduction is None else op_name(reduction, first.dtype)
        if root is not None:
            root = dispatch.check_root(self._group, root, name)
        self._check(name, given, outputs)
        collective, (num_given, num_received) = FORMS[name].collective, FORMS[name].num_rows(self._size)
        key = PlanKey(collective, op, given[0].dtype if given else None, first.device.type)
        plan = dispatch.plan_for(self._communicator, key)
        if SPECS[collective].only_root_passes:
            plan = plan.announcing(first.dtype, outputs[0].numel())

        def task() -> None:
            source = packed(given, num_given) if given else None
            target = result_rows(outputs, num_received) if outputs else None
            if source is not None and reduction is not None:
                source = scaled(source, reduction)
            self._group.perform(plan, source, target, root or 0)
            if target is not None:
                deliver(target, outputs)
            if reduction is not None:
                divide(outputs, reduction, self._size)

        return self._launch(task, given, outputs or given, opts, name, op or "", -1 if root is None else root)

    def _work(
        self, handle: Handle[Any], outputs: Tensors, options: CallOptions, limit_seconds: float | None = None
    ) -> dist.Work:
        """Return the work of a call that has been queued; wait for a synchronous one, within the group's timeout."""
        if is_asynchronous(options):
            return PendingWork(handle, outputs, self._works, limit_seconds)
        handle.awaited = self._works.awaited
        handle.wait((self._works.limit_seconds if limit_seconds is None else limit_seconds) or None)
        return COMPLETED

    def _limit_of(self, timeout_seconds: float) -> float:
        """Return the longest wait for a call with a timeout; 0 for any time.

        A call in shared memory raises itself at its timeout, with a report of the missing ranks, which takes time.
        """
        return timeout_seconds if self._by_messages else timeout_seconds and timeout_seconds + _REPORT_SECONDS

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
        self._refuse_tracing(collective)
        if root < 0 or spec_of(collective).writes(root == self._group.rank):
            writable.refuse_read_only(self._where, collective, *outputs)
        on_device = next((tensor for tensor in outputs if not tensor.is_cpu), None)
        limit, seconds = None, options.timeout.total_seconds()
        if seconds > 0:
            task, limit = partial(self._run_within, seconds, task), self._limit_of(seconds)
        if events.show_call is not None:
            names = _NAMES.get(collective, collective), op, dtypes.short_name(outputs[0].dtype) if outputs else "", root
            task = self._group.shown(task, self._group.described, names, given, outputs)
        if not (self._by_messages or is_asynchronous(options)):
            self._group.call_queue.run(task, subject=on_device)
            return COMPLETED
        # A call in shared memory ends at its timeout itself, so that the thread that waits may run it.
        description, ends_itself = f"{self._where}: {collective}", not self._by_messages
        handle = self._group.call_queue.submit(task, description, on_device, in_any_thread=ends_itself)
        return self._work(handle, outputs, options, limit)

    def _refuse_tracing(self, collective: str) -> None:
        if get_tracing_state() is not None:  # in which machine code makes no call
            buffers.refuse_tracing(f"{self._where}: {collective}")

    def _run_within(self, seconds: float, task: Callable[[], object]) -> object:
        """Run a task with another timeout than that of the group."""
        usual, self._group.timeout_seconds = self._group.timeout_seconds, seconds
        try:
            return task()
        finally:
            if self._group.timeout_seconds == seconds:  # otherwise set_timeout was called meanwhile
                self._group.timeout_seconds = usual

    def _coalesced(
        self, call: Callable[..., dist.Work], arguments: Iterable[tuple[Any, Any]], outputs: Tensors, opts: CallOptions
    ) -> dist.Work:
        pairs = list(arguments)  # lists of different lengths raise here, before the first call
        works = [call(*pair, opts) for pair in pairs]
        return joined(works, outputs)

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block; its calls are queued one by one."""
        self._works.block = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._works.block = self._works.block or [], None
        return joined(works, [])

    def _check(self, collective: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        what, kinds = f"{self._where}: {collective}", {tensor.dtype for tensor in (*inputs, *outputs)}
        if len(kinds) > 1:
            names = ", ".join(map(str, kinds))
            raise ArgumentError(f"{what}: tensors of different dtypes ({names}). Convert them to one.")
        for tensor in inputs:
            buffers.check(tensor, what)
        for tensor in outputs:
            buffers.check(tensor, what, written=True)
        writable.refuse_read_only(self._where, collective, *outputs)
