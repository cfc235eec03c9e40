"""Gates: how a short call gets from a verb into a kernel without Python looking at anything.

A *gate* is a function of machine code for a verb. It is given what the verb was given, and if that is the plain case,
contiguous host tensors on a communicator with an idle lane, it makes the call and returns its result; otherwise it
returns None, and the verb goes on in Python. Behind a gate are *doors*, one for each prepared call that has been made
before. All of them are forgotten when anything changes on which they rely: :func:`shut`.
"""

from __future__ import annotations

import ctypes
import sysconfig
import threading
from array import array
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..tensors import buffers, dlpack
from . import kernels, memory_layout
from .kernels import context

_EXAMPLE = torch.empty(0, device="cpu")
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter")
# Those of a rank that gathers nothing and only gives, and of one that scatters nothing and only receives.
_FAST_PATHS = (*COLLECTIVES, "give", "receive")
# The first dimension that has to be the same on all ranks, if not number 0.
_FIRST_DIMS = {"allgather": 1, "alltoall": 1, "gather": 1, "give": 1}
_FIRST_DIMS |= dict.fromkeys(("scatter", "receive"), memory_layout.MAX_LOG_DIMS)  # only the root knows any


def _not_built(*arguments: object) -> None:
    """What stands for a gate before there is one."""


allreduce: Callable[..., Any] = _not_built
reduce: Callable[..., Any] = _not_built
broadcast: Callable[..., Any] = _not_built
allgather: Callable[..., Any] = _not_built
reduce_scatter: Callable[..., Any] = _not_built
alltoall: Callable[..., Any] = _not_built
gather: Callable[..., Any] = _not_built
give: Callable[..., Any] = _not_built
scatter: Callable[..., Any] = _not_built
receive: Callable[..., Any] = _not_built


Name = tuple[Hashable, torch.dtype, Any]
"""How callers name a call: operation, root, or `both`, dtype, and communicator, None for the default one."""


@lru_cache(maxsize=1024, typed=True)
def joint_key(op: str, root: int) -> tuple[str, int]:
    """Operation and root as one object, always the same one: gates know names by their address."""
    return op, root


class CachedCall(NamedTuple):
    """A prepared call, as its transport describes it."""

    plan: int
    """Address of what the kernel knows of the call."""
    call_log: Any
    run_lock: Any
    code: int
    """What the ledger writes down of it, but for the shape."""
    signed_code: int
    settle: Callable[[int, torch.Tensor, Any], Any]
    """``settle(status, source, destination)`` goes on where the kernel could not finish."""
    abort: Callable[[], None]
    """Ends the call on this rank without a result, and lets the others know."""


class _FastPath:
    """The words of one gate, and what they point at."""

    def __init__(self, name: str, chosen: Any) -> None:
        self.name = name
        self.cached_calls: dict[Name, tuple[CachedCall, array[int]]] = {}
        self._retired: dict[int, tuple[CachedCall, array[int]]] = {}
        self.fields = array("q", bytes(8 * context.FAST_PATH_FIELDS))
        # The gate keeps alive what it calls: all of it lives as long as the process.
        self._objects = {
            context.CHOSEN: chosen,
            context.NONE: None,
            context.TENSOR_TYPE: torch.Tensor,
            context.IS_NEG: torch.Tensor.is_neg,
            context.FALSE: False,
            context.INCREMENT_VERSION: buffers.increment_version,
            context.SETTLE: self._settle,
            context.TOUCH: buffers.touch,
            context.ABORT: self._abort,
        }
        for index, item in self._objects.items():
            self.fields[index] = id(item)
        self.fields[context.EXCHANGE] = dlpack.describer()
        self.function = kernels.fast_path(name, self.fields.buffer_info()[0])

    def invalidate(self) -> None:
        self.fields[context.FIRST] = 0
        known = {
            **self._retired,
            **{fields.buffer_info()[0]: (cached_call, fields) for cached_call, fields in self.cached_calls.values()},
        }
        # Another thread may be in a call that it began before.
        self._retired = {
            at: item for at, item in known.items() if item[0].run_lock.fields[memory_layout.RUN_LOCK_ENTERED]
        }
        self.cached_calls.clear()

    def _cached_call_at(self, address: int) -> CachedCall:
        known = [
            cached_call
            for cached_call, fields in list(self.cached_calls.values())
            if fields.buffer_info()[0] == address
        ]
        return known[0] if known else self._retired[address][0]

    def add(self, name: Name, cached_call: CachedCall) -> None:
        key, dtype, comm = name
        fields = array("q", bytes(8 * context.CACHED_CALL_FIELDS))
        fields[context.NEXT] = self.fields[context.FIRST]
        fields[context.KEY], fields[context.COMM] = id(key), id(comm)
        fields[context.DLPACK_DTYPE], fields[context.PLAN] = dlpack.dtype_number(dtype), cached_call.plan
        fields[context.CALL_LOG] = cached_call.call_log.log_fields.buffer_info()[0]
        fields[context.RUN_LOCK] = cached_call.run_lock.address
        fields[context.CODE], fields[context.SIGNED_CODE] = cached_call.code, cached_call.signed_code
        fields[context.FIRST_DIM] = _FIRST_DIMS.get(self.name, 0)
        self.cached_calls[name] = cached_call, fields
        self.fields[context.FIRST] = fields.buffer_info()[0]

    def _settle(self, status: int, tensor: torch.Tensor, out: Any, address: int) -> Any:
        """Go on in Python with a call that machine code has entered, and leave in its place."""
        cached_call = self._cached_call_at(address)
        try:
            result = cached_call.settle(status, tensor, out)
        finally:
            cached_call.run_lock.fields[memory_layout.RUN_LOCK_ENTERED] = 0
        if result is None:  # it has only given
            return tensor
        if out is not None and result is not out:
            buffers.copy_result(result, out)
        buffers.touch(tensor if out is None else out)
        return tensor if out is None else out

    def _abort(self, address: int) -> None:
        """A KeyboardInterrupt came before :meth:`_settle` had begun."""
        self._cached_call_at(address).abort()


_fast_paths: dict[str, _FastPath] = {}
_changing = threading.Lock()


def build(chosen: Any) -> None:
    """Put up the gates, once per process; `chosen` is the context variable for a communicator chosen by a thread."""
    # Machine code looks for the type of an object where CPython has it, if it is not built for debugging.
    knows_type = ctypes.c_void_p.from_address(id(_EXAMPLE) + 8).value == id(torch.Tensor)
    if _fast_paths or not dlpack.describer() or not knows_type or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return
    for name in _FAST_PATHS:
        _fast_paths[name] = _FastPath(name, chosen)
        globals()[name] = _fast_paths[name].function


def cache_call(which: str, name: Name, find: Callable[[], CachedCall | None]) -> None:
    """Open a gate for calls like one that is about to be made; `find` gives no door if that cannot be."""
    fast_path = _fast_paths.get(which)
    if fast_path is None or name in fast_path.cached_calls:
        return
    with _changing:
        if (
            name in fast_path.cached_calls
        ):  # another thread was here first, and machine code has the address of its door
            return
        cached_call = find()
        if cached_call is not None:
            fast_path.add(name, cached_call)


def invalidate() -> None:
    """Forget all doors: they rely on something that has changed. They open again by themselves."""
    with _changing:
        for fast_path in _fast_paths.values():
            fast_path.invalidate()


def invalidate_in_child() -> None:
    """The same in a process that was forked, perhaps while another thread of its parent was changing something."""
    global _changing
    _changing = threading.Lock()
    invalidate()
