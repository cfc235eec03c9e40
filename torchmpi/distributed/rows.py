"""Tensor lists as the rows of one tensor, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import ArgumentError
from ..tensors import buffers


def have_equal_lengths(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same number of elements.

    >>> have_equal_lengths([torch.ones(2, 3), torch.ones(6)]), have_equal_lengths([torch.ones(1), torch.ones(2)])
    (True, False)
    """
    return len({tensor.numel() for tensor in tensors}) <= 1


def check_sizes(whole: torch.Tensor, part: torch.Tensor, num_ranks: int, what: str) -> None:
    """Raise unless `whole` has room for a tensor like `part` of each rank."""
    if whole.numel() != part.numel() * num_ranks or whole.dtype != part.dtype:
        raise ArgumentError(
            f"{what}: one tensor is {whole.dtype} {list(whole.shape)}, the other {part.dtype} {list(part.shape)}: the "
            f"first must be of the same dtype and {num_ranks} times as long, {math.prod(part.shape) * num_ranks} "
            "elements."
        )


def split(tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int, what: str) -> list[torch.Tensor]:
    """Split a tensor along dim 0, one part per rank: with these sizes, or evenly if there are none.

    >>> [part.tolist() for part in split(torch.arange(4), [1, 3], 2, "the input")]
    [[0], [1, 2, 3]]
    """
    num_rows = tensor.shape[0] if tensor.dim() else 0
    sizes = list(sizes) or [num_rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != num_rows or min(sizes) < 0:
        raise ArgumentError(
            f"{what} has {num_rows} rows, to be split as {sizes} over {num_ranks} ranks. Give one size for each rank, "
            "which add up to the rows, or none if they are even."
        )
    return list(torch.split(tensor.detach(), sizes))


def as_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the elements, in order, as a matrix of `num_rows` rows.

    >>> as_rows(torch.arange(6), 2)
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    return tensor.detach().reshape(num_rows, tensor.numel() // num_rows)


def result_rows(output: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return rows to receive into: the memory of `output` if that is contiguous, otherwise a new tensor.

    >>> output = torch.zeros(4)
    >>> result_rows(output, 2).data_ptr() == output.data_ptr()
    True
    """
    if buffers.is_direct(output):
        return output.detach().view(num_rows, output.numel() // num_rows)
    return torch.empty((num_rows, output.numel() // num_rows), dtype=output.dtype, device=output.device)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows to receive into, one per part: the memory of the parts if that is adjacent, otherwise a new tensor.

    >>> whole = torch.zeros(2, 3)
    >>> stacked([whole[0], whole[1]]).data_ptr() == whole.data_ptr()
    True
    """
    first = parts[0]
    begin, num_bytes = first.data_ptr(), first.nbytes
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    are_adjacent = (
        buffers.is_direct(part) and part.data_ptr() == begin + index * num_bytes for index, part in enumerate(parts)
    )
    if room >= num_bytes * len(parts) and all(are_adjacent):
        return first.detach().as_strided((len(parts), first.numel()), (first.numel(), 1))
    return torch.empty((len(parts), first.numel()), dtype=first.dtype, device=first.device)


def deliver(rows: torch.Tensor, output: torch.Tensor) -> None:
    """Copy received rows into the output, unless they are its memory.

    >>> output = torch.zeros(2, 1)
    >>> deliver(torch.ones(1, 2), output); output.tolist()
    [[1.0], [1.0]]
    """
    if rows.data_ptr() != output.data_ptr() or not buffers.is_direct(output):
        buffers.overwrite(output, rows.view(output.shape))
    else:
        buffers.touch(output)


def deliver_each(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy each received row into its part, as :func:`deliver` does."""
    for row, part in zip(rows, parts, strict=True):
        deliver(row, part)
