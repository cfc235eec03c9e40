"""Names, keywords and operations of other libraries, and what to use here instead; only for error messages.

The tables have the names that programs for torch.distributed, Horovod, mpi4py and Lua TorchMPI use.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from .errors import KeywordError, rank_prefix

_Function = TypeVar("_Function", bound=Callable[..., Any])

NAMES = {
    # torch.distributed
    "init_process_group": "mpi.start(), or torch.distributed.init_process_group('torchmpi')",
    "destroy_process_group": "mpi.stop()",
    "is_initialized": "mpi.is_started()",
    "get_rank": "mpi.rank()",
    "get_world_size": "mpi.size()",
    "world_size": "mpi.size()",
    "wait": "handle.wait()",
    "get_node_local_rank": "mpi.local_rank()",
    "get_backend": "mpi.collective_selector, which chooses the backend of each call",
    "new_group": "mpi.group(ranks)",
    "new_subgroups": "mpi.push_communicator(key)",
    "init_device_mesh": "mpi.push_communicator(key), or torch.distributed.init_process_group('torchmpi')",
    "all_reduce": "mpi.allreduce",
    "all_reduce_coalesced": "mpi.allreduce_many",
    "all_gather": "mpi.allgather, which returns the concatenation",
    "all_gather_into_tensor": "mpi.allgather(tensor, out)",
    "all_gather_object": "mpi.allgather_object, which returns the list",
    "all_to_all": "mpi.alltoall",
    "all_to_all_single": "mpi.alltoall",
    "reduce_scatter_tensor": "mpi.reduce_scatter(tensor, out)",
    "broadcast_object_list": "mpi.broadcast_object",
    "gather_object": "mpi.allgather_object",
    "scatter_object_list": "mpi.broadcast_object",
    "isend": "mpi.send_async",
    "irecv": "mpi.recv_async",
    "batch_isend_irecv": "mpi.send_async and mpi.recv_async",
    "monitored_barrier": "mpi.barrier(), or torchmpi.distributed.monitored_barrier",
    "ReduceOp": "a string: op='sum', 'avg', 'prod', 'min', 'max', ...",
    "DistributedSampler": "torchmpi.nn.DistributedSampler",
    "SyncBatchNorm": "torchmpi.nn.SyncBatchNorm",
    "clip_grad_norm_": "torchmpi.nn.clip_grad_norm_",
    "DistributedDataParallel": "torchmpi.nn.synchronize_parameters and torchmpi.nn.synchronize_gradients",
    # Horovod
    "init": "mpi.start()",
    "shutdown": "mpi.stop()",
    "allreduce_": "mpi.allreduce, which works in place",
    "allreduce_async_": "mpi.allreduce_async, which works in place",
    "broadcast_": "mpi.broadcast, which works in place",
    "broadcast_async_": "mpi.broadcast_async, which works in place",
    "grouped_allreduce": "mpi.allreduce_many",
    "grouped_allreduce_": "mpi.allreduce_many",
    "grouped_allreduce_async": "mpi.allreduce_many_async",
    "reducescatter": "mpi.reduce_scatter",
    "synchronize": "handle.wait()",
    "poll": "handle.done()",
    "broadcast_parameters": "torchmpi.nn.synchronize_parameters",
    "broadcast_optimizer_state": "optimizer.load_state_dict(mpi.broadcast_object(optimizer.state_dict()))",
    "DistributedOptimizer": "torchmpi.nn.DistributedOptimizer",
    "join": "torchmpi.nn.join",
    "cross_rank": "mpi.communicator(1).inter",
    "cross_size": "mpi.num_nodes_in_communicator()",
    "add_process_set": "mpi.group(ranks)",
    "ProcessSet": "mpi.group(ranks)",
    "remove_process_set": "the method free() of a communicator of mpi.group(ranks)",
    "Average": "op='avg'",
    "Sum": "op='sum'",
    "Product": "op='prod'",
    "Min": "op='min'",
    "Max": "op='max'",
    "cuda_built": "mpi.has_cuda()",
    "nccl_built": "mpi.has_nccl()",
    "gloo_built": "mpi.has_gloo()",
    # mpi4py
    "MPI": "mpi.start() and the functions of this module; they take tensors",
    "COMM_WORLD": "the functions of this module: mpi.rank(), mpi.size(), mpi.allreduce(tensor), ...",
    "Get_rank": "mpi.rank()",
    "Get_size": "mpi.size()",
    "Get_processor_name": "mpi.host_name()",
    "Init": "mpi.start()",
    "Init_thread": "mpi.start()",
    "Finalize": "mpi.stop()",
    "finalize": "mpi.stop()",
    "bcast": "mpi.broadcast, or mpi.broadcast_object for a Python object",
    "Bcast": "mpi.broadcast",
    "Ibcast": "mpi.broadcast_async",
    "Iallreduce": "mpi.allreduce_async",
    "Iallgather": "mpi.allgather_async",
    "Reduce_scatter": "mpi.reduce_scatter",
    "Allgatherv": "mpi.allgather: the lengths of dim 0 may differ",
    "Gatherv": "mpi.gather: the lengths of dim 0 may differ",
    "Scatterv": "mpi.scatter: the parts are equal, or the first ranks get one row more",
    "Alltoallv": "mpi.alltoall(tensor, splits=...)",
    "Isend": "mpi.send_async",
    "Irecv": "mpi.recv_async",
    "waitall": "handle.wait() of each handle",
    "Sendrecv": "mpi.sendreceive",
    "Sendrecv_replace": "mpi.sendreceive",
    "sendrecv": "mpi.sendreceive",
    "Split": "mpi.push_communicator(key)",
    "SUM": "op='sum'",
    "PROD": "op='prod'",
    "MIN": "op='min'",
    "MAX": "op='max'",
    "Abort": "an exception: it ends all ranks",
    # Packages
    "synchronize_parameters": "torchmpi.nn.synchronize_parameters",
    "synchronize_gradients": "torchmpi.nn.synchronize_gradients",
    "register_async_backward": "torchmpi.nn.register_async_backward",
    "SGDEngine": "torchmpi.engine.SGDEngine",
    "AllReduceSGDEngine": "torchmpi.engine.AllReduceSGDEngine",
    # Lua TorchMPI; other names are converted by _from_lua
    "hasNCCL": "mpi.has_nccl()",
    "syncHandle": "handle.wait()",
}
"""Attributes of other modules, and the replacement here."""

_ROOT = "root="
_COMM = "comm=, a communicator, one of its groups, or the number of its level"
_ASYNC = "{function}_async, which returns a handle"
_IN_ORDER = "Omit it: calls are matched by their order."
_TIMEOUT = "{function}_async(...).wait(timeout)"
_OPERATION = "op="
KEYWORDS = {
    "average": "op='avg' for the average, op='sum' for the sum",
    "reduce_op": _OPERATION,
    "operation": _OPERATION,
    "group": _COMM,
    "process_group": _COMM,
    "process_set": _COMM,
    "communicator": _COMM,
    "level": _COMM,
    "async_op": _ASYNC,
    "asynchronous": _ASYNC,
    "src": _ROOT,
    "dst": _ROOT,
    "dest": _ROOT,
    "source": _ROOT,
    "root_rank": _ROOT,
    "group_src": _ROOT,
    "group_dst": _ROOT,
    "input": "the first argument, the tensor",
    "sendbuf": "the first argument, the tensor",
    "sendobj": "the first argument",
    "obj": "the first argument",
    "object": "the first argument",
    "buf": "the first argument, the tensor",
    "tensor_list": "the first argument, one tensor: the results are concatenated along dim 0",
    "output": "out=",
    "output_tensor": "out=",
    "recvbuf": "out=",
    "gather_list": "out=, one tensor: the results are concatenated along dim 0",
    "scatter_list": "the first argument, one tensor: it is split along dim 0",
    "name": _IN_ORDER,
    "tag": _IN_ORDER,
    "splits": "Omit it: dim 0 is split evenly.",
    "input_split_sizes": "splits=",
    "scounts": "splits=",
    "prescale_factor": "a multiplication of the tensor before the call",
    "postscale_factor": "a multiplication of the result",
    "compression": "a tensor of a smaller dtype",
    "timeout": _TIMEOUT,
}
"""Keywords of the collectives of other libraries, and the replacement here, or a sentence that begins with "Omit"."""
_KEYWORD_ONLY = ("op", "comm", "backend")
_WITHOUT_HANDLE = ("barrier", "broadcast_object", "allgather_object")


class Missing:
    """The value of a required parameter that a call does not pass."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("there is no object. Pass one")


