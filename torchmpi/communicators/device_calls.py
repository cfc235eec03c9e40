"""A call's turn on a group, for tensors on a device too: there its work follows what the caller's stream has queued.

On the host a call in its turn needs no more than the lane. On a device it matters which stream is current, and that
depends on the thread: a call in the caller's thread takes the caller's stream, one in the lane's worker another stream
that follows it, and whoever waits follows that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..tensors import streams
from .handle import DeviceHandle, Handle

Task = Callable[[], Any]


def queue(group: Any, task: Task, description: str, tensor: object) -> Handle:
    """Run `task` in its turn, in the background; if `tensor` is on a device, its work there comes after the present."""
    mark = streams.fence(tensor)
    if mark is None:
        handle: Handle = group.call_queue.submit(task, description)
        return handle
    queued = group.call_queue.submit(partial(streams.queue, mark, mark.stream.device, task, task), description)
    return DeviceHandle(queued, description)


def take(group: Any, task: Task, description: str, tensor: object) -> Any:
    """Run `task` in its turn, and return its result: in this thread if nothing is queued before it."""
    call_queue = group.call_queue
    if call_queue.pending == 0 and call_queue.run_lock.acquire(False):
        try:
            return task()
        finally:
            call_queue.run_lock.release()
    return queue(group, task, description, tensor).wait()
