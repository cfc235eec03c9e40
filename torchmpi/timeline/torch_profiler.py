"""Events of torch.profiler for the calls of this package.

torch has no callback for the start of a profiler. A query in every call costs 50 ns, and calls on the fast path run no
Python. So this module extends the functions of torch that a profiler calls when it starts and stops, and makes a
running profiler a reader of :mod:`.events`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from ..collective_specs import spec_of
from . import events

_START, _STOP = "_run_on_profiler_start", "_run_on_profiler_stop"
_RecordFunction: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
_TORCH_NAMES = {"float32": "Float", "float64": "Double", "bfloat16": "BFloat16", "float16": "Half", "int64": "Long"}


def watch() -> None:
    """Record the calls of this package whenever a profiler runs, from now on; once per process."""
    if _RecordFunction is None or not (hasattr(profiler, _START) and hasattr(profiler, _STOP)):
        return  # an older or newer torch: the calls through torch.distributed still have their events
    if not hasattr(getattr(profiler, _START), "is_extended"):
        _extend(_START, _begin)
        _extend(_STOP, _end)
        if getattr(profiler, "_is_profiler_enabled", False):
            _begin()


def _extend(name: str, action: Callable[[], None]) -> None:
    original = getattr(profiler, name)

    @functools.wraps(original)
    def extended() -> None:
        original()
        action()

    extended.is_extended = True  # type: ignore[attr-defined]
    setattr(profiler, name, extended)


def _begin() -> None:
    events.show_call, events.show_task = _open_event, _show_queued
    events.add_reader(_ignore)


def _end() -> None:
    events.show_call = events.show_task = None
    events.remove_reader(_ignore)


def _ignore(record: object) -> None:
    """Read no records: the events of torch have been made when the calls ran."""


def _open_event(call: events.ShownCall, kind: str = "") -> Any:
    """Begin an event with the fields that torch's own backends give theirs (with ``record_shapes=True``)."""
    collective, op, dtype, root = call.names
    fields: dict[str, Any] = {
        "Collective name": collective,
        "dtype": _TORCH_NAMES.get(dtype, dtype),
        "Group size": len(call.group.ranks),
        "Process Group Name": call.group.name,
        "Process Group Ranks": str(list(call.group.ranks)),
    }
    if call.sent is not None:
        fields["In msg nelems"] = call.sent
    if call.received is not None:
        fields["Out msg nelems"] = call.received
    if op:
        fields["Reduction"] = op
    if root >= 0:
        fields["Root Rank"] = root
    event = _RecordFunction(_name_of(collective, kind), [], fields)
    event.__enter__()
    return event


def _name_of(collective: str, kind: str = "") -> str:
    """Return the name of an event; readers count those that begin or end with torchmpi:all_reduce as calls."""
    return f"torchmpi{kind and f' {kind}'}:{spec_of(collective).torch_name or collective}"


def _show_queued(description: str, call: events.ShownCall | None, task: Callable[[], Any]) -> Callable[[], Any]:
    """Return a task for the thread of the calls. Its event lasts from now to its end, in the row of this thread.

    Torch ends such an event by a future, and gives it no fields, so an event without a length, ``torchmpi queued:...``,
    has them. The profiler sees the thread of the calls with ``profile_all_threads`` only.
    """
    if call is not None:
        collective = call.names[0]
    elif ": " in description:  # a call of the parameter server
        collective = description.rpartition(": ")[2].split("(")[0]
    else:  # no call of the program
        return task
    ended: torch.futures.Future[None] = torch.futures.Future()
    event = torch.ops.profiler._record_function_enter_new(_name_of(collective), None)
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, ended)
    if call is not None:
        _open_event(call, "queued").__exit__(None, None, None)

    def run() -> Any:
        try:
            return task()
        finally:
            ended.set_result(None)

    return run
