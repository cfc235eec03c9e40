"""Calls as torch.profiler shows them: their sizes, and tasks of several calls that are one to the program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..collective_specs import spec_of
from ..tensors import partition
from ..tensors.dtypes import short_name
from ..timeline import events
from .call_log import call_names
from .call_queue import CallQueue


def message_sizes(collective: str, rank: int, size: int, given: Any, out: Any) -> tuple[int | None, int | None]:
    """Return the numbers of elements that a rank passes and receives, None where they are not known before the call.

    They are those that torch's own backends record: all ranks of a gather or scatter have those of the root. Where
    ranks may differ in length, they count as if all had the length of this one.

    Args:
        collective: Name of the collective.
        rank: This rank.
        size: The number of ranks.
        given: The tensor or tensors that the rank passes, or None.
        out: Those in which it receives, or None.

    >>> import torch
    >>> message_sizes("allgather", 0, 2, torch.ones(3), None), message_sizes("scatter", 1, 2, None, torch.ones(3))
    ((3, 6), (6, 3))
    >>> message_sizes("reduce_scatter", 1, 2, torch.ones(5, 2), None), message_sizes("barrier", 0, 2, None, None)
    ((10, 4), (0, 0))
    """
    sent, received, spec = _numel(given), _numel(out), spec_of(collective)
    if sent is None and spec.only_root_passes:
        return (None if received is None else received * size), received
    if sent is None:
        return 0, 0
    if spec.grows > 0 and (received is None or spec.is_rooted):
        return sent, sent * size
    if received is None and spec.divides:
        if isinstance(given, Sequence) or not given.dim():  # parts of any length
            return sent, None
        own = partition.part_of(given.shape[0], size, rank)[1] * math.prod(given.shape[1:])
        return sent, own if spec.grows < 0 else own * size
    return sent, sent if received is None else received


def _numel(tensors: Any) -> int | None:
    """Return the number of elements of a tensor, or of several ones."""
    if isinstance(tensors, Sequence):
        return sum(each.numel() for each in tensors if each is not None) if tensors else None
    return None if tensors is None else tensors.numel()


def describe(info: events.GroupInfo, names: events.Names, given: Any = None, out: Any = None) -> events.ShownCall:
    """Return what torch.profiler shows of a call in which this rank passes `given` and receives in `out`."""
    return events.ShownCall(info, names, *message_sizes(names[0], info.rank, len(info.ranks), given, out))


def describe_call(info: events.GroupInfo, code: int, tensor: Any, out: Any) -> events.ShownCall:
    """Return the same of a call with this signature."""
    collective, op, dtype, root = call_names(code)
    given = out if tensor is None else tensor
    if not dtype and given is not None:  # the ranks of a scatter do not compare it
        dtype = short_name(given.dtype)
    return describe(info, (collective, op, dtype, root), tensor, out)


class ShownTask(events.DescribedTask):
    """A task that is one event of torch.profiler, whatever calls it makes."""

    def __init__(self, call_queue: CallQueue, task: Callable[[], Any], call: events.ShownCall) -> None:
        self._call_queue, self._task, self._call = call_queue, task, call

    def described_call(self) -> events.ShownCall:
        """Return what the profiler shows."""
        return self._call

    def __call__(self) -> Any:
        """Run the task, inside the event."""
        event = events.begin_event(self._call, is_task=self._call_queue.origin is not None)
        try:
            return self._task()
        finally:
            events.end_event(event)