MISSING = Missing()

OPERATIONS = {
    "mean": "avg",
    "average": "avg",
    "add": "sum",
    "product": "prod",
    "mul": "prod",
    "minimum": "min",
    "maximum": "max",
    "and": "land",
    "or": "lor",
    "xor": "bxor",
}
"""Names of operations elsewhere, and here."""
_OPERATIONS_OF_MPI = ("SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR", "MINLOC", "MAXLOC")


def hint_after(error: BaseException) -> str:
    """Return what to use instead, after an error of torch.distributed in a job that only calls ``mpi.start()``; or ''.

    >>> hint_after(ValueError("Default process group has not been initialized, please make sure ..."))[:20]
    'mpi.start() does not'
    """
    if "Default process group has not been initialized" not in str(error):
        return ""
    return (
        "mpi.start() does not initialize torch.distributed. Call torch.distributed.init_process_group('torchmpi') "
        "too, or use torchmpi's own functions, such as torchmpi.nn.DistributedSampler(dataset)."
    )


def attribute_message(name: str, known: Iterable[str], module: str = "torchmpi") -> str:
    """Return the message of the AttributeError for a name that a module of this package does not have.

    >>> attribute_message("sgd_engine", ["SGDEngine", "fit"], "torchmpi.engine")
    "module 'torchmpi.engine' has no attribute 'sgd_engine'. Use torchmpi.engine.SGDEngine."
    """
    message = f"module {module!r} has no attribute {name!r}"
    replacement = NAMES.get(name)
    spellings = {each.replace("_", "").lower(): each for each in sorted(known)}
    if replacement is None and (similar := _similar(_from_lua(name).replace("_", ""), spellings)):
        replacement = f"{'mpi' if module == 'torchmpi' else module}.{spellings[similar]}"
    return message if replacement is None else f"{message}. Use {replacement}."


