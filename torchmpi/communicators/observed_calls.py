"""What observers learn of calls: their sizes, what torch.profiler shows, and what the readers of records are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..collective_specs import spec_of
from ..shared_memory.memory_layout import LogFields
from ..tensors import partition
from ..tensors.dtypes import short_name
from ..timeline import events
from .call_codes import call_names
from .call_log import CallLog
from .call_queue import CallQueue
from .plan import Plan


def message_sizes(collective: str, rank: int, size: int, given: Any, out: Any) -> tuple[int | None, int | None]:
    """Return the numbers of elements that a rank passes and receives, None where they are not known before the call.

    They are those that torch's own backends record: all ranks of a gather or scatter have those of the root. Where
    ranks may differ in length, they count as if all had the length of this one.

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
    sizes, (collective, op, dtype, root) = message_sizes(names[0], info.rank, len(info.ranks), given, out), names
    tensor = out if given is None else given
    if not dtype and tensor is not None and not isinstance(tensor, Sequence):  # not compared in a scatter
        dtype = short_name(tensor.dtype)
    return events.ShownCall(info, (collective, op, dtype, root), *sizes)


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
            call = describe(info, call_names(code), tensor, out)
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
