"""Copies of objects, parameters and the state of optimizers from one rank to all."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..errors import kind_of
from ..nn.sync import are_on_host
from .data_movement import broadcast_async_, broadcast_into
from .exceptions import internal_errors
from .operation_table import synchronize
from .process_sets import ProcessSet, global_process_set, member_of


def _pickled(value: Any) -> bytes:
    """Return a pickle; by cloudpickle, which takes functions of the main program too, if it is installed."""
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle.dumps(value)
    import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


@checks_types
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copy an object of one rank to all ranks, by pickle.

    Args:
        obj: The object to send; ignored on other ranks than the root.
        root_rank: The rank, among all ranks, whose object is sent.
        name: Not used.
        process_set: The ranks that take part.

    Returns:
        The object of the root.

    Raises:
        ValueError: The root is not in the process set.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    comm, root = member_of(process_set), process_set.position(root_rank, "broadcast_object")
    with internal_errors():
        data = collectives.broadcast_object(_pickled(obj) if comm.rank == root else None, root, comm=comm)
    return obj if comm.rank == root else pickle.loads(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks in rank order, by pickle.

    Args:
        obj: The object of this rank.
        name: Not used.

    Returns:
        The objects.

    Raises:
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        hosts = hvd.allgather_object(socket.gethostname())
    """
    with internal_errors():
        everything = collectives.allgather_object(_pickled(obj), comm=member_of(global_process_set))
    return [pickle.loads(data) for data in everything]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy tensors of one rank to all ranks, in place.

    Args:
        params: ``model.state_dict()``, a list of ``model.named_parameters()``, or a list of tensors.
        root_rank: The rank whose values are copied.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"broadcast_parameters() takes a dict or a list, not {kind_of(params)}.")
    for name, value in named:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"broadcast_parameters(): the entry {name!r} is of type {type(value).__name__}. Pass tensors only; "
                "broadcast_object() copies other values."
            )
    _broadcast_in_place(named, root_rank)


def _broadcast_in_place(named: Sequence[tuple[str | None, Tensor]], root_rank: int) -> None:
    """Copy tensors of one rank to all ranks; those on a GPU at once."""
    if are_on_host([tensor for _, tensor in named]):
        for name, tensor in named:
            broadcast_into(tensor, root_rank, global_process_set).run(name)
        return
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in named]:
        synchronize(handle)


class _TensorForm(NamedTuple):
    """Stands for a tensor in the state of the root's optimizer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool


@checks_types
@torch.no_grad()
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Copy the state and the options of an optimizer of one rank to all ranks.

    An optimizer that has no state gets zeros as gradients, as in Horovod.

    Args:
        optimizer: Any optimizer but LBFGS; of `DistributedOptimizer` or of torch.
        root_rank: The rank whose state is copied.
        model: Not used.

    Raises:
        ValueError: The optimizer is LBFGS.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state() cannot copy the state of LBFGS.")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state:
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    is_root = member_of(global_process_set).rank == root_rank
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state = [dict(optimizer.state[each]) if each in optimizer.state else None for each in parameters]
    tensors: list[Tensor] = []
    described = [options, state] if is_root else None
    described = broadcast_object(_with_forms(described, tensors), root_rank)
    if not is_root:
        options, state = described
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update({name: _with_tensors(value, group["params"][0], tensors) for name, value in values.items()})
        for parameter, entries in zip(parameters, state, strict=True):
            if entries is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = _with_tensors(entries, parameter, tensors)
    _broadcast_in_place([(None, tensor) for tensor in tensors], root_rank)


def _with_forms(value: Any, tensors: list[Tensor]) -> Any:
    """Return a copy with forms in the place of tensors, which are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TensorForm(tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, dict):
        return {key: _with_forms(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_forms(each, tensors) for each in value)
    return value


def _with_tensors(value: Any, parameter: Tensor, tensors: list[Tensor]) -> Any:
    """Return a copy with new tensors in the place of forms, which are appended to a list."""
    if isinstance(value, _TensorForm):
        device = torch.device("cpu") if value.is_on_host else parameter.device
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _with_tensors(each, parameter, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, parameter, tensors) for each in value)
    return value
