"""Calls that a mode of torch watches, such as make_fx, FakeTensorMode and CommDebugMode.

A mode sees the operators of torch's dispatcher, and torch's own backends are called by some: ``torch.ops.c10d``. A
process group in Python is called without one, which costs less, so that the graph of a traced function would lack the
call. While a mode watches, the call is made as such an operator; what the mode runs of it arrives at
:meth:`_Operator.run`, which calls the method of the group.

All names of torch in this file are private, except ``torch.library``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError
from . import torch_names
from .torch_names import ReduceOp

_OPERATORS: dict[str, type[Any] | None] = {
    "allreduce_": torch_names.AllreduceOptions,
    "allreduce_coalesced_": torch_names.AllreduceCoalescedOptions,
    "broadcast_": torch_names.BroadcastOptions,
    "reduce_": torch_names.ReduceOptions,
    "allgather_": torch_names.AllgatherOptions,
    "_allgather_base_": torch_names.AllgatherOptions,
    "allgather_coalesced_": torch_names.AllgatherOptions,
    "allgather_into_tensor_coalesced_": torch_names.AllgatherOptions,
    "gather_": torch_names.GatherOptions,
    "scatter_": torch_names.ScatterOptions,
    "reduce_scatter_": torch_names.ReduceScatterOptions,
    "_reduce_scatter_base_": torch_names.ReduceScatterOptions,
    "reduce_scatter_tensor_coalesced_": torch_names.ReduceScatterOptions,
    "alltoall_": torch_names.AllToAllOptions,
    "alltoall_base_": torch_names.AllToAllOptions,
    "barrier": torch_names.BarrierOptions,
    "send": None,
    "recv_": None,
    "recv_any_source_": None,
}
"""The operators and the types of their options. An operator has the name of its method and an underscore."""
_NAMES = {"recv_any_source_": "recv_anysource"}
"""The others."""
_FIELDS = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp", "asyncOp": "asyncOp"}
"""Attributes of options by the names of arguments, of which older versions of torch have others."""
_POSITIONS = ("output_split_sizes", "input_split_sizes", "dst", "src", "tag")
_ALIASES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Newer names of methods."""


class _Below(threading.local):
    """The call that a mode has left to the group, in this thread."""

    is_running = False
    work: dist.Work | None = None
    reduction: Any = None
    """The operation of the outermost call: an operator does not tell the factor of PREMUL_SUM."""


below = _Below()


def call(name: str, group: dist.ProcessGroup, arguments: Sequence[Any]) -> dist.Work:
    """Call a method of a group as an operator, and return the work of the group, or what a mode has made instead."""
    operator, options = _operators().get(_ALIASES.get(name, name)), arguments[-1] if arguments else None
    before, below.is_running = (below.work, below.reduction), operator is None
    below.work, below.reduction = None, getattr(options, "reduceOp", None)
    try:
        if operator is None:  # torch has none, so that no mode sees the call
            work: dist.Work = getattr(group, name)(*arguments)
            return work
        made = operator.call(group, arguments)
        return dist.Work.unbox(made[1] if isinstance(made, tuple) else made) if below.work is None else below.work
    finally:
        (below.work, below.reduction), below.is_running = before, False


@cache
def _operators() -> dict[str, _Operator]:
    """Let the operators call groups of this backend, and return them by the names of their methods.

    For other groups they remain those of torch. The dispatch key comes behind those of modes, and before those of
    devices.
    """
    known = [_Operator(name) for name in _OPERATORS if hasattr(torch.ops.c10d, name)]
    for each in known:
        _library.impl(each.name, each.run, "BackendSelect", with_keyset=True)
    return {each.method: each for each in known}


_library = torch.library.Library("c10d", "IMPL")


