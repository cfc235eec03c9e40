"""Conversion of the arguments of torch.distributed calls: single tensors, options and reduction operations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

import torch

from ..backends import rank_order
from ..config import Operation
from ..errors import ArgumentError
from ..tensors import buffers
from ..tensors.dtypes import DIVISIBLE_INTEGERS
from ..tensors.modes import are_watching
from ..tensors.operation_specs import OPERATIONS
from . import dispatched_calls
from .torch_names import Options, ReduceOp, WithoutFunctionModes, factor_of, has_function_mode, new_options

Entry = TypeVar("Entry")
Method = TypeVar("Method", bound=Callable[..., Any])

_OP_NAMES: dict[Any, Operation] = {
    ReduceOp.SUM: "sum", ReduceOp.AVG: "avg", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
    ReduceOp.BAND: "band", ReduceOp.BOR: "bor", ReduceOp.BXOR: "bxor", ReduceOp.PREMUL_SUM: "sum",
}  # fmt: skip
_BOOL_OP_NAMES: dict[Operation, Operation] = {"sum": "lor", "prod": "land"}


@overload
def single(values: torch.Tensor) -> torch.Tensor: ...
@overload
def single(values: Sequence[Entry]) -> Entry: ...
def single(values: Any) -> Any:
    """Return a tensor, or the only entry of a list that torch passes with one entry per device of the rank.

    >>> single([7]), single(torch.ones(1))
    (7, tensor([1.]))
    """
    if isinstance(values, torch.Tensor):
        return values
    if len(values) != 1:
        raise ArgumentError(f"{len(values)} tensors instead of one: a rank has one device. Pass a list of one tensor.")
    return values[0]


def alike(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor, or those of a list, as a list. Of several, which gloo accepts, all must be alike.

    >>> alike([torch.ones(1), torch.zeros(1)])
    [tensor([1.]), tensor([0.])]
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(listed) == 1:
        return listed
    kinds = [(each.dtype, list(each.shape), each.device, each.layout) for each in listed]
    if not listed or kinds.count(kinds[0]) < len(kinds):
        shown = ", ".join(f"{dtype} {shape}" for dtype, shape, *_ in kinds)
        raise ArgumentError(
            f"{len(listed)} tensors ({shown}): pass one, or several of one dtype, shape, layout and device."
        )
    return listed


def run_on_all(task: Callable[[], object], tensors: Sequence[torch.Tensor], op: str = "") -> None:
    """Combine the tensors of this rank in the first one, given an operation; run `task`; copy the first to the rest."""
    first = tensors[0]
    if op:
        total = torch.empty_like(first, requires_grad=False)
        rank_order.combine([each.detach() for each in tensors], OPERATIONS[op].partial, total)
        buffers.overwrite(first, total)
    task()
    for other in tensors[1:]:
        buffers.overwrite(other, first)


_ATTRIBUTES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def options_of(kind: type[Options], **fields: Any) -> Options:
    """Return options of a call with some fields, which are left out if they are None."""
    options = new_options(kind)
    for name, value in fields.items():
        if value is not None:
            setattr(options, _ATTRIBUTES[name], value)
    return options


def apart_from_modes(method: Method) -> Method:
    """Hide the tensors of a call from a ``TorchFunctionMode`` of the program, as calls of a backend in C++ do.

    Where torch.compile is active, torch 2.14 compiles the mode, and answers with one attribute of a tensor for another.
    Modes that watch operators get the call as one.
    """

    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        if has_function_mode():
            with WithoutFunctionModes():
                return call(group, *arguments, **named)
        if are_watching() and not dispatched_calls.below.is_running:
            return dispatched_calls.call(method.__name__, group, (*arguments, *named.values()))
        return method(group, *arguments, **named)

    return cast(Method, call)


def in_order(method: Callable[..., Any], kind: type[Any], fields: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that returns the arguments of torch's first overload of a method, given those of any.

    The first one, which the method has, takes lists, with one entry per device of the rank, and options. The second one
    takes single tensors in the place of these lists, and `fields` in the place of the options. A method without them
    takes tensors, and options that may be left out.
    """
    signature = inspect.signature(method)
    _, *of_tensors, of_options = signature.parameters

    def bound(group: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        found = signature.bind(group, *arguments, **named)
        found.apply_defaults()
        return found.args[1:]

    def converted(group: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if len(arguments) == len(of_tensors) and type(named.get(of_options)) is kind:
            return *arguments, named[of_options]  # as torch calls barriers
        given = dict(zip((*of_tensors, of_options), arguments, strict=False)) | named
        missing = [name for name in of_tensors if name not in given]
        if missing:
            raise TypeError(f"{method.__name__}() needs {' and '.join(missing)}")
        tensors = [given.pop(name) for name in of_tensors]
        if any([isinstance(each, torch.Tensor) for each in tensors]):
            tensors = [[each] if isinstance(each, torch.Tensor) or each else each for each in tensors]
        options = given.pop(of_options, None)
        if not isinstance(options, kind):
            in_place = dict(zip(fields, (options, *arguments[len(tensors) + 1 :]), strict=False))
            options = options_of(kind, **in_place | given)
        return *tensors, options

    return converted if fields else bound


def op_name(reduction: Any, dtype: torch.dtype) -> Operation:
    """Return torchmpi's name of a torch ReduceOp; on bool, SUM is a logical or, as in torch's addition.

    >>> op_name(ReduceOp(ReduceOp.PRODUCT), torch.float32), op_name(ReduceOp(ReduceOp.SUM), torch.bool)
    ('prod', 'lor')
    """
    try:
        name = _OP_NAMES[reduction.op]
    except KeyError:
        known = ", ".join(map(str, _OP_NAMES))
        raise ArgumentError(f"{reduction.op} is not known. Use one of: {known}.") from None
    if is_scaled(reduction) and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"PREMUL_SUM needs floating point tensors, this one is {dtype}. Use SUM.")
    if _is_average_of_integers(reduction, dtype):
        return "sum"
    return _BOOL_OP_NAMES.get(name, name) if dtype is torch.bool else name


def is_scaled(reduction: Any) -> bool:
    """Return whether the operation is PREMUL_SUM, which carries a factor."""
    return bool(reduction.op == ReduceOp.PREMUL_SUM)


def _is_average_of_integers(reduction: Any, dtype: torch.dtype) -> bool:
    """Return whether the result must be rounded; torchmpi's own collectives reject that."""
    return dtype in DIVISIBLE_INTEGERS and bool(reduction.op == ReduceOp.AVG)


def is_composed(reduction: Any, dtype: torch.dtype) -> bool:
    """Return whether the operation has a step before or after the reduction: :func:`scale` or :func:`divide`."""
    return is_scaled(reduction) or _is_average_of_integers(reduction, dtype)


def scaled(tensor: torch.Tensor, reduction: Any) -> torch.Tensor:
    """Return the tensor times the factor of PREMUL_SUM; for other operations the tensor itself.

    >>> scaled(torch.ones(2), ReduceOp(ReduceOp.SUM))
    tensor([1., 1.])
    """
    return tensor.detach() * factor_of(reduction) if is_scaled(reduction) else tensor


def scale(tensors: Sequence[torch.Tensor], reduction: Any) -> None:
    """Multiply the tensors by the factor of PREMUL_SUM, in place; for other operations do nothing."""
    if is_scaled(reduction):
        for tensor in tensors:
            buffers.overwrite(tensor, scaled(tensor, reduction))


def divide(tensors: Sequence[torch.Tensor], reduction: Any, size: int) -> None:
    """Divide sums of integers by the number of ranks, in place, if the operation is AVG; otherwise do nothing.

    The quotient is rounded towards zero, as by NCCL. Libraries average counts, such as Lightning those of samples.
    """
    for tensor in tensors:
        if _is_average_of_integers(reduction, tensor.dtype):
            buffers.overwrite(tensor, torch.div(tensor.detach(), size, rounding_mode="trunc"))
