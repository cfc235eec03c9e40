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
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ..collective_specs import SPECS
from ..tensors import buffers, dlpack, modes
from . import kernels, memory_layout
from .kernels import records

_EXAMPLE = torch.empty(0, device="cpu")
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter")
INTO = "_into"
"""Added to the name of a collective that works in place, for a result in another tensor."""
MADE = "_made"
"""Added to the name of other collectives, for a result in memory that was made for it: another may take its place."""
EXCHANGE = "exchange"
"""The alltoall of parts of any length."""
# After those: an alltoall of parts of any length, and the one of numbers of rows before it; a gather on ranks that only
# send, a scatter where they only receive.
_FAST_PATHS = (
    *COLLECTIVES,
    "allreduce_many",
    *(name + INTO for name in ("allreduce", "broadcast")),
    *(name + MADE for name in ("allgather", "reduce_scatter", "alltoall", "gather")),
    EXCHANGE,
    "alltoall_splits",
    "give",
    "receive",
    "barrier",
    "sendreceive",
    "send",
    "recv",
)
# First dimension that must be equal on all ranks, if not 0.
_FIRST_DIMS = {"allgather": 1, "alltoall": 1, "alltoall_splits": 1, "gather": 1, "give": 1}
_FIRST_DIMS[EXCHANGE] = memory_layout.MAX_LOG_DIMS
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
allreduce_many: _Entry = _not_built
allreduce_into: _Entry = _not_built
reduce: _Entry = _not_built
broadcast: _Entry = _not_built
broadcast_into: _Entry = _not_built
allgather: _Entry = _not_built
reduce_scatter: _Entry = _not_built
alltoall: _Entry = _not_built
exchange: _Entry = _not_built
gather: _Entry = _not_built
give: _Entry = _not_built
scatter: _Entry = _not_built
receive: _Entry = _not_built
barrier: _Entry = _not_built
sendreceive: _Entry = _not_built
send: _Entry = _not_built
recv: _Entry = _not_built
find_receive: _Entry = _not_built
"""With the arguments of `recv`: returns what begins a receive that is awaited later, or None."""

Form = tuple[str, bool, bool]
"""A collective on one rank: its name, whether the rank passes a tensor, whether it receives in another one."""
FORMS: dict[Form, tuple[str, ...]] = {
    **{(name, True, not SPECS[name].in_place): (name,) for name in COLLECTIVES},
    **{(name.removesuffix(INTO), True, True): (name,) for name in _FAST_PATHS if name.endswith(INTO)},
    **{(name.removesuffix(MADE), True, False): (name,) for name in _FAST_PATHS if name.endswith(MADE)},
    ("gather", True, False): ("give", "gather" + MADE),
    ("scatter", False, True): ("receive",),
    ("allreduce_many", True, False): ("allreduce_many",),
}
"""The fast paths of each form; `give` and `receive` are those of the ranks that are not the root."""
finders: dict[Form, list[_Entry]] = {}
"""By form, functions with the arguments of its fast paths, which return what begins an asynchronous call. None: Python
must check the call."""


class Name(NamedTuple):
    """Identity of a call on a fast path."""

    key: Hashable
    """Operation, root, or both."""
    dtype: torch.dtype | None
    """None for a barrier."""
    comm: Any = None
    """None for the default one."""
    backend: str | None = None
    """None for that of the selection table."""


@lru_cache(maxsize=1024, typed=True)
def joint_key(first: str | int, second: int) -> tuple[str | int, int]:
    """Return operation and root, or two ranks, as one object that is the same for equal arguments.

    Fast paths compare addresses.
    """
    return first, second


class _CallLog(Protocol):
    log_fields: Any
    address: int


class _RunLock(Protocol):
    fields: Any
    address: int

    def packed_address(self) -> int: ...


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
    abort: Callable[[Any], None]
    """``abort(source)`` aborts the call on this rank, and publishes that."""
    first_dim: int | None = None
    """The first dimension that is part of the signature, if not that of the fast path."""
    rows: tuple[int, int] = (0, 0)
    """As how many rows the tensors are taken: see `given_rows` in :class:`~.kernels.records.CachedCallRecord`."""
    bound: object = None
    """What begins an asynchronous call like this one; None if none does."""
    only_compares: bool = False
    """Whether the call is only compared, and Python runs it then: `settle` gets the status COMPARED."""


