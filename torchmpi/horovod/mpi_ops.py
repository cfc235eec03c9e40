"""The asynchronous reductions of Horovod's torch module, and those in place, on the ones of torchmpi."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.handle import Handle, JoinedHandle
from ..config import Operation as OperationName
from ..tensors import sparse
from ..tensors.dtypes import DIVISIBLE_INTEGERS
from . import adasum
from .data_movement import allgather_async
from .exceptions import HorovodInternalError
from .operation_table import NamedOperation, first, synchronize
from .process_sets import ProcessSet, global_process_set, member_of
from .scaling import NAMES, Adasum, Average, Sum, finished, native_op, scale, scaled_copy, values_of


def chosen_op(op: int | None, average: bool | None) -> int:
    """Return the operation that the two parameters name."""
    if average is not None:
        if op is not None:
            raise ValueError("Pass op or average, not both.")
        warnings.warn("average= is deprecated: use op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def _check_op(op: int) -> None:
    if op != Adasum and op not in NAMES:
        raise ValueError(f"op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max and Product.")


class NamedReduction(NamedOperation):
    """A reduction of tensors, to be started or run under a name."""

    def __init__(
        self,
        collective: str,
        tensors: Sequence[Tensor],
        op: int,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *,
        in_place: bool,
    ) -> None:
        _check_op(op)
        comm = member_of(process_set)
        if op == Adasum and process_set is not global_process_set:
            raise NotImplementedError("op=Adasum reduces over all ranks, not over a process set.")
        self._op, self._in_place, self._comm = op, in_place, comm
        self._before, self._after = factors
        super().__init__(collective, process_set, list(tensors))

    def _work(self) -> list[Tensor]:
        if self._in_place:
            values = [values_of(tensor) for tensor in self._tensors]
            return values if self._before == 1 else [scale(tensor, self._before) for tensor in values]
        self._tensors = [scaled_copy(tensor, self._before) for tensor in self._tensors]
        return self._tensors

    def _call(self) -> None:
        work, op, comm = self._work(), self._op, self._comm
        if op == Adasum:
            _start_reduction(work, op, comm).wait()
        elif len(work) == 1:
            collectives.allreduce(work[0], op=native_op(op, work[0]), comm=comm)
        else:
            for each, some in _by_op(work, op).items():
                collectives.allreduce_many(some, op=each, comm=comm)

    def _begin(self) -> Handle[Any]:
        return _start_reduction(self._work(), self._op, self._comm)

    def _results(self, ended: Any) -> list[Tensor]:
        for tensor in self._tensors:
            if self._after != 1 or tensor.dtype in DIVISIBLE_INTEGERS:
                finished(values_of(tensor), self._op, self._comm.size, self._after)
        return self._tensors


def _start_reduction(work: list[Tensor], op: int, comm: Communicator) -> Handle[Any]:
    if op == Adasum:
        return JoinedHandle([adasum.start(tensor, comm) for tensor in work], work, "grouped_allreduce")
    if len(work) == 1:
        return collectives.allreduce_async(work[0], op=native_op(op, work[0]), comm=comm)
    started = [collectives.allreduce_many_async(some, op=each, comm=comm) for each, some in _by_op(work, op).items()]
    return JoinedHandle(started, work, "grouped_allreduce")


def _by_op(work: list[Tensor], op: int) -> dict[OperationName, list[Tensor]]:
    by_op: dict[OperationName, list[Tensor]] = {}
    for tensor in work:
        by_op.setdefault(native_op(op, tensor), []).append(tensor)
    return by_op


@checks_types
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Run :func:`allreduce` in the background, into a new tensor, with the same parameters but `compression`.

    Returns:
        A handle for `synchronize` and `poll`.

    Example:
        handle = hvd.allreduce_async(tensor, op=hvd.Sum)
    """
    factors = (prescale_factor, postscale_factor)
    op = chosen_op(op, average)
    return NamedReduction("allreduce", [tensor], op, factors, process_set, in_place=False).start(name, first)


@checks_types
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Run :func:`allreduce` in the background, in place, with the same parameters but `compression`.

    Returns:
        A handle for `synchronize` and `poll`.

    Example:
        hvd.synchronize(hvd.allreduce_async_(parameter.grad, name="weight"))
    """
    factors = (prescale_factor, postscale_factor)
    op = chosen_op(op, average)
    return NamedReduction("allreduce", [tensor], op, factors, process_set, in_place=True).start(name, first)


@checks_types
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Run :func:`allreduce` in place, with the same parameters but `compression`.

    Returns:
        The tensor.

    Example:
        hvd.allreduce_(parameter.grad)
    """
    op = chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return NamedReduction("allreduce", [tensor], op, factors, process_set, in_place=True).run(name)[0]


@checks_types
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Run :func:`grouped_allreduce` in the background, into new tensors, with the same parameters but `compression`.

    Returns:
        A handle for `poll`, and for `synchronize`, which returns a tuple of the results.

    Example:
        loss, accuracy = hvd.synchronize(hvd.grouped_allreduce_async([loss, accuracy]))
    """
    factors = (prescale_factor, postscale_factor)
    op = chosen_op(op, average)
    return NamedReduction("grouped_allreduce", tensors, op, factors, process_set, in_place=False).start(name, tuple)


@checks_types
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Run :func:`grouped_allreduce` in the background, in place, with the same parameters but `compression`.

    Returns:
        A handle for `poll`, and for `synchronize`, which returns a tuple of the tensors.

    Example:
        handle = hvd.grouped_allreduce_async_(gradients)
    """
    factors = (prescale_factor, postscale_factor)
    op = chosen_op(op, average)
    return NamedReduction("grouped_allreduce", tensors, op, factors, process_set, in_place=True).start(name, tuple)


@checks_types
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Run :func:`grouped_allreduce` in place, with the same parameters but `compression`.

    Returns:
        The tensors.

    Example:
        hvd.grouped_allreduce_([parameter.grad for parameter in model.parameters()])
    """
    op = chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return NamedReduction("grouped_allreduce", tensors, op, factors, process_set, in_place=True).run(name)


@checks_types
def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of sparse tensors; the ranks gather the entries of all ranks.

    Args:
        tensor: A sparse tensor.
        name: Name of the operation.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A function that waits for the result and returns it. It raises HorovodInternalError if the tensors of the ranks
        have different shapes.

    Raises:
        ValueError: The operation is another one.

    Example:
        total = hvd.sparse_allreduce_async(gradient, "embedding", hvd.Sum)()
    """
    if op not in (Average, Sum):
        raise ValueError("Sparse tensors can be added (op=hvd.Sum) and averaged (op=hvd.Average) only.")
    size, shape = member_of(process_set).size, tensor.shape
    names = [None if name is None else f"{name}.{part}" for part in ("indices", "values", "shape")]
    indices, values = sparse.entries(tensor)
    parts = (indices, values, torch.tensor([shape], device="cpu"))
    handles = [allgather_async(part, each, process_set) for part, each in zip(parts, names, strict=True)]

    def wait() -> Tensor:
        *entries, shapes = [synchronize(handle) for handle in handles]
        if any(tuple(other) != shape for other in shapes.tolist()):
            raise HorovodInternalError(f"sparse_allreduce_async(): the tensors have the shapes {shapes.tolist()}.")
        gathered = iter(entries)
        return sparse.total(indices, values, shape, lambda _: next(gathered), divisor=size if op == Average else 1)

    return wait
