"""Lists of tensors as the rows of one, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError
from ..tensors import buffers


def one_of(values: Any) -> Any:
    """The only entry of a list with one entry for each device of this rank, of which there is one; or the value itself.

    >>> one_of([7]), one_of(torch.ones(1))
    (7, tensor([1.]))
    """
    if isinstance(values, torch.Tensor):
        return values
    if len(values) != 1:
        raise ArgumentError(f"{len(values)} tensors where one is wanted: a rank has one device. Pass a list of one.")
    return values[0]


def same_lengths(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have as many elements.

    >>> same_lengths([torch.ones(2, 3), torch.ones(6)]), same_lengths([torch.ones(1), torch.ones(2)])
    (True, False)
    """
    return len({tensor.numel() for tensor in tensors}) <= 1


def as_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The elements in order, in so many rows.

    >>> as_rows(torch.arange(6), 2)
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    return tensor.detach().reshape(num_rows, tensor.numel() // num_rows)


def result_rows(output: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows to receive into: the memory of `output` itself, or if that is not in order memory of their own.

    >>> output = torch.zeros(4)
    >>> result_rows(output, 2).data_ptr() == output.data_ptr()
    True
    """
    if buffers.is_direct(output):
        return output.detach().view(num_rows, output.numel() // num_rows)
    return torch.empty((num_rows, output.numel() // num_rows), dtype=output.dtype, device=output.device)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows to receive into, one for each part: their own memory, if they lie one behind the other.

    >>> whole = torch.zeros(2, 3)
    >>> stacked([whole[0], whole[1]]).data_ptr() == whole.data_ptr()
    True
    """
    first = parts[0]
    begin, num_bytes = first.data_ptr(), first.nbytes
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    in_a_row = (
        buffers.is_direct(part) and part.data_ptr() == begin + index * num_bytes for index, part in enumerate(parts)
    )
    if room >= num_bytes * len(parts) and all(in_a_row):
        return first.detach().as_strided((len(parts), first.numel()), (first.numel(), 1))
    return torch.empty((len(parts), first.numel()), dtype=first.dtype, device=first.device)


def deliver(rows: torch.Tensor, output: torch.Tensor) -> None:
    """What was received into `rows` into the tensor it is for, unless it is there already.

    >>> output = torch.zeros(2, 1)
    >>> deliver(torch.ones(1, 2), output); output.tolist()
    [[1.0], [1.0]]
    """
    if rows.data_ptr() != output.data_ptr() or not buffers.is_direct(output):
        buffers.overwrite(output, rows.view(output.shape))
    else:
        buffers.touch(output)


def deliver_each(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Each row into its part."""
    for row, part in zip(rows, parts, strict=True):
        deliver(row, part)
