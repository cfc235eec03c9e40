"""What every process group is: ranks with an order of calls, and answers to what torch asks about them.

A call runs at once if its caller waits for it and nothing is queued on the group, and otherwise in the group's queue;
torch allows the ranks to differ in that, so both take the same transports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import dispatch
from ..collectives.prepared import PreparedPlan
from ..communicators.handle import Handle
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers
from . import membership, torch_names
from .work import ENDED, Pending

_ABORT_NAP_SECONDS = 0.001
Tensors = list[torch.Tensor]
_REPORT_SECONDS = 10.0


class BaseGroup(dist.ProcessGroup):
    """A group without the verbs."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg,arg-type]
        self._store = options.store
        self._membership = membership.current(options)
        self._communicator = self._membership.open(options)
        self._group = self._communicator.intra
        # A wait for messages cannot be ended: it happens in the group's thread, and the caller's wait for that can.
        self._by_messages = self._group.size > 1 and self._group.status_board is None
        self._limit_seconds = 0.0
        self.set_timeout(options.timeout)
        self._known: dict[Any, str] = {}
        """Operations by torch's number of them and the dtype, of synchronous calls that may run at once."""
        self._may_share = True
        """As long as no bucket of DDP was found that could not be moved to shared memory."""
        self._name, self._description = str(options.group_id), "undefined"

    # --- what torch asks of a group -----------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """``torchmpi``."""
        return "torchmpi"

    def getGroupName(self) -> str:
        """The name under which functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Called by torch once the group exists."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """What the user says the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Called by torch once the group exists."""
        self._description = description

    _set_group_desc = setGroupDesc  # type: ignore[assignment]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The same from Python."""
        return self._name

    @property
    def group_desc(self) -> str:  # type: ignore[override]
        """The same from Python."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        with_cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *with_cuda]

    def _get_backend(self, device: torch.device) -> BaseGroup:  # type: ignore[override]
        return self

    def get_group_store(self) -> Any:
        """The store with which the group was made."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call may take before it raises."""
        self._group.timeout_seconds = timeout.total_seconds()
        # In shared memory the call itself ends when its time is over, and says who is missing: that takes a moment.
        self._limit_seconds = timeout.total_seconds() + (0 if self._by_messages else _REPORT_SECONDS)

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._group.call_log.seq

    def _set_sequence_number_for_group(self) -> None:
        """Calls are counted in any case."""

    def shutdown(self) -> None:
        """Finish what is queued and give everything back; called by ``destroy_process_group``."""
        self._membership.close(self._communicator)

    def abort(self) -> None:
        """The same without waiting for calls that wait in shared memory: one after the other ends with an error."""
        group = self._group
        while (
            (group.call_queue.pending or group.call_queue.run_lock.locked())
            and not group.call_queue.closed
            and group.status_board is not None
        ):
            current, shared = group.call_log.current, group.shared
            if current is not None and shared is not None:
                shared.expire(current[0])
            time.sleep(_ABORT_NAP_SECONDS)
        self.shutdown()

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls between this and the end are queued one by one, which costs little here."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        subject = torch.empty(0, device=device) if device.type != "cpu" else None
        return Pending(self._submit(lambda: None, "coalesced calls", subject), [], self._limit_seconds)

    # --- running a call -----------------------------------------------------------------------------------------

    def _plan(
        self, collective: str, tensor: torch.Tensor | None, out: torch.Tensor | None = None, op: str | None = None
    ) -> PreparedPlan:
        return dispatch.plan_of(self._communicator, collective, tensor, out, op=op)

    def _plan_into(
        self, collective: str, source: torch.Tensor, output: torch.Tensor, op: str | None = None
    ) -> PreparedPlan:
        """That of a call which fills rows of `output`, and whose source is put in order when its turn comes."""
        what = f"{self._group.where}: {collective}"
        buffers.check(source, what)
        buffers.check(output, what, written=True)
        return dispatch.plan_for(
            self._communicator, (collective, op, source.dtype, source.device.type, False, None, False)
        )

    def _run(
        self,
        collective: str,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
        options: Any,
        *,
        outputs: Tensors,
        root: int = 0,
        op: str | None = None,
    ) -> dist.Work:
        """One call on one tensor."""
        plan = self._plan(collective, tensor, out, op)
        task = partial(self._group.perform, plan, tensor, out, root)
        return self._launch(task, outputs, options, "all_reduce" if collective == "allreduce" else collective)

    def _launch(self, task: Callable[[], Any], outputs: Tensors, options: Any, collective: str) -> dist.Work:
        """Run a task in its turn: now, or in the background."""
        runtime.current()  # refuses in a forked child, which is no rank
        subject = next((tensor for tensor in outputs if tensor.device.type != "cpu"), None)
        if torch_names.is_asynchronous(options):
            task = torch_names.as_event(f"torchmpi:{collective}", task)
            return Pending(self._submit(task, collective, subject), outputs, self._limit_seconds)
        with torch_names.event(f"torchmpi:{collective}"):
            if self._by_messages:
                self._submit(task, collective, subject).wait(self._limit_seconds or None)
            else:
                self._group.call_queue.run(task, subject=subject)
        return ENDED

    def _submit(self, task: Callable[[], Any], collective: str, subject: torch.Tensor | None) -> Handle:
        """In the background, and in the order of the device that `subject` is on."""
        return self._group.call_queue.submit(task, f"{self._group.where}: {collective}", subject)

    # --- what several verbs share -------------------------------------------------------------------------------

    def _each(
        self, collective: Callable[..., dist.Work], arguments: list[Any], outputs: Tensors, opts: Any
    ) -> dist.Work:
        """The calls one after the other, as one."""
        works = [collective(*pair, opts) for pair in arguments]
        if all(work is ENDED for work in works):
            return ENDED
        subject = next((tensor for tensor in outputs if tensor.device.type != "cpu"), None)
        last = self._submit(lambda: [work.wait() for work in works], "coalesced calls", subject)
        return Pending(last, outputs, self._limit_seconds)

    def _checked_root(self, options: Any, collective: str) -> int:
        """Torch looks at a rank of the world, but not at one given as a rank of the group."""
        return dispatch.check_root(self._group, options.rootRank, collective)

    def _check_sizes(self, collective: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise ArgumentError(
                f"{self._group.where}: {collective}: one tensor is {whole.dtype} {list(whole.shape)}, the other "
                f"{part.dtype} "
                f"{list(part.shape)}: the first must be of the same dtype and {self.size()} times as long, "
                f"{math.prod(part.shape) * self.size()} elements."
            )