def missing_attribute(module: str, known: Iterable[str]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module, which names what to use instead of a name that does not exist."""

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(attribute_message(name, known, module))

    return __getattr__


def _from_lua(name: str) -> str:
    """Return a name in the style of this package.

    >>> _from_lua("allreduceTensor"), _from_lua("pushCommunicator"), _from_lua("Allreduce")
    ('allreduce', 'push_communicator', 'allreduce')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Tensor")).lower()


def _similar(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.7)), None)


def refuses_keywords(function: _Function) -> _Function:
    """Describe a function with a parameter ``**_unknown`` as ``help()`` is to show it.

    The parameter is hidden: the function raises :func:`unknown_keyword` if it is not empty. `op`, `comm` and `backend`
    are keyword-only. A wrapper would cost more time. Required parameters get the value `MISSING`, which the checks of
    arguments refuse: Python's own error about a missing `dst` would come before that about a keyword `dest`.
    """
    signature = inspect.signature(function)
    parameters = [
        each.replace(kind=each.KEYWORD_ONLY) if len(signature.parameters) > 2 and each.name in _KEYWORD_ONLY else each
        for each in signature.parameters.values()
        if each.kind is not each.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    given = function.__defaults__ or ()
    num_required = function.__code__.co_argcount - len(given)
    function.__defaults__ = (*[MISSING] * num_required, *given)
    return function


def unknown_keyword(
    function: Callable[..., Any], unknown: Mapping[str, Any], *, shown: str = "", is_collective: bool = True
) -> KeywordError:
    """Return the error for keywords that a function does not have; `shown`: its name in the message."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    name, keyword = function.__name__, next(iter(unknown))
    replacement = KEYWORDS.get(keyword)
    if not is_collective and not (replacement == _COMM and "comm" in parameters):
        replacement = None
    if replacement == _ROOT and "root" not in parameters:
        replacement = " or ".join(f"{each}=" for each in ("src", "dst") if each in parameters) or None
    elif (replacement in (_OPERATION, KEYWORDS["average"]) and "op" not in parameters) or (
        replacement in (_ASYNC, _TIMEOUT) and name in _WITHOUT_HANDLE
    ):
        replacement = None
    elif replacement == _ASYNC and name.endswith("_async"):
        replacement = "Omit it: {function} returns a handle."
    elif replacement == _TIMEOUT and name.endswith("_async"):
        replacement = "handle.wait(timeout)"
    if replacement is None and (similar := _similar(keyword, parameters)):
        replacement = f"{similar}="
    if replacement is None:
        remedy = f"Its parameters are: {', '.join(parameters)}."
    else:
        remedy = replacement if replacement.startswith("Omit") else f"Use {replacement}."
    shown = shown or f"mpi.{name}"
    return KeywordError(f"{rank_prefix()}{shown}() has no parameter {keyword!r}. {remedy.format(function=shown)}")


def operation(op: Any) -> Any:
    """Return the name of an operation of ``torch.distributed`` or mpi4py; other values unchanged.

    >>> import torch.distributed as dist
    >>> operation(dist.ReduceOp.PRODUCT), operation("sum")
    ('prod', 'sum')
    """
    if op is None or isinstance(op, str):
        return op
    if type(op).__name__ == "RedOpType":
        name = str(op.name)
    elif type(op).__name__ == "Op" and type(op).__module__ == "mpi4py.MPI":
        MPI = sys.modules["mpi4py.MPI"]
        name = next((name for name in _OPERATIONS_OF_MPI if getattr(MPI, name) == op), repr(op))
    else:
        return op if isinstance(op, Hashable) else repr(op)  # plans are found by it
    return OPERATIONS.get(name.lower(), name.lower())


def known_operation(op: Any, known: Iterable[str]) -> str | None:
    """Return the operation that a value means, or None.

    >>> known_operation("mean", ["sum", "avg"]), known_operation("avgs", ["sum", "avg"]), known_operation(1, ["sum"])
    ('avg', 'avg', None)
    """
    op = operation(op)
    if not isinstance(op, str):
        return None
    name = op.lower().removeprefix("mpi_")
    return OPERATIONS.get(name) or _similar(name, known)


def operation_hint(op: Any, known: Iterable[str]) -> str:
    """Return the remedy for an unknown operation.

    >>> operation_hint("mean", ["sum", "avg"])
    "Use op='avg'; the operations are: sum, avg."
    """
    known = list(known)
    found = known_operation(op, known)
    return (
        f"Use one of: {', '.join(known)}."
        if found is None
        else f"Use op={found!r}; the operations are: {', '.join(known)}."
    )
