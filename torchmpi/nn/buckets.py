"""Flat tensors that hold many gradients, for one collective call."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError, GradientError, rank_prefix
from ..session import runtime
from ..tensors import bucket_plan

_MOVED = (
    "The net was moved to another dtype or device while it was registered for asynchronous backward. "
    "Call unregister_async_backward(net) before the move, and register_async_backward(net) after it."
)
_ALIGN_BYTES = 64  # views that persist begin at a cache line


def partition_by_size(sizes: Sequence[int], partitions: int) -> list[range]:
    """Divide a list into `partitions` runs (at most one per item) with the smallest possible largest sum.

    >>> partition_by_size([5, 1, 1, 1, 4], 2)
    [range(0, 2), range(2, 5)]
    """
    if partitions < 1:
        raise ArgumentError(f"{rank_prefix()}partitions={partitions} must be at least 1.")
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_runs_up_to(sizes, middle)) <= partitions:
            high = middle
        else:
            low = middle + 1
    runs = _runs_up_to(sizes, low)
    while len(runs) < min(partitions, len(sizes)):
        # Fewer runs can have the same largest sum: divide the largest divisible ones until there are enough.
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
    """Return the offset of each tensor in a flat one, aligned to cache lines, and the length of the flat tensor.

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
    """Return uninitialized memory of the dtype and device of `like`, for a persistent bucket.

    On the host it is shared memory if possible: then collectives copy nothing.

    >>> allocate_flat(3, torch.ones(2, dtype=torch.float64)).dtype
    torch.float64
    """
    if like.device.type == "cpu" and runtime.is_running():
        return runtime.current().empty_shared((numel,), like.dtype)
    return torch.empty(numel, dtype=like.dtype, device=like.device)


def dense_view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view of `flat` at `offset` with the shape of `like`, and with its strides if it is dense.

    >>> dense_view(torch.arange(6), 0, torch.empty(3, 2).t())
    tensor([[0, 2, 4],
            [1, 3, 5]])
    """
    # empty_like keeps the strides of a dense tensor (channels_last, transposed) and makes others contiguous.
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset() + offset)


class CopiedBucket:
    """Gradients that are copied into a flat tensor and back; a single contiguous gradient is not copied.

    >>> a, b = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    >>> a.grad, b.grad = torch.ones(2), torch.ones(1)
    >>> bucket = CopiedBucket([a, b])
    >>> flat = bucket.pack().mul_(3)
    >>> bucket.unpack(); a.grad, b.grad
    (tensor([3., 3.]), tensor([3.]))
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
        self._flat: Tensor | None = None

    @property
    def views(self) -> list[Tensor]:
        """The gradients as views of the flat tensor, after :meth:`pack`."""
        if self._flat is None:
            return self.gradients
        parts = self._flat.split([gradient.numel() for gradient in self.gradients])
        return [part.view(gradient.shape) for part, gradient in zip(parts, self.gradients, strict=True)]

    def pack(self) -> Tensor:
        """Return a flat tensor of the values."""
        if len(self.gradients) == 1 and self.gradients[0].is_contiguous():
            return self.gradients[0].view(-1)
        self._flat = bucket_plan.pack(self.gradients)
        return self._flat

    def unpack(self) -> None:
        """Copy the flat tensor back to the gradients."""
        if self._flat is not None:
            bucket_plan.unpack(self._flat, self.gradients)


class ViewBucket:
    """Gradients that are views of a flat tensor, so that nothing is copied at each step.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> bucket = ViewBucket([weight])
    >>> bucket.pack()[:2], weight.grad.data_ptr() == bucket.flat.data_ptr()
    (tensor([3., 4.]), True)
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        offsets, numel = aligned_offsets(parameters)
        # Zeros: the gaps between the views are reduced too, and must not contain NaN.
        self.flat = allocate_flat(numel, parameters[0]).zero_()
        # ``.data`` gives each view a version counter of its own, which reductions of the flat tensor do not change, so
        # that a change of one gradient by the program can be detected.
        self.views = [
            dense_view(self.flat, offset, p.detach()).data for offset, p in zip(offsets, parameters, strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self.views]

    def move_in(self, position: int) -> Tensor:
        """Move the gradient of one parameter into the flat tensor, unless it is a view of it, and return the view."""
        parameter, view = self.parameters[position], self.views[position]
        gradient = parameter.grad
        # module.to() replaces the storage of every .grad, also if it is a view of the flat tensor.
        if view.data_ptr() != self._addresses[position] or parameter.dtype is not view.dtype:
            raise GradientError(_MOVED)
        if gradient is view:
            return view
        if gradient is None:
            return view.zero_()
        if gradient.layout is not torch.strided:
            raise GradientError(
                f"{rank_prefix()}A gradient of shape {list(gradient.shape)} is sparse, but only those of "
                "nn.Embedding(sparse=True) are expected to be. Use synchronize_gradients() after backward, and no "
                "BlockSequential for this layer."
            )
        view.copy_(gradient.detach())
        parameter.grad = view
        return view

    def check_place(self) -> None:
        """Raise if the gradients were moved to another dtype or device."""
        if self.views[0].data_ptr() != self._addresses[0]:
            raise GradientError(_MOVED)

    def pack(self) -> Tensor:
        """Move all gradients into the flat tensor, with zeros for missing ones, and return it."""
        for position, parameter in enumerate(self.parameters):
            view = self.views[position]
            if parameter.grad is not view or view.data_ptr() != self._addresses[position]:
                self.move_in(position)
        return self.flat

    def unpack(self) -> None:
        """Do nothing, since the gradients are views of the flat tensor."""

    def give(self, present: Container[int]) -> None:
        """Assign the views as gradients of the parameters whose ids are in `present`, also if these had none."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if id(parameter) in present:
                parameter.grad = view