class _Operator:
    """An operator, which makes the calls of groups of this backend."""

    def __init__(self, name: str) -> None:
        self.name, self.method, self._kind = name, _NAMES.get(name, name.removesuffix("_")), _OPERATORS[name]
        self._operator: Any = getattr(torch.ops.c10d, name).default
        schema = self._operator._schema
        self._defaults = {each.name: each.default_value for each in schema.arguments}
        tensors = [each.name for each in schema.arguments if str(each.type).strip("List[]") == "Tensor"]
        self._given = [each for each in tensors if each != _OF_BARRIER]
        self._arguments = [each for each in (*self._given, *_POSITIONS) if each in self._defaults]
        self._returns_tensors = len(schema.returns) > 1

    def call(self, group: dist.ProcessGroup, arguments: Sequence[Any]) -> Any:
        """Call the operator with the arguments of the method."""
        of = self._defaults | dict(zip(self._arguments, arguments, strict=False)) | {"process_group": group.boxed()}
        if _OF_BARRIER in of:
            of[_OF_BARRIER] = torch.empty(1, device="cpu")
        if "device_ids" in of:
            of["device_ids"] = []
        if self._kind is not None:
            options = arguments[-1] if isinstance(arguments[-1], self._kind) else torch_names.new_options(self._kind)
            of |= {name: getattr(options, attribute) for name, attribute in _FIELDS.items() if name in of}
            of |= {"reduce_op": _boxed_reduction(options.reduceOp)} if "reduce_op" in of else {}
            of |= {"timeout": options.timeout // timedelta(milliseconds=1)} if "timeout" in of else {}
        return self._operator(*of.values())

    def run(self, keys: Any, *values: Any, **named: Any) -> Any:
        """Make a call. Tensors without values, of a mode that only looks for their shapes, are left to torch."""
        of = self._defaults | dict(zip(self._defaults, values, strict=False)) | named
        group, tensors = dist.ProcessGroup.unbox(of["process_group"]), [of[each] for each in self._given]
        if not hasattr(group, "communicator") or any(each.is_meta for each in tree_leaves(tensors)):
            behind = keys & torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
            return self._operator.redispatch(behind, *values, **named)
        arguments = [of[each] for each in self._arguments]
        if self._kind is not None:
            arguments.append(self._options(of))
        was_running, below.is_running = below.is_running, True
        try:
            work = below.work = getattr(group, self.method)(*arguments)
        finally:
            below.is_running = was_running
        return (tensors[0], _boxed(work)) if self._returns_tensors else _boxed(work)

    def _options(self, of: dict[str, Any]) -> Any:
        assert self._kind is not None
        options = self._kind()
        for name, attribute in _FIELDS.items():
            if name in of:
                setattr(options, attribute, of[name])
        if of.get("timeout", -1) >= 0:
            options.timeout = timedelta(milliseconds=of["timeout"])
        if "reduce_op" in of:
            options.reduceOp = self._reduction(of["reduce_op"].op())
        return options

    def _reduction(self, number: int) -> Any:
        if number != ReduceOp.PREMUL_SUM.value:
            return ReduceOp(ReduceOp.RedOpType(number))
        if below.reduction is None:
            raise ArgumentError(
                f"{self.method}: a recorded call does not tell the factor of PREMUL_SUM. Multiply the tensor, and use "
                "SUM."
            )
        return below.reduction


_OF_BARRIER = "tensor"
"""The argument of an operator that only tells the device of a barrier."""


class _Keeper(dist.ProcessGroup):
    """Returns a work to C++, which keeps the Python half of what a method in Python returns."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._work = work

    def barrier(self, opts: Any) -> dist.Work:  # type: ignore[override]
        return self._work


def _boxed(work: dist.Work) -> Any:
    """Return a work as operators do."""
    return dist.ProcessGroup.barrier(_Keeper(work), torch_names.BarrierOptions()).boxed()


_NOTHING = torch.empty(0, device="cpu")


class _Seen(Exception):
    """The arguments of an operator."""


class _Showing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _Seen(*args)


def _boxed_reduction(reduction: Any) -> Any:
    """Return an operation as operators take it: torch makes such objects in C++ only, when it calls an operator."""
    options = torch_names.AllreduceOptions()
    options.reduceOp = reduction
    before_modes = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
    try:
        with torch._C._ExcludeDispatchKeyGuard(before_modes), _Showing():  # type: ignore[no-untyped-call]
            dist.ProcessGroup(0, 1).allreduce([_NOTHING], options)  # type: ignore[call-arg]
    except _Seen as seen:
        return seen.args[2]
