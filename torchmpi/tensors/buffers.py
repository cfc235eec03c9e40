"""Checks of tensors, and copies from and to the plain tensors that backends work on.

A *plain* tensor is contiguous, not part of an autograd graph, and on a device that the backend takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import ArgumentError, DeviceError, DtypeError, kind_of, rank_prefix
from ..other_names import MISSING
from . import modes, streams

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def as_bytes(MPI: Any, tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor as an mpi4py buffer of bytes.

    mpi4py does not check bounds, and the caller must keep the tensor alive during the call.
    """
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a flat tensor of bytes.

    >>> byte_view(torch.ones(2, 3, dtype=torch.complex64)).shape
    torch.Size([48])
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # view() keeps the stride of a single element
    return flat.view(torch.uint8)


def is_direct(tensor: torch.Tensor) -> bool:
    """Return whether the memory of the tensor is exactly its values, in order.

    >>> is_direct(torch.ones(3, 4)), is_direct(torch.ones(3, 4).t())
    (True, False)
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def is_plain(tensor: object) -> bool:
    """Return whether a value is a contiguous host tensor that needs no further checks.

    >>> is_plain(torch.ones(2)), is_plain(torch.ones(2, 2).t()), is_plain(3)
    (True, False, False)
    """
    try:
        return (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.is_conj() or tensor.requires_grad)
            and (tensor.data_ptr() != 0 or tensor.numel() == 0)
        )
    except RuntimeError:  # of data_ptr(), for the tensors of torch.func
        return False


def are_rows(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether contiguous tensors are of one length, and one behind the other in memory.

    >>> are_rows(torch.ones(3, 2).unbind()), are_rows([torch.ones(2), torch.ones(2)])
    (True, False)
    """
    begin, num_bytes = tensors[0].data_ptr(), tensors[0].nbytes
    for index, tensor in enumerate(tensors):
        if tensor.nbytes != num_bytes or (num_bytes and tensor.data_ptr() != begin + index * num_bytes):
            return False
    return True


def is_plain_on_gpu(tensor: object) -> bool:
    """Return whether a value is a contiguous tensor on a GPU that needs no further checks.

    >>> is_plain_on_gpu(torch.ones(2))
    False
    """
    return (  # is_direct(tensor) inlined, on the path of every call
        type(tensor) is torch.Tensor
        and tensor.is_cuda
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or tensor.requires_grad)
    )


def refuse_tracing(what: str) -> None:
    """Raise where torch records or simulates a function: the call would be no part of the recorded one."""
    recorder = modes.recorder()
    if recorder == "make_fx":
        raise ArgumentError(
            f"{what}: make_fx cannot record a call of torchmpi, and the graph would not contain it. Trace the parts "
            "before and after it, or call torch.distributed on the backend 'torchmpi', whose calls graphs contain."
        )
    if recorder:
        raise ArgumentError(
            f"{what}: a {recorder} simulates the program, and the call would communicate. Make the call outside of it."
        )
    if modes.get_tracing_state() is not None:
        raise ArgumentError(
            f"{what}: torch.jit.trace cannot record a call of torchmpi, and the traced function would not contain it. "
            "Trace the parts before and after the call, or use torch.compile, which runs it outside of its graphs."
        )


