"""Flat tensors that carry many gradients in one message."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError, GradientError
from ..session import runtime
from ..tensors import fusion

_ALIGN_BYTES = 64  # views that live long begin on a cache line


def partition_by_size(sizes: Sequence[int], partitions: int) -> list[range]:
    """Cut a list into `partitions` runs (or one per item), their largest sum as small as can be.

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
    runs = _runs_up_to(sizes, low)
    while len(runs) < min(partitions, len(sizes)):
        # One item alone is the largest sum, so that fewer runs would do: cut the others as they are wanted.
        index = max((i for i, run in enumerate(runs) if len(run) > 1), key=lambda i: _total(sizes, runs[i]))
        begin, end = runs[index].start, runs[index].stop
        halves = [(range(begin, cut), range(cut, end)) for cut in range(begin + 1, end)]
        runs[index : index + 1] = min(halves, key=lambda pair: max(_total(sizes, half) for half in pair))
    return runs


def _total(sizes: Sequence[int], run: range) -> int:
    return sum(sizes[run.start : run.stop])


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


def aligned_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a flat one of the same dtype, on a cache line each, and how long that is.

    >>> aligned_offsets([torch.empty(3), torch.empty(5)])
    ([0, 16], 21)
    """
    offsets, end = [], 0
    for tensor in tensors:
        align = _ALIGN_BYTES // tensor.element_size()
        offsets.append(-(-end // align) * align)
        end = offsets[-1] + tensor.numel()
    return offsets, end


def allocate_flat(numel: int, like: Tensor) -> Tensor:
    """Uninitialised memory of the dtype and on the device of `like`, for a bucket that lives long.

    On the host it is shared with the other ranks, as far as there is any: then the collectives copy nothing.

    >>> allocate_flat(3, torch.ones(2, dtype=torch.float64)).dtype
    torch.float64
    """
    if like.device.type == "cpu" and runtime.is_running():
        return runtime.current().empty_shared((numel,), like.dtype)
    return torch.empty(numel, dtype=like.dtype, device=like.device)


def dense_view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """The part of `flat` at `offset` with the shape of `like`, and its order of dimensions if it is dense.

    >>> dense_view(torch.arange(6), 0, torch.empty(3, 2).t())
    tensor([[0, 2, 4],
            [1, 3, 5]])
    """
    # empty_like keeps the strides of a dense tensor (channels_last, transposed) and mends others.
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset() + offset)


class CopiedBucket:
    """Gradients that are copied into a flat tensor and back; a single contiguous one is used where it lies.

    >>> a, b = torch.ones(2), torch.ones(1)
    >>> bucket = CopiedBucket([a, b])
    >>> flat = bucket.pack().mul_(3)
    >>> bucket.unpack(); a, b
    (tensor([3., 3.]), tensor([3.]))
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self.gradients = [gradient.detach() for gradient in gradients]
        self._flat: Tensor | None = None

    def pack(self) -> Tensor:
        """The values, one after the other."""
        if len(self.gradients) == 1 and self.gradients[0].is_contiguous():
            return self.gradients[0].view(-1)
        self._flat = torch.cat([gradient.reshape(-1) for gradient in self.gradients])
        return self._flat

    def unpack(self) -> None:
        """Give what has become of the flat tensor back to the gradients."""
        if self._flat is not None:
            fusion.unpack(self._flat, self.gradients)


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
        offsets, numel = aligned_offsets(parameters)
        # Zeros: the gaps between the views are sent too, and must not hold NaN.
        self.flat = allocate_flat(numel, parameters[0]).zero_()
        self.views = [dense_view(self.flat, offset, p.detach()) for offset, p in zip(offsets, parameters, strict=True)]
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
                f"A gradient of shape {list(gradient.shape)} is sparse, but only those of "
                "nn.Embedding(sparse=True) are expected to be. Use synchronize_gradients() after backward "
                "instead of asynchronous hooks."
            )
        view.copy_(gradient.detach())
        parameter.grad = view

    def pack(self) -> Tensor:
        """The flat tensor with all gradients in it, zeros where there is none."""
        for position, parameter in enumerate(self.parameters):
            view = self.views[position]
            if parameter.grad is not view or view.data_ptr() != self._addresses[position]:
                self.seat(position)
        return self.flat

    def unpack(self) -> None:
        """Nothing to do: the gradients are there already."""

    def give(self, present: Container[int]) -> None:
        """Let the parameters with ids in `present` have their part as gradient, even if they had none."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if id(parameter) in present:
                parameter.grad = view
