"""The checks of what a program passes to a collective: all of them are here, and a call makes each of them once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import other_names
from ..collective_specs import SPECS, CollectiveSpec, spec_of
from ..communicators.group import Group
from ..communicators.plan import PLAIN, PLAIN_ON, Place
from ..errors import ArgumentError, DtypeError
from ..tensors import buffers, numbers, reused_memory, writable
from ..tensors.dtypes import OPS
from ..tensors.modes import are_watching, get_tracing_state

_Tensor = torch.Tensor


def check(group: Group, spec: CollectiveSpec, tensor: Any, out: Any, root: Any) -> tuple[int, str]:
    """Check what this rank passes to a collective, and raise if it cannot be used.

    Returns:
        The root, and the place of the tensors: a Place, or the type of a device without backends.
    """
    if out is not None and not isinstance(out, _Tensor):
        raise _not_a_result(group, spec, out)
    if type(root) is not int or not 0 <= root < group.size:
        root = check_root(group, root, spec.name)
    is_root = root == group.rank
    place = place_of(group, spec, tensor, out, is_root=is_root)
    written = tensor if out is None and spec.changed_by[is_root] else out if spec.receives(is_root) else None
    if written is not None and not writable.is_writable(written):  # else no name of the rank is needed
        writable.refuse_read_only(group.where, spec.name if out is None else f"{spec.name}: out", written)
    return root, place


def from_number(
    group: Group, spec: CollectiveSpec, value: Any, out: _Tensor | None, op: str | None
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return a number as a tensor, and what converts the result, once; other values as they are."""
    if not numbers.is_number(value):
        return value, None
    if out is not None and not isinstance(out, _Tensor):
        raise _not_a_result(group, spec, out)
    try:
        if spec.divides:
            raise DtypeError("a number cannot be split over ranks. Pass a tensor with one row per rank.")
        if out is not None:
            raise ArgumentError("a number has no out=. Use the returned value, or pass a tensor.")
        dtype, number = numbers.exact(value, op, group.size)
    except ArgumentError as error:  # also a DtypeError
        raise type(error)(f"{group.where}: {spec.name}: {error}") from None
    memory = reused_memory.take(dtype)
    memory.array[()] = number

    def finish(result: Any) -> Any:
        restored = numbers.restore(result) if isinstance(result, _Tensor) else result
        memory.give_back()
        return restored

    return memory.tensor, finish


def place_of(group: Group, spec: CollectiveSpec, tensor: Any, out: _Tensor | None = None, *, is_root: bool) -> str:
    """Return where the tensors of a call are; raise if they cannot be sent, or received into.

    `tensor` is None where a rank passes none. `out` is not used on a rank that does not receive.
    """
    is_usual = get_tracing_state() is None and not are_watching()
    place = _plain_place(spec, tensor, out) if is_usual else None
    is_missing = tensor is None and spec.passes(is_root)
    if place is not None and not is_missing:
        return place
    what = f"{group.where}: {spec.name}"
    buffers.refuse_tracing(what)
    if tensor is not None or is_missing:
        buffers.check(tensor, what, written=out is None and spec.in_place, or_number=not spec.divides)
    if out is not None and spec.receives(is_root):
        buffers.check_out(out, tensor, what, same_shape=spec.in_place)
    if tensor is None:
        return "cpu" if out is None else out.device.type
    is_usable = out is None and buffers.is_direct(tensor)
    return PLAIN_ON[tensor.device.type] if is_usable else str(tensor.device.type)


def _plain_place(spec: CollectiveSpec, tensor: Any, out: Any) -> Place | None:
    """Return the place of tensors that need no further checks; None for all others.

    `tensor` is None where only the root passes one. Memory for the result, `out`, is plain if it is apart from the
    tensor, and of the same dtype; if the result replaces the tensor, of the same shape too.
    """
    if tensor is None:
        return PLAIN if spec.only_root_passes and (out is None or buffers.is_plain(out)) else None
    if buffers.is_plain(tensor):
        if out is None:
            return PLAIN
        is_apart = buffers.is_plain(out) and out.dtype is tensor.dtype and not buffers.overlap(out, tensor)
        return PLAIN if is_apart and (out.shape == tensor.shape or not spec.in_place) else None
    return PLAIN_ON["cuda"] if out is None and buffers.is_plain_on_gpu(tensor) else None


def _not_a_result(group: Group, spec: CollectiveSpec, out: Any) -> DtypeError:
    op = other_names.known_operation(out, OPS)
    remedy = "Pass a tensor" if op is None else f"Pass the operation by keyword: op={op!r}"
    kind = f"out={out!r} is of type {type(out).__name__}, but the result is written to a tensor"
    return DtypeError(f"{group.where}: {spec.name}: {kind}. {remedy}.")


def check_root(group: Group, root: Any, collective: str) -> int:
    """Return a root as an integer, or raise if it is not a rank of the group."""
    try:
        number = -1 if isinstance(root, bool) else operator.index(root)  # numpy's integers too
    except TypeError:
        number = -1
    if not 0 <= number < group.size:
        op = other_names.known_operation(root, OPS) if spec_of(collective).reduces else None
        remedy = f"Use 0 to {group.size - 1}" if op is None else f"Pass the operation by keyword: op={op!r}"
        raise ArgumentError(
            f"{group.where}: {collective}: root={root!r} is not a rank of communicator {group.name}. {remedy}."
        )
    return number


def check_splits(
    group: Group, tensor: Any, splits: Iterable[int], out: Any = None, backend: str | None = None
) -> list[int]:
    """Check an alltoall with splits; return them as integers, the number of rows of dim 0 that each rank gets."""
    what = f"{group.where}: alltoall"
    if backend is not None:
        raise ArgumentError(f"{what}: the backend of a call with splits cannot be chosen. Omit backend={backend!r}.")
    spec = SPECS["alltoall"]
    from_number(group, spec, tensor, out, None)  # which it refuses
    check(group, spec, tensor, out, 0)
    num_rows = tensor.shape[0] if tensor.dim() else 0
    try:
        lengths = [operator.index(each) for each in splits]
    except TypeError:
        raise ArgumentError(f"{what}: splits={splits!r} is no list of integers. Pass one number per rank.") from None
    if not tensor.dim() or len(lengths) != group.size or min(lengths) < 0 or sum(lengths) != num_rows:
        raise ArgumentError(
            f"{what}: splits={lengths} does not divide {num_rows} rows over {group.size} ranks. Pass one number of "
            "rows for each rank, which add up to the length of dim 0."
        )
    return lengths