class _FastPath:
    """The record of one fast path, its cached calls, and the Python objects that the machine code uses."""

    def __init__(self, name: str, chosen: Any) -> None:
        self.name, self._code = name, name.removesuffix(MADE)
        self._packs = name in SPECS and SPECS[name].kind == "collective" and SPECS[name].in_place
        """Whether tensors with gaps between their elements are packed."""
        self.cached_calls: dict[Name, tuple[CachedCall, records.CachedCallRecord]] = {}
        self._by_address: dict[int, tuple[CachedCall, records.CachedCallRecord]] = {}
        """The same by the address of the record, and dropped ones that still run."""
        # Machine code uses the addresses of these objects, so they are never freed.
        self._objects = {
            "chosen_comm": chosen,
            "none": None,
            "tensor_type": torch.Tensor,
            "list_type": list,
            "is_neg": torch.Tensor.is_neg,
            "false": False,
            "increment_version": buffers.increment_version,
            "settle": self._settle,
            "touch": buffers.touch_all,
            "abort": self._abort,
        }
        addresses = {name: id(item) for name, item in self._objects.items()}
        self.record = records.FastPath.new().write(
            **addresses,
            describe=dlpack.describer(),
            same_shapes=name.endswith(INTO),
            any_length=name == EXCHANGE,
            is_included=modes.key_teller(),
        )
        for place, key in enumerate(modes.WATCHING_KEYS, records.FastPath.watching_keys):
            self.record.cells[place] = key
        self.function = kernels.fast_path(self._code, int(self.record))
        self.find = kernels.finder(name, int(self.record))

    def invalidate(self) -> None:
        """Drop all cached calls; do not free the records, which another thread may use."""
        self.record.write(first_call=0)
        self._retire(list(self.cached_calls))

    def forget(self, comms: Sequence[object]) -> None:
        """Drop the cached calls with these values of ``comm=``."""
        dropped = [name for name in self.cached_calls if name.comm is not None and name.comm in comms]
        if not dropped:
            return
        # Each of these writes leaves a chain of all calls that are kept, for machine code that looks through it.
        following: int | records.CachedCallRecord = 0
        for name, (_, record) in self.cached_calls.items():  # the last one is the first of the chain
            if name not in dropped:
                record.write(following=following)
                following = record
        self.record.write(first_call=following)
        self._retire(dropped)

    def _retire(self, names: list[Name]) -> None:
        for name in names:
            del self.cached_calls[name]
        kept, entered = {int(record) for _, record in self.cached_calls.values()}, memory_layout.LockFields.entered
        self._by_address = {
            address: item
            for address, item in self._by_address.items()
            if address in kept or item[0].run_lock.fields[entered]
        }

    def add(self, name: Name, cached_call: CachedCall) -> None:
        dtype, backend = name.dtype, None if name.backend is None else sys.intern(str(name.backend))
        record = records.CachedCallRecord.new().write(
            following=self.record.first_call,
            key=id(name.key),
            comm=id(name.comm),
            backend=id(backend),
            dlpack_dtype=0 if dtype is None else dlpack.dtype_number(dtype),
            call=cached_call.record,
            call_log=cached_call.call_log.address,
            run_lock=cached_call.run_lock.address,
            code=cached_call.code,
            signed_code=cached_call.signed_code,
            first_dim=_FIRST_DIMS.get(self._code, 0) if cached_call.first_dim is None else cached_call.first_dim,
            given_rows=cached_call.rows[0],
            received_rows=cached_call.rows[1],
            packed=cached_call.run_lock.packed_address() if self._packs else 0,
            only_compares=cached_call.only_compares,
            bound=0 if cached_call.bound is None else id(cached_call.bound),
        )
        self.cached_calls[name] = self._by_address[int(record)] = cached_call, record
        self.record.first_call = record

    def _settle(self, status: int, tensor: torch.Tensor, out: Any, address: int) -> Any:
        """Continue in Python a call that machine code has entered, and release its run lock."""
        cached_call, _ = self._by_address[address]
        if self.name.endswith(INTO):  # the call works in place on a copy
            tensor, out = out, None
        work = tensor.detach().contiguous() if self._packs else tensor
        try:
            result = cached_call.settle(status, work, out)
        finally:
            cached_call.run_lock.fields[memory_layout.LockFields.entered] = 0
        spec = SPECS.get(self.name)
        if spec is not None and not spec.tensors:
            return False  # None means that Python must run the call
        if spec is not None and spec.kind == "message":
            return result
        if result is None:  # a gather on another rank than the root
            return tensor
        if self.name.endswith(MADE):
            return result
        if out is not None and result is not out:
            buffers.copy_result(result, out, self.name)
        elif self._packs and work.data_ptr() != tensor.data_ptr():
            buffers.overwrite(tensor, work)
        written = tensor if out is None else out
        buffers.touch_all(written if isinstance(written, list) else [written])
        return written

    def _abort(self, address: int, tensor: Any) -> None:
        """Abort a call after a KeyboardInterrupt before the start of :meth:`_settle`."""
        self._by_address[address][0].abort(tensor)


