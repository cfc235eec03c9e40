"""A stand-in for a GPU: memory of the host that processes share, a stream that runs late, events like the driver's.

A stream is a thread that does what was enqueued, in order, after pauses of random length. An event is two numbers in
shared memory: how often its owner's host has recorded it, and how many of these records its stream has executed. A wait
is for the records that existed when the wait was enqueued; without a record it has no effect.
"""

from __future__ import annotations

import ctypes
import pickle
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torchmpi.shared_memory.kernels import reduction
from torchmpi.shared_memory.segments import Segment, Ticket

_RECORDED, _DONE = 0, 8


class HostDevice:
    """The device that the backend ipc uses, with memory of the host."""

    index = None

    def __init__(self, _: object = None, *, seed: int = 0, pause_seconds: float = 0.0005) -> None:
        self.segments: dict[int, Segment] = {}
        self.entered = 0
        self._random, self._pause_seconds = random.Random(seed), pause_seconds
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._random.random() < 0.2:
                time.sleep(self._random.random() * self._pause_seconds)
            task()

    def _enqueue(self, task: Callable[[], object]) -> None:
        assert self.entered > 0, "the device's context is not current"
        self._tasks.put(task)

    def enter(self) -> None:
        self.entered += 1

    def leave(self) -> None:
        self.entered -= 1

    def stream(self) -> int:
        return 0

    def finish(self) -> None:
        done = threading.Event()
        self._tasks.put(done.set)
        assert done.wait(30), "the stream waits forever"

    def release(self) -> None:
        self._tasks.put(None)
        self._thread.join()
        assert not self.segments and not self.entered

    # --- memory

    def allocate(self, num_bytes: int) -> int:
        return self._keep(Segment.create("ipc", num_bytes))

    def _keep(self, segment: Segment) -> int:
        self.segments[segment.address] = segment
        return segment.address

    def free(self, address: int) -> None:
        segment = self.segments.pop(address)
        segment.withdraw()
        segment.close()

    def share(self, address: int) -> bytes:
        return pickle.dumps(tuple(self.segments[address].ticket))

    def open(self, handle: bytes) -> int:
        return self._keep(Segment.open(Ticket(*pickle.loads(handle))))

    close = free

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._enqueue(lambda: ctypes.memmove(target, source, num_bytes))

    # --- events

    def make_event(self) -> int:
        return self.allocate(4096)

    share_event, open_event, destroy_event = share, open, free

    def record(self, event: int, stream: int) -> None:
        _number(event + _RECORDED).value += 1

        def done() -> None:
            _number(event + _DONE).value += 1

        self._enqueue(done)

    def wait(self, event: int, stream: int) -> None:
        wanted = _number(event + _RECORDED).value

        def wait() -> None:
            while _number(event + _DONE).value < wanted:
                time.sleep(0.00002)

        self._enqueue(wait)

    # --- kernels

    def reducer(self, dtype: torch.dtype, op: str, num_sources: int) -> Any:
        function = reduction.called(reduction.address(dtype, op))

        def reduce(sources: list[int], out: int, num_bytes: int, stream: int) -> None:
            self._enqueue(lambda: function([out], sources, num_bytes // dtype.itemsize))

        return reduce


def _number(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)