def check(tensor: object, what: str, *, written: bool = False, or_number: bool = False) -> torch.Tensor:
    """Raise if a tensor cannot be sent or, if `written`, received into; `or_number`: the call takes numbers too.

    >>> check([1.0], "allreduce", or_number=True)
    Traceback (most recent call last):
    torchmpi.errors.DtypeError: allreduce: a list is not a tensor. Pass a torch.Tensor or a number.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        if tensor is MISSING:
            raise DtypeError(f"{what}: the tensor is missing. It is the first argument.")
        hint = " (torch.from_numpy shares the memory)" if kind == "ndarray" else ""
        raise DtypeError(f"{what}: a {kind} is not a tensor. Pass a torch.Tensor{' or a number' * or_number}{hint}.")
    if tensor.is_nested:
        raise ArgumentError(f"{what}: the tensor is nested. Send its parts one by one (tensor.unbind()).")
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{what}: the tensor is {str(tensor.layout).removeprefix('torch.')}. Pass .to_dense(), or its indices and "
            "values one by one (torchmpi.nn does so for sparse gradients)."
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{what}: tensors on device {tensor.device} cannot be sent. Use .cpu() or .cuda().")
    refuse_tracing(what)
    if isinstance(tensor, FakeTensor):
        raise DtypeError(
            f"{what}: a FakeTensor has no values, as within torch.export or a FakeTensorMode. Make the call outside "
            "of it."
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ArgumentError(
            f"{what}: the tensor exists within torch.func.vmap, grad, jvp or functionalize only, and has no memory "
            "that can be sent. Make the call outside of the transformed function."
        )
    if tensor.is_cpu and not tensor.data_ptr() and tensor.numel():
        raise ArgumentError(
            f"{what}: the tensor has no memory (a freed storage, or a zero of forward-mode autograd). Pass .clone()."
        )
    if type(tensor) not in _PLAIN_TYPES and torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        raise DtypeError(f"{what}: {kind_of(tensor)} wraps other tensors. Pass the local one.")
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if written and tensor.numel() and any(stride == 0 and size > 1 for stride, size in strides):
        raise ArgumentError(
            f"{what}: the tensor is expanded, several elements share memory. Use .contiguous() or out=."
        )
    return tensor


def check_out(out: object, tensor: torch.Tensor | None, what: str, *, same_shape: bool) -> None:
    """Raise if a result cannot be received in `out`, given the tensor that the rank passes, if it passes one.

    >>> check_out(torch.ones(2), torch.ones(3), "allreduce", same_shape=True)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: allreduce: out has shape [2], the tensor [3]. They must be equal.
    """
    received = check(out, f"{what}: out", written=True)
    if tensor is None:
        return
    if received.dtype is not tensor.dtype:
        raise DtypeError(f"{what}: out is {received.dtype}, the tensor {tensor.dtype}. Make out of the same dtype.")
    if received.device != tensor.device:
        raise DeviceError(
            f"{what}: out is on {received.device}, the tensor on {tensor.device}. Put both on one device."
        )
    if same_shape and received.shape != tensor.shape:
        raise ArgumentError(
            f"{what}: out has shape {list(received.shape)}, the tensor {list(tensor.shape)}. They must be equal."
        )


def plain(tensor: torch.Tensor, *, to_host: bool) -> torch.Tensor:
    """Return the tensor itself if it is plain, else a plain copy (in pinned memory, from CUDA to the host)."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if to_host and tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        streams.wait(streams.end_of(tensor))
        return host
    return tensor.contiguous()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors may share memory without being the same.

    >>> base = torch.zeros(4)
    >>> overlap(base[:3], base[1:]), overlap(base[:2], base[2:])
    (True, False)
    """
    first, second = a.data_ptr(), b.data_ptr()
    if not (first and second) or a.device != b.device:  # nothing is at address 0
        return False
    return first <= _last_byte(b) and second <= _last_byte(a)


def overlap_of_any(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two tensors have an element in common.

    >>> matrix = torch.zeros(4, 4)
    >>> overlap_of_any([matrix[:, :2], matrix[:, 2:]]), overlap_of_any([matrix[0], matrix[:, 0]])
    (False, True)
    """
    spans = sorted(((each.data_ptr(), _last_byte(each), index) for index, each in enumerate(tensors) if each.numel()))
    cluster: list[torch.Tensor] = []
    begin, end = -1, -1
    for first, last, index in [*spans, (sys.maxsize, 0, 0)]:
        if first > end:
            if len(cluster) > 1 and _share_bytes(cluster, begin, end):
                return True
            cluster, begin = [], first
        cluster.append(tensors[index])
        end = max(end, last)
    return False


def _share_bytes(tensors: Sequence[torch.Tensor], begin: int, end: int) -> bool:
    """Return whether tensors in memory from `begin` to `end` have bytes in common: count the tensors of each byte."""
    counts = torch.zeros(end - begin + 1, dtype=torch.uint8)
    for tensor in tensors:
        item_bytes = tensor.element_size()
        strides = [item_bytes * stride for stride in tensor.stride()]
        counts.as_strided((*tensor.shape, item_bytes), (*strides, 1), tensor.data_ptr() - begin).add_(1)
    return bool(counts.max() > 1)


def _last_byte(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes - 1
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (reach + 1) * tensor.element_size() - 1


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor that may be a leaf, part of a graph, or made in inference mode.

    >>> leaf = torch.zeros(2, requires_grad=True)
    >>> overwrite(leaf, torch.ones(2)); leaf
    tensor([1., 1.], requires_grad=True)
    """
    with torch.inference_mode(target.is_inference()):
        target.detach().copy_(values)
    touch(target)


def copy_result(result: torch.Tensor, out: torch.Tensor, call: str) -> None:
    """Copy the result of a call into `out`, or raise if it does not fit; the call has ended on all ranks."""
    what, remedy = f"{rank_prefix()}{call}: out", "Pass out=None to have it made."
    if out.dtype != result.dtype:
        raise DtypeError(f"{what} is {out.dtype}, but the result is {result.dtype}. {remedy}")
    if out.shape != result.shape:
        raise ArgumentError(f"{what} has shape {list(out.shape)}, but the result has {list(result.shape)}. {remedy}")
    overwrite(out, result)


def touch(tensor: torch.Tensor) -> None:
    """Notify autograd that the tensor was written, so that a stale saved value raises an error."""
    try:
        increment_version((tensor,))
    except RuntimeError:
        if not tensor.is_inference():  # these have no version, and no backward
            raise


def touch_all(tensors: Sequence[torch.Tensor]) -> None:
    """Notify autograd that these tensors were written."""
    try:
        increment_version(tuple(tensors))
    except RuntimeError:
        for tensor in tensors:
            touch(tensor)


def _find_increment_version() -> Callable[[tuple[torch.Tensor, ...]], None]:
    """Return the function behind torch.autograd.graph.increment_version, which checks its argument for 0.2 us."""
    try:
        torch._C._increment_version((torch.empty(0, device="cpu"),))
    except (AttributeError, TypeError):  # another version of torch
        return torch.autograd.graph.increment_version
    return torch._C._increment_version


increment_version = _find_increment_version()


class Scratch:
    """Reusable memory that grows on demand."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over the memory; valid until the next call.

        >>> Scratch().take(3, torch.float64).shape
        torch.Size([3])
        """
        num_bytes = numel * dtype.itemsize
        if self._memory.numel() < num_bytes:
            with torch.inference_mode(False):  # otherwise only calls in inference mode could write to the memory
                self._memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._memory[:num_bytes].view(dtype)
