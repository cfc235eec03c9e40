"""Order between the device and this process: nothing on the CPU, events and a copy stream on CUDA.

Collectives that go through the host must read a device tensor after the work queued before the call, and write it
before the work queued after ``wait()``. The worker thread copies on a stream of its own, so that it waits for
neither more nor less than that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def fence(tensor: object) -> torch.cuda.Event | None:
    """A mark behind the work queued so far on the tensor's device; None where there is nothing to wait for.

    >>> fence(torch.ones(2)) is None
    True
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def run_after(mark: torch.cuda.Event | None, device: torch.device | None, task: Callable[[], Any]) -> Any:
    """Run `task` with its device copies ordered after `mark`; return when they have ended.

    >>> run_after(None, None, lambda: 3)
    3
    """
    if mark is None:
        return task()
    assert device is not None
    stream = _copy_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_event(mark)
        result = task()
        stream.synchronize()
    return result


def settle(tensor: torch.Tensor) -> None:
    """Wait until the device has done what was queued: MPI reads device memory without regard to streams.

    >>> settle(torch.ones(2))
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
