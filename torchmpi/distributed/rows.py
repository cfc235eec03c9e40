"""Tensor lists as the rows of one tensor, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import ArgumentError
from ..tensors import buffers

Rows = torch.Tensor | list[torch.Tensor]
"""The rows of one tensor, or a list of tensors in their place."""


def have_equal_lengths(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same number of elements.

    >>> have_equal_lengths([torch.ones(2, 3), torch.ones(6)]), have_equal_lengths([torch.ones(1), torch.ones(2)])
    (True, False)
    """
    return len({tensor.numel() for tensor in tensors}) <= 1


def check_sizes(whole: torch.Tensor, part: torch.Tensor, num_ranks: int, where: str, name: str) -> None:
    """Raise unless `whole` has room for a tensor like `part` of each rank."""
    if whole.numel() != part.numel() * num_ranks or whole.dtype != part.dtype:
        raise ArgumentError(
            f"{where}: {name}: one tensor is {whole.dtype} {list(whole.shape)}, the other {part.dtype} "
            f"{list(part.shape)}: the first must be of the same dtype and {num_ranks} times as long, "
            f"{math.prod(part.shape) * num_ranks} elements."
        )


def are_even(
    output: torch.Tensor,
    input: torch.Tensor,
    num_ranks: int,
    output_sizes: Sequence[int] = (),
    input_sizes: Sequence[int] = (),
) -> bool:
    """Return whether two tensors have parts of one length for all ranks, along dim 0, of these sizes if any are given.

    >>> are_even(torch.ones(4, 2), torch.ones(2, 4), 2), are_even(torch.ones(3), torch.ones(3), 2)
    (True, False)
    >>> are_even(torch.ones(4), torch.ones(4), 2, [2, 2]), are_even(torch.ones(4), torch.ones(4), 2, [], [1, 3])
    (True, False)
    """
    for sizes in (output_sizes, input_sizes):
        if sizes and (len(sizes) != num_ranks or sizes.count(sizes[0]) != num_ranks):
            return False
    if not (output.dim() and input.dim()) or output.numel() != input.numel() or output.dtype is not input.dtype:
        return False
    for tensor, sizes in ((output, output_sizes), (input, input_sizes)):
        length, rest = divmod(tensor.shape[0], num_ranks)
        if rest or (sizes and sizes[0] != length):
            return False
    return True


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
    return list(tensor.detach().split_with_sizes(sizes))


def in_memory(tensors: Sequence[torch.Tensor]) -> Rows | None:
    """Return the elements of plain host tensors in their own memory, in order; None if one is not plain.

    Tensors that are not adjacent are a list.

    >>> whole = torch.zeros(2, 3)
    >>> in_memory([whole[0], whole[1]]).data_ptr() == whole.data_ptr(), in_memory([whole.t()])
    (True, None)
    >>> in_memory([torch.ones(1), whole[0, :1]])
    [tensor([1.]), tensor([0.])]
    """
    if len(tensors) == 1:
        return tensors[0] if buffers.is_plain(tensors[0]) else None
    dtype = tensors[0].dtype
    are_plain = all([buffers.is_plain(tensor) and tensor.dtype is dtype for tensor in tensors])
    if not are_plain:
        return None
    adjacent = _adjacent(tensors)
    return list(tensors) if adjacent is None else adjacent


def as_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a contiguous tensor as rows.

    >>> as_rows(torch.ones(6), 2).shape, as_rows(torch.ones(2, 3), -1).shape
    (torch.Size([2, 3]), torch.Size([6]))
    """
    return tensor.view(num_rows, tensor.numel() // num_rows) if num_rows > 0 else tensor.view(-1)


def parts_of(rows: Rows, num_ranks: int) -> list[torch.Tensor]:
    """Return the parts of all ranks: the tensors of a list, or equal parts of a contiguous tensor.

    >>> parts_of(torch.ones(4), 2)
    [tensor([1., 1.]), tensor([1., 1.])]
    """
    return rows if isinstance(rows, list) else list(as_rows(rows, num_ranks).unbind())


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return contiguous tensors as rows in their own memory; None if they are not adjacent in one storage."""
    first = tensors[0]
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    if room < first.nbytes * len(tensors) or not buffers.are_rows(tensors):
        return None
    return first.as_strided((len(tensors), first.numel()), (first.numel(), 1))


def packed(tensors: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Return the elements, in order, as a matrix of `num_rows` rows: a view of a contiguous tensor, or a copy.

    >>> packed([torch.ones(2), torch.zeros(2)], 2)
    tensor([[1., 1.],
            [0., 0.]])
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return as_rows(flat[0] if len(flat) == 1 else torch.cat(flat), num_rows)


def result_rows(outputs: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Return rows to receive into: the memory of the outputs if they can be rows in it, otherwise a new tensor.

    >>> output = torch.zeros(4)
    >>> result_rows([output], 2).data_ptr() == output.data_ptr()
    True
    """
    rows, detached = None, [output.detach() for output in outputs]
    if all(map(buffers.is_direct, outputs)):
        rows = as_rows(detached[0], num_rows) if len(outputs) == 1 else _adjacent(detached)
    if rows is None:
        numel = sum([output.numel() for output in outputs])
        rows = detached[0].new_empty((num_rows, numel // num_rows))
    return rows


def empty_rows(tensors: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Return new memory for the elements of some tensors, as rows.

    >>> empty_rows([torch.ones(2), torch.ones(2)], 2).shape
    torch.Size([2, 2])
    """
    return as_rows(tensors[0].new_empty(sum([each.numel() for each in tensors])), num_rows)


def deliver(rows: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy received rows into the outputs, each of which gets as many, unless they are its memory.

    >>> outputs = [torch.zeros(2), torch.zeros(2)]
    >>> deliver(torch.ones(2, 2), outputs); outputs
    [tensor([1., 1.]), tensor([1., 1.])]
    """
    parts = rows.view(len(outputs), rows.numel() // len(outputs))
    for part, output in zip(parts, outputs, strict=True):
        if part.data_ptr() != output.data_ptr() or not buffers.is_direct(output):
            buffers.overwrite(output, part.view(output.shape))
        else:
            buffers.touch(output)
