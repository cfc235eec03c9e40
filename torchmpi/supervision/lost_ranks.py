"""The end of all calls after the loss of a rank, if the job continues without it."""

from __future__ import annotations

import threading
from functools import partial

from ..communicators.group import GroupContext, end_calls


class LossWatch:
    """Makes all calls on the groups of a runtime fail when a rank is lost.

    Messages fail by themselves. A call in shared memory cannot see that a rank has ended, and neither can a kernel of
    NCCL, which keeps the program waiting for its device. So a thread ends those that wait, and those that begin later,
    until the runtime is closed.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        context.raises_lost_ranks = True

    def note(self, reason: str) -> None:
        """Begin to end the calls, for this reason."""
        self._context.loss = self._context.loss or reason
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                end = partial(end_calls, self._context.groups, self._closed.is_set)
                self._thread = threading.Thread(target=end, name="torchmpi lost rank", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:  # another thread may be in note()
            self._closed.set()
        if self._thread is not None:
            self._thread.join()