_fast_paths: dict[str, _FastPath] = {}
when_invalidated: list[Callable[[], None]] = []
"""Drop what others repeat in machine code of their own."""
_is_enabled = True
_is_paused = False
_changing = threading.Lock()


def build(chosen: Any, *, enabled: bool = True) -> None:
    """Make the fast paths, once per process, and enable or disable them (setting ``fast_path``).

    Args:
        chosen: Context variable of the communicator that a thread or task has chosen.
        enabled: Whether calls may be cached; without cached calls every fast path returns None.
    """
    global _is_enabled, find_receive
    _is_enabled = enabled
    # Machine code loads the type of an object at its offset in builds of CPython without Py_DEBUG.
    knows_type = ctypes.c_void_p.from_address(id(_EXAMPLE) + 8).value == id(torch.Tensor)
    has_gil = "t" not in sys.abiflags
    knows_torch = dlpack.describer() and modes.key_teller()
    if _fast_paths or not (enabled and knows_torch and knows_type and has_gil and has_known_hashes()):
        return
    for name in _FAST_PATHS:
        _fast_paths[name] = _FastPath(name, chosen)
        if name in globals():
            globals()[name] = _fast_paths[name].function
    find_receive = _fast_paths["recv"].find
    finders.update({form: [_fast_paths[name].find for name in names] for form, names in FORMS.items()})


def entry(which: str) -> _Entry:
    """Return a fast path by name."""
    return _fast_paths[which].function if which in _fast_paths else _not_built


def finder(which: str) -> _Entry:
    """Return the function that finds what begins an asynchronous call like those of a fast path."""
    return _fast_paths[which].find if which in _fast_paths else _not_built


def function_for(which: str, name: Name) -> _Entry | None:
    """Return a fast path that has a cached call of this identity; None if it has none."""
    fast_path = _fast_paths.get(which)
    return fast_path.function if fast_path is not None and name in fast_path.cached_calls else None


def cache_call(which: str, name: Name, find: Callable[[], CachedCall | None]) -> None:
    """Cache a call that is about to be made through Python.

    Args:
        which: Name of the fast path.
        name: Identity of the call.
        find: Returns the cached call, or None if the call cannot be made by a fast path.
    """
    fast_path = _fast_paths.get(which)
    if not _is_enabled or _is_paused or fast_path is None or name in fast_path.cached_calls:
        return
    with _changing:
        # Another thread may have cached the call; machine code uses its address.
        if _is_paused or name in fast_path.cached_calls:
            return
        cached_call = find()
        if cached_call is not None:
            fast_path.add(name, cached_call)


def takes_calls() -> bool:
    """Return whether calls can be cached."""
    return _is_enabled and not _is_paused and bool(_fast_paths)


def objects_for(settle: Callable[..., Any]) -> records.FastPath:
    """Return the Python objects that machine code uses, for some that is not of a collective, with its `settle`.

    Raises:
        StopIteration: There is no fast path.
    """
    known = next(iter(_fast_paths.values())).record
    made = records.FastPath.new()
    made.cells[:] = known.cells
    return made.write(settle=id(settle), first_call=0)


def pause(paused: bool) -> None:
    """Let no call be cached while a reader of calls needs them to pass through Python (docs/design/timeline.md)."""
    global _is_paused
    if _is_paused != paused:
        _is_paused = paused
        invalidate()


def invalidate() -> None:
    """Drop all cached calls, because a value that they depend on has changed."""
    with _changing:
        for fast_path in _fast_paths.values():
            fast_path.invalidate()
    for drop in when_invalidated:
        drop()


def forget(*comms: object) -> None:
    """Drop the cached calls with these values of ``comm=``, which stand for a group that all of its ranks free."""
    with _changing:
        for fast_path in _fast_paths.values():
            fast_path.forget(comms)


def invalidate_in_child() -> None:
    """Drop all cached calls in a forked process; another thread may have held the lock during the fork."""
    global _changing
    _changing = threading.Lock()
    invalidate()
