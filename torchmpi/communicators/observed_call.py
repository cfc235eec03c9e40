"""A call while somebody observes calls: the profiler its begin and end, the readers of records its end."""

from __future__ import annotations

from typing import Any

from ..shared_memory.memory_layout import LogFields
from ..timeline import events
from .call_log import CallLog
from .call_queue import CallQueue
from .plan import Plan
from .profiled_calls import describe_call


class ObservedCall:
    """A call that begins now, on a group with this description, log and queue."""

    def __init__(
        self,
        info: events.GroupInfo,
        call_log: CallLog,
        call_queue: CallQueue,
        plan: Plan,
        code: int,
        tensor: Any,
        out: Any,
    ) -> None:
        self._info, self._log, self._queue, self._plan, self._code = info, call_log, call_queue, plan, code
        self._event: Any = None
        call_log.log_fields[LogFields.algorithm] = 0  # a backend writes which one it uses
        if events.show_call is not None:
            call = describe_call(info, code, tensor, out)
            self._event = events.begin_event(call, is_task=call_queue.origin is not None)

    def end(self, num_bytes: int, end: int, error: str = "") -> None:
        """Report the call, which has ended at `end`, in nanoseconds."""
        events.end_event(self._event)
        recorder, log = events.recorder, self._log
        if recorder is not None:
            origin, algorithm = self._queue.origin or recorder.origin(0), log.log_fields[LogFields.algorithm]
            recorder.call(
                self._info, log.seq, self._plan, self._code, num_bytes, algorithm, log.begun, end, origin, error
            )
