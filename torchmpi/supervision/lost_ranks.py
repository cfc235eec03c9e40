"""The end of all calls after the loss of a rank, if the job continues without it."""

from __future__ import annotations

import threading

from ..communicators.group import GroupContext

_PERIOD_SECONDS = 0.02


class LossWatch:
    """Makes all calls on the groups of a runtime fail when a rank is lost.

    Messages fail by themselves. A call in shared memory cannot see that a rank has ended, and neither can a kernel of
    NCCL, which keeps the program waiting for its device. So a thread ends those that wait, and those that begin later,
    until the runtime is closed.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        context.raises_lost_ranks = True

    def note(self, reason: str) -> None:
        """Begin to end the calls, for this reason."""
        self._context.loss = self._context.loss or reason
        if self._thread is None:
            self._thread = threading.Thread(target=self._end_calls, name="torchmpi lost rank", daemon=True)
            self._thread.start()

    def _end_calls(self) -> None:
        while not self._closed.wait(_PERIOD_SECONDS):
            for group in list(self._context.groups):
                group.call_log.is_ended = True
                if (call := group.call_log.current) is not None:
                    group.expire(call[0])
                group.abort_device_work()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
