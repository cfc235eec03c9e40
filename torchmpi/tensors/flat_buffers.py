"""Lists of tensors in one flat buffer per dtype and device, and passes over lists in blocks that fit into the cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from ..errors import CheckpointError

Allocate = Callable[[int, torch.dtype], Tensor]
"""``allocate(numel, dtype)`` returns a flat tensor."""

_BLOCK_BYTES = 256 << 10  # two of them fit into the second-level cache


class FlatBuffers:
    """A flat buffer per dtype and device for a list of tensors, and a view into it for each tensor.

    >>> flat = FlatBuffers([torch.ones(2, 2), torch.ones(1)])
    >>> flat.buffers[0].shape, [view.shape for view in flat.views]
    (torch.Size([5]), [torch.Size([2, 2]), torch.Size([1])])
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        allocate: Allocate | None = None,
        *,
        devices: Sequence[torch.device] | None = None,
        apart: Collection[int] = (),
    ) -> None:
        """Allocate the buffers, on `devices` instead of those of the tensors if given.

        Each of the tensors with the numbers `apart` gets a buffer of its own.
        """
        groups: dict[tuple[torch.dtype, torch.device, int | None], list[int]] = {}
        for index, tensor in enumerate(tensors):
            device = tensor.device if devices is None else devices[index]
            groups.setdefault((tensor.dtype, device, index if index in apart else None), []).append(index)
        self.buffers: list[Tensor] = []
        views: dict[int, Tensor] = {}
        self.buffer_of: dict[int, int] = {}
        """For each tensor, the number of its buffer."""
        for (dtype, device, _), members in groups.items():
            self.buffer_of |= dict.fromkeys(members, len(self.buffers))
            sizes = [tensors[index].numel() for index in members]
            numel = sum(sizes)
            buffer = torch.empty(numel, dtype=dtype, device=device) if allocate is None else allocate(numel, dtype)
            self.buffers.append(buffer)
            for index, part in zip(members, torch.split(buffer, sizes), strict=True):
                views[index] = part.view(tensors[index].shape)
        self.views = [views[index] for index in range(len(tensors))]

    @torch.no_grad()
    def gather(self, tensors: Sequence[Tensor | None], *, add: bool = False, without: Collection[int] = ()) -> None:
        """Copy the tensors into the buffers, or add them; None counts as zeros, and sparse tensors are possible.

        What belongs to the tensors with the numbers `without` stays as it is.

        >>> flat = FlatBuffers([torch.ones(2), torch.ones(1)])
        >>> flat.gather([torch.tensor([3.0, 4.0]), None]); flat.buffers
        [tensor([3., 4., 0.])]
        """
        pairs = list(zip(self.views, tensors, strict=True))
        if without:
            pairs = [pair for index, pair in enumerate(pairs) if index not in without]
        dense = [(view, tensor) for view, tensor in pairs if _is_dense(tensor)]
        if dense:
            views, sources = zip(*dense, strict=True)
            (torch._foreach_add_ if add else torch._foreach_copy_)(list(views), [source.detach() for source in sources])
        for view, tensor in pairs:
            if not _is_dense(tensor):
                if not add:
                    view.zero_()
                if tensor is not None:
                    view.add_(tensor.detach())

    @torch.no_grad()
    def scatter(self, tensors: Sequence[Tensor]) -> None:
        """Copy the buffers into the tensors.

        >>> tensors = [torch.zeros(2), torch.zeros(1)]
        >>> flat = FlatBuffers(tensors); flat.gather([torch.ones(2), torch.ones(1)]); flat.scatter(tensors); tensors
        [tensor([1., 1.]), tensor([1.])]
        """
        if self.views:
            torch._foreach_copy_([tensor.detach() for tensor in tensors], self.views)

    def clones(self) -> list[Tensor]:
        """Return copies of the buffers, for a checkpoint."""
        return [buffer.clone() for buffer in self.buffers]

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Copy saved buffers back.

        >>> FlatBuffers([torch.zeros(2)]).restore([torch.zeros(3)])
        Traceback (most recent call last):
        torchmpi.errors.CheckpointError: The saved state has [3] elements, the network [2]. Resume with the same \
network.
        """
        lengths, expected = ([buffer.numel() for buffer in buffers] for buffers in (saved, self.buffers))
        if lengths != expected:
            raise CheckpointError(
                f"The saved state has {lengths} elements, the network {expected}. Resume with the same network."
            )
        for buffer, values in zip(self.buffers, saved, strict=True):
            buffer.copy_(values)


def _is_dense(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.layout is torch.strided


def cache_blocks(*lists: Sequence[Tensor], block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[list[Tensor], ...]]:
    """Iterate over lists of tensors in blocks that stay in the cache, so that several operations read memory once.

    The lists have the same shapes in the same order. Large contiguous tensors are split.

    >>> a, b = [torch.zeros(5), torch.zeros(1)], [torch.ones(5), torch.ones(1)]
    >>> [(len(first), len(second)) for first, second in cache_blocks(a, b, block_bytes=8)]
    [(1, 1), (1, 1), (2, 2)]
    """
    block: list[tuple[Tensor, ...]] = []
    num_bytes = 0
    for tensors in zip(*lists, strict=True):
        for parts in _split(tensors, block_bytes):
            block.append(parts)
            num_bytes += parts[0].nbytes
            if num_bytes >= block_bytes:
                yield tuple(map(list, zip(*block, strict=True)))
                block, num_bytes = [], 0
    if block:
        yield tuple(map(list, zip(*block, strict=True)))


def _split(tensors: tuple[Tensor, ...], block_bytes: int) -> Iterable[tuple[Tensor, ...]]:
    if tensors[0].nbytes <= block_bytes or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    numel = max(1, block_bytes // tensors[0].element_size())
    return zip(*(torch.split(tensor.view(-1), numel) for tensor in tensors), strict=True)
