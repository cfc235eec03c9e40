"""The fast path: short collectives from the public function into a kernel without Python code in between.

A *fast path* is a function of machine code for one collective. The function gets the arguments of the public
function. For contiguous host tensors, an idle call queue and a call equal to an earlier one, the function runs the call
and returns the result; otherwise the function returns None, and the public function continues in Python.
`kernels/fast_path_code.py` generates the machine code.

The calls that a fast path can run are *cached calls*, each of which refers to a prepared call. All cached calls are
dropped (:func:`invalidate`) when a value changes that they depend on; calls through Python cache them again.

docs/design/fast-path.md has the conditions, the locks, and the steps of a call.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from array import array
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..tensors import buffers, dlpack, tracing
from . import kernels, memory_layout
from .kernels import records

_MOST_TAKEN = 1000
"""The most notes that are read without a pause."""
_EXAMPLE = torch.empty(0, device="cpu")
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter")
# With a result in another tensor, for collectives that work in place.
INTO = ("allreduce_into", "broadcast_into")
# The two before the last are a gather on ranks that only send, and a scatter on ranks that only receive.
_FAST_PATHS = (*COLLECTIVES, *INTO, "give", "receive", "barrier", "sendreceive")
# First dimension that must be equal on all ranks, if not 0.
_FIRST_DIMS = {"allgather": 1, "alltoall": 1, "gather": 1, "give": 1}
_FIRST_DIMS |= dict.fromkeys(("scatter", "receive"), memory_layout.MAX_LOG_DIMS)  # only the root knows the shape


def _not_built(*arguments: object) -> None:
    """Stand in for a fast path that is not available."""


# Machine code computes the hash of a shape (kernels/logged_calls.py), and other ranks compare it with Python's.
_TUPLE_HASHES = {
    (): 5740354900026072187,
    (7,): -6198871656470064846,
    (1, 2, 3): 529344067295497451,
    (0, 4096, 64): 6513260195684314427,
}


def has_known_hashes() -> bool:
    """Return whether this interpreter computes the hash of a tuple as machine code does.

    >>> has_known_hashes()
    True
    """
    return all(hash(shape) == expected for shape, expected in _TUPLE_HASHES.items())


_Entry = Callable[..., Any]
allreduce: _Entry = _not_built
allreduce_into: _Entry = _not_built
reduce: _Entry = _not_built
broadcast: _Entry = _not_built
broadcast_into: _Entry = _not_built
allgather: _Entry = _not_built
reduce_scatter: _Entry = _not_built
alltoall: _Entry = _not_built
gather: _Entry = _not_built
give: _Entry = _not_built
scatter: _Entry = _not_built
receive: _Entry = _not_built
barrier: _Entry = _not_built
sendreceive: _Entry = _not_built


Name = tuple[Hashable, torch.dtype | None, Any]
"""Identity of a call: operation, root, or both; dtype, None for a barrier; communicator, None for the default one."""


@lru_cache(maxsize=1024, typed=True)
def joint_key(first: str | int, second: int) -> tuple[str | int, int]:
    """Return operation and root, or two ranks, as one object that is the same for equal arguments.

    Fast paths compare addresses.
    """
    return first, second


class _CallLog(Protocol):
    log_fields: Any


class _RunLock(Protocol):
    fields: Any
    address: int


class CachedCall(NamedTuple):
    """A call that a fast path can run, as described by the backend."""

    record: int
    """Address of the call record of the kernel."""
    call_log: _CallLog
    run_lock: _RunLock
    code: int
    """Code of the call that the call log stores besides the shape."""
    signed_code: int
    """Code of the call in the signature."""
    settle: Callable[[int, torch.Tensor, Any], Any]
    """``settle(status, source, destination)`` continues after a kernel that returned a status."""
    abort: Callable[[], None]
    """Abort the call on this rank, and publish the abort."""
    description: object
    """The properties of the call for a recorder, besides its numbers."""
    has_steps: bool = False
    """Whether the call consists of calls on other groups, which a recorder gets only from Python."""


class _FastPath:
    """The record of one fast path, its cached calls, and the Python objects that the machine code uses."""

    def __init__(self, name: str, chosen: Any) -> None:
        self.name = name
        self.cached_calls: dict[Name, tuple[CachedCall, array[int]]] = {}
        self._retired: dict[int, tuple[CachedCall, array[int]]] = {}
        self.fields = array("q", bytes(8 * records.FAST_PATH_FIELDS))
        # Machine code uses the addresses of these objects, so they are never freed.
        self._objects = {
            records.CHOSEN_COMM: chosen,
            records.NONE: None,
            records.TENSOR_TYPE: torch.Tensor,
            records.IS_NEG: torch.Tensor.is_neg,
            records.FALSE: False,
            records.INCREMENT_VERSION: buffers.increment_version,
            records.SETTLE: self._settle,
            records.TOUCH: buffers.touch,
            records.ABORT: self._abort,
            records.FRAME_AT: sys._getframe,
            records.ONE: 1,
        }
        for index, item in self._objects.items():
            self.fields[index] = id(item)
        self.fields[records.DESCRIBE], self.fields[records.NOTES] = dlpack.describer(), notes.address
        self.function = kernels.fast_path(name, self.fields.buffer_info()[0])

    def invalidate(self) -> None:
        """Drop all cached calls; do not free the records, which another thread may use."""
        self.fields[records.FIRST_CALL] = 0
        known = dict(self._retired)
        known.update((fields.buffer_info()[0], (call, fields)) for call, fields in self.cached_calls.values())
        entered = memory_layout.RUN_LOCK_ENTERED
        self._retired = {address: item for address, item in known.items() if item[0].run_lock.fields[entered]}
        self.cached_calls.clear()

    def _cached_call_at(self, address: int) -> CachedCall:
        for cached_call, fields in list(self.cached_calls.values()):
            if fields.buffer_info()[0] == address:
                return cached_call
        return self._retired[address][0]

    def add(self, name: Name, cached_call: CachedCall) -> None:
        key, dtype, comm = name
        fields = array("q", bytes(8 * records.CACHED_CALL_FIELDS))
        fields[records.NEXT_CALL] = self.fields[records.FIRST_CALL]
        fields[records.KEY], fields[records.COMM] = id(key), id(comm)
        fields[records.DLPACK_DTYPE] = 0 if dtype is None else dlpack.dtype_number(dtype)
        fields[records.PREPARED_CALL] = cached_call.record
        fields[records.CALL_LOG] = cached_call.call_log.log_fields.buffer_info()[0]
        fields[records.RUN_LOCK] = cached_call.run_lock.address
        fields[records.CODE], fields[records.SIGNED_CODE] = cached_call.code, cached_call.signed_code
        fields[records.DESCRIPTION] = id(cached_call.description)
        fields[records.FIRST_DIM] = _FIRST_DIMS.get(self.name, 0)
        self.cached_calls[name] = cached_call, fields
        self.fields[records.FIRST_CALL] = fields.buffer_info()[0]

    def _settle(self, status: int, tensor: torch.Tensor, out: Any, address: int) -> Any:
        """Continue in Python a call that machine code has entered, and release its run lock."""
        cached_call = self._cached_call_at(address)
        if self.name in INTO:  # the call works in place on a copy
            tensor, out = out, None
        try:
            result = cached_call.settle(status, tensor, out)
        finally:
            cached_call.run_lock.fields[memory_layout.RUN_LOCK_ENTERED] = 0
        if self.name == "barrier":
            return False  # None means that Python must run the call
        if result is None:  # a gather on another rank than the root
            return tensor
        if out is not None and result is not out:
            buffers.copy_result(result, out)
        buffers.touch(tensor if out is None else out)
        return tensor if out is None else out

    def _abort(self, address: int) -> None:
        """Abort a call after a KeyboardInterrupt before the start of :meth:`_settle`."""
        self._cached_call_at(address).abort()


class Notes:
    """The calls of the fast path that have ended while a timeline is recorded, as machine code notes them.

    A note costs the call a tenth of a call of Python. Machine code notes the calls of code that it knows, and passes
    the others to the function of :func:`record_by`.
    """

    def __init__(self) -> None:
        # 5 MB, which the system provides page by page when they are written.
        num_fields = records.FIRST_NOTE + records.NUM_NOTES * records.NOTE_FIELDS
        self._fields = np.zeros(num_fields, np.int64)
        self.address = self._fields.ctypes.data
        self._taking = threading.Lock()
        self._record = array("q", bytes(8 * records.FAST_PATH_FIELDS))
        self.note: Callable[[Any, Any, Any, int, int, int], int] = _noting_nothing
        """Notes a call that Python has run (:class:`.kernels.noting_code.NotingCalls`)."""
        self.note_interval: Callable[[str, str, int], int] = _noting_nothing
        """Notes an interval that ends now: category, text, begin in nanoseconds."""
        self.note_origin: Callable[[int], bytes | None] = _noting_no_origin
        """Returns the origin of a call that is queued now (:class:`.kernels.noting_code.NotingOrigins`)."""
        self.labels: dict[int, str] = {}
        """The labels of the calls that threads make, which are in origins that Python makes."""

    def build(self) -> None:
        """Make the functions of machine code, which has the addresses of these objects."""
        self._objects = {records.NONE: None, records.FRAME_AT: sys._getframe, records.LABELS: self.labels}
        for index, item in self._objects.items():
            self._record[index] = id(item)
        self._record[records.NOTES] = self.address
        self.note, self.note_interval, self.note_origin = (
            kernels.fast_path(name, self._record.buffer_info()[0]) for name in ("note", "note_interval", "note_origin")
        )

    def know(self, code: CodeType, is_own: bool) -> None:
        """Have the further calls of code of the program noted, and the callers of own code, of torchmpi or torch.

        The code must live as long as the process.
        """
        address = id(code)
        position = records.KNOWN_CODES + ((address >> records.CODE_SHIFT) & (records.NUM_CODES - 1))
        self._fields[position] = address + is_own * records.IS_OWN

    def num_waiting(self) -> int:
        """Return the number of notes."""
        return int(self._fields[records.NUM_NOTED] - self._fields[records.NUM_TAKEN])

    def take(self) -> list[tuple[Any, ...]]:
        """Return some of the oldest notes and remove them; none only if there are none.

        Returns:
            Of a call of the fast path: description, number, begin, end, bytes and algorithm, thread, code and offset of
            the line.
            Of another call: group, number, plan, code, bytes, algorithm, begin, end, thread, origin, ''.
            Of an interval: category, text, begin, end, thread.
        """
        with self._taking:
            num_noted, num_taken = self._fields[[records.NUM_NOTED, records.NUM_TAKEN]].tolist()
            position = num_taken % records.NUM_NOTES
            count = min(num_noted - num_taken, records.NUM_NOTES - position, _MOST_TAKEN)
            begin = records.FIRST_NOTE + position * records.NOTE_FIELDS
            block = self._fields[begin : begin + count * records.NOTE_FIELDS].reshape(count, records.NOTE_FIELDS)
            taken: list[tuple[Any, ...]] = []
            notes = block.tolist()
            addresses = block[:, : records.NOTED_OFFSET].ravel()
            addresses = addresses[addresses != 0].tolist()
            objects = {address: ctypes.cast(address, ctypes.py_object).value for address in set(addresses)}
            # All above are copies. First, so that an interrupt in the loop leaves references and takes none twice.
            self._fields[records.NUM_TAKEN] = num_taken + count
            for address in addresses:  # the references of the notes; `objects` has one too
                _decrease_count(address)
            for info, plan, code, offset, thread, seq, begin, end, num_bytes, signature, algorithm in notes:
                if plan == 0:
                    numbers = seq, begin, end, num_bytes, algorithm
                    taken.append((objects[info], *numbers, thread, objects[code], offset))
                    continue
                times = abs(begin), abs(end)  # the flight record has times of Python with a minus
                if seq == 0:
                    taken.append((objects[info], objects[plan], *times, thread))
                    continue
                origin = objects[code] if offset == records.IS_ORIGIN else (0, objects[code], offset, "")
                numbers = signature, num_bytes, algorithm, *times
                taken.append((objects[info], seq, objects[plan], *numbers, thread, origin, ""))
        return taken

    def forget(self) -> None:
        """Remove all notes, in a forked process."""
        self._taking = threading.Lock()
        self._fields[records.NUM_TAKEN] = self._fields[records.NUM_NOTED]


def _noting_nothing(*arguments: object) -> int:
    """Stand in for the function that notes calls."""
    return 0


def _noting_no_origin(depth: int) -> None:
    """Stand in for the function that returns origins."""


_decrease_count = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", ctypes.pythonapi))
notes = Notes()
_fast_paths: dict[str, _FastPath] = {}
_is_enabled = True
_is_paused = False
_num_traces = 0
_changing = threading.Lock()


def build(chosen: Any, *, enabled: bool = True) -> None:
    """Make the fast paths, once per process, and enable or disable them (setting ``fast_path``).

    Args:
        chosen: Context variable of the communicator that a thread or task has chosen.
        enabled: Whether calls may be cached; without cached calls every fast path returns None.
    """
    global _is_enabled
    _is_enabled = enabled
    # Machine code loads the type of an object at its offset in builds of CPython without Py_DEBUG.
    knows_type = ctypes.c_void_p.from_address(id(_EXAMPLE) + 8).value == id(torch.Tensor)
    has_gil = "t" not in sys.abiflags
    if _fast_paths or not (enabled and dlpack.describer() and knows_type and has_gil and has_known_hashes()):
        return
    for name in _FAST_PATHS:
        _fast_paths[name] = _FastPath(name, chosen)
        globals()[name] = _fast_paths[name].function
    notes.build()
    tracing.call_around_traces(_pass_through_python)


def _pass_through_python(is_traced: bool) -> None:
    """Let no call be cached while torch.jit.trace records a function: Python refuses them, machine code would not."""
    global _num_traces
    _num_traces += 1 if is_traced else -1
    invalidate()


def cache_call(which: str, name: Name, find: Callable[[], CachedCall | None]) -> None:
    """Cache a call that is about to be made through Python.

    Args:
        which: Name of the fast path.
        name: Identity of the call.
        find: Returns the cached call, or None if the call cannot be made by a fast path.
    """
    fast_path = _fast_paths.get(which)
    if not _is_enabled or fast_path is None or name in fast_path.cached_calls:
        return
    with _changing:
        if (
            _is_paused or _num_traces or name in fast_path.cached_calls
        ):  # cached by another thread; machine code uses its address
            return
        cached_call = find()
        is_recorded = fast_path.fields[records.NOTE] != 0
        if cached_call is not None and not (cached_call.has_steps and is_recorded):
            fast_path.add(name, cached_call)


def pause(paused: bool) -> None:
    """Let no call be cached while a reader of calls needs them to pass through Python (docs/design/timeline.md)."""
    global _is_paused
    if _is_paused != paused:
        _is_paused = paused
        invalidate()


def record_by(note: Callable[[Any, bytes], None] | None) -> None:
    """Have calls that have ended noted (:data:`notes`), until the function is None.

    A call of code that is not known is passed to the function instead: its description; number, begin, end and bytes,
    packed. The function must live as long as the process. Cached calls with steps are dropped.
    """
    with _changing:
        for fast_path in _fast_paths.values():
            fast_path.fields[records.NOTE] = 0 if note is None else id(note)
            if any(cached_call.has_steps for cached_call, _ in fast_path.cached_calls.values()):
                fast_path.invalidate()


def invalidate() -> None:
    """Drop all cached calls, because a value that they depend on has changed."""
    with _changing:
        for fast_path in _fast_paths.values():
            fast_path.invalidate()


def invalidate_in_child() -> None:
    """Drop all cached calls in a forked process; another thread may have held the lock during the fork."""
    global _changing
    _changing = threading.Lock()
    invalidate()
    notes.forget()
