"""Flat tensors that carry many gradients in one message: the plan, which is pure, and the buckets themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError, GradientError

_ALIGN_BYTES = 64  # views that live long begin on a cache line


class BucketPlan(NamedTuple):
    """Which tensors lie in one flat tensor, and where."""

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def plan_buckets(tensors: Sequence[Tensor], bucket_bytes: int, *, align_bytes: int = 1) -> list[BucketPlan]:
    """Fill buckets with `tensors` in their order, each bucket of one dtype and device.

    A bucket is closed when the next tensor would take it over `bucket_bytes`; a larger tensor has one to itself.
    Buckets are ordered by their last tensor: the one that can be complete first comes first.

    >>> small, large = torch.empty(4), torch.empty(100)
    >>> [plan.indices for plan in plan_buckets([small, small, large, small], bucket_bytes=64)]
    [(0, 1), (2,), (3,)]
    """
    if bucket_bytes < 1:
        raise ArgumentError(f"bucket_bytes={bucket_bytes} must be at least 1.")
    plans: list[BucketPlan] = []
    open_plans: dict[tuple[torch.dtype, torch.device], BucketPlan] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        item_bytes = tensor.element_size()
        plan = open_plans.get(kind, BucketPlan((), (), 0))
        align = max(1, align_bytes // item_bytes)
        offset = -(-plan.numel // align) * align
        end = offset + tensor.numel()
        if plan.indices and end * item_bytes > bucket_bytes:
            plans.append(plan)
            plan, offset, end = BucketPlan((), (), 0), 0, tensor.numel()
        open_plans[kind] = BucketPlan((*plan.indices, index), (*plan.offsets, offset), end)
    plans.extend(open_plans.values())
    return sorted(plans, key=lambda plan: plan.indices[-1])


def partition_by_size(sizes: Sequence[int], partitions: int) -> list[range]:
    """Cut a list into at most `partitions` runs such that the largest sum of a run is as small as possible.

    >>> partition_by_size([5, 1, 1, 1, 4], 2)
    [range(0, 2), range(2, 5)]
    """
    if partitions < 1:
        raise ArgumentError(f"partitions={partitions} must be at least 1.")
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_runs_up_to(sizes, middle)) <= partitions:
            high = middle
        else:
            low = middle + 1
    return _runs_up_to(sizes, low)


def _runs_up_to(sizes: Sequence[int], limit: int) -> list[range]:
    runs, begin, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if filled + size > limit and index > begin:
            runs.append(range(begin, index))
            begin, filled = index, 0
        filled += size
    if begin < len(sizes):
        runs.append(range(begin, len(sizes)))
    return runs


def allocate_flat(numel: int, like: Tensor) -> Tensor:
    """The memory of one bucket, uninitialised, of the dtype and on the device of `like`. Every bucket comes from here.

    >>> allocate_flat(3, torch.ones(2, dtype=torch.float64)).dtype
    torch.float64
    """
    return torch.empty(numel, dtype=like.dtype, device=like.device)


def dense_view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """The part of `flat` at `offset` that has the shape of `like`, and its order of dimensions if it is dense.

    >>> dense_view(torch.arange(6), 0, torch.empty(3, 2).t())
    tensor([[0, 2, 4],
            [1, 3, 5]])
    """
    # empty_like keeps the strides of a dense tensor (channels_last, transposed) and mends others.
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset() + offset)


class Bucket(Protocol):
    """What a synchronisation does with gradients that travel together."""

    parameters: Sequence[Tensor]

    def pack(self) -> Tensor:
        """Collect the gradients, zeros where there is none, into a flat tensor."""

    def unpack(self, is_present: Sequence[bool]) -> None:
        """Give the flat tensor's values to the gradients of the parameters that have one on some rank."""


class CopiedBucket:
    """Gradients that are copied into a flat tensor and back; a single contiguous one is used where it lies."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._flat = torch.empty(0)

    def pack(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters]
        only = gradients[0] if len(gradients) == 1 else None
        if only is not None and only.is_contiguous():
            self._flat = only.detach().view(-1)
            return self._flat
        self._flat = allocate_flat(sum(parameter.numel() for parameter in self.parameters), self.parameters[0])
        for gradient, piece in zip(gradients, self._pieces()):
            if gradient is None:
                piece.zero_()
            else:
                piece.copy_(gradient)
        return self._flat

    def unpack(self, is_present: Sequence[bool]) -> None:
        for parameter, piece, present in zip(self.parameters, self._pieces(), is_present):
            if not present:
                continue
            if parameter.grad is None:
                parameter.grad = piece.clone()
            elif parameter.grad.data_ptr() != piece.data_ptr():
                parameter.grad.copy_(piece)

    def _pieces(self) -> list[Tensor]:
        parts = self._flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters)]


class SeatedBucket:
    """Gradients that live in a flat tensor: once seated, nothing is copied.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> bucket = SeatedBucket([weight])
    >>> bucket.pack()[:2], weight.grad.data_ptr() == bucket.flat.data_ptr()
    (tensor([3., 4.]), True)
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        total_bytes = sum(parameter.numel() * parameter.element_size() + _ALIGN_BYTES for parameter in parameters)
        (plan,) = plan_buckets(parameters, total_bytes, align_bytes=_ALIGN_BYTES)
        # Zeros: the gaps between the views are sent too, and must not hold NaN.
        self.flat = allocate_flat(plan.numel, parameters[0]).zero_()
        self.views = [dense_view(self.flat, offset, p.detach()) for offset, p in zip(plan.offsets, parameters)]
        self._addresses = [view.data_ptr() for view in self.views]

    def seat(self, position: int) -> None:
        """Move the gradient of one parameter into the flat tensor, unless it is there already."""
        parameter, view = self.parameters[position], self.views[position]
        gradient = parameter.grad
        if view.data_ptr() != self._addresses[position]:
            # module.to() gives new storage to every .grad it finds, and this view was one.
            raise GradientError(
                "The net was moved to another dtype or device while its gradients were in a bucket. "
                "Unregister it before, and register it again after the move."
            )
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
            return
        if gradient.layout is not torch.strided:
            raise GradientError(
                f"A gradient of shape {list(gradient.shape)} is sparse, but only gradients of nn.Embedding(sparse=True) "
                "are expected to be. Use synchronize_gradients() after backward instead of the asynchronous hooks."
            )
        view.copy_(gradient.detach())
        parameter.grad = view

    def pack(self) -> Tensor:
        for position in range(len(self.parameters)):
            self.seat(position)
        return self.flat

    def unpack(self, is_present: Sequence[bool]) -> None:
        for parameter, view, present in zip(self.parameters, self.views, is_present):
            if present:
                parameter.grad = view
