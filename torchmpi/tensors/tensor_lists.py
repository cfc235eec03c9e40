"""Many tensors as one stream of bytes, each where it lies: what a transport that can reach them need not pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import buffers, fusion

_LINE_BYTES = 64
_OFFSET, _ADDRESS, _LENGTH = range(3)


class Pieces:
    """Tensors of one dtype in the memory of the host, one after the other.

    The work is done in the memory of the tensors, or in copies of those that are not contiguous; `deliver` ends it.

    >>> a, b = torch.ones(3), torch.ones(2, 2).t()
    >>> pieces = Pieces([a, b])
    >>> pieces.numel(), pieces.num_bytes, pieces.table[:, 0].tolist()
    (7, 80, [0, 64])
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        work = [tensor if buffers.is_direct(tensor) else buffers.plain(tensor, to_host=False) for tensor in tensors]
        self.table, self.num_bytes = _table(work)
        if _have_common_memory(self.table):
            work = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in work]
            self.table, self.num_bytes = _table(work)
        self.work = work
        """What is to be combined, in place."""
        self.shapes = tuple(tensor.shape for tensor in tensors)
        self._numel = int(self.table[:, _LENGTH].sum()) // tensors[0].element_size()

    def numel(self) -> int:
        """Elements in all."""
        return self._numel

    def hold(self) -> None:
        """Keep the memory, whatever becomes of the tensors before the call that is under way has ended."""
        self._held = [tensor.detach() for tensor in self.work]

    def deliver(self) -> None:
        """Copy back what was worked on in copies, and tell autograd of the others."""
        pairs = list(zip(self._tensors, self.work, strict=True))
        for tensor, work in pairs:
            if work is not tensor:
                buffers.overwrite(tensor, work)
        buffers.touch_all([tensor for tensor, work in pairs if work is tensor])


def _table(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, int]:
    """Where each begins in the stream, on a line; its address; its length. And the length of the stream."""
    table = np.array([(0, tensor.data_ptr(), tensor.nbytes) for tensor in tensors], np.int64).reshape(-1, 3)
    table = table[table[:, _LENGTH] > 0]
    ends = np.cumsum(-(-table[:, _LENGTH] // _LINE_BYTES) * _LINE_BYTES)
    table[1:, _OFFSET] = ends[:-1]
    return table, int(table[-1, _OFFSET] + table[-1, _LENGTH]) if len(table) else 0


def _have_common_memory(table: np.ndarray) -> bool:
    """Whether any two overlap: what is combined in the one would be combined again in the other."""
    by_address = table[table[:, _ADDRESS].argsort()]
    ends = by_address[:, _ADDRESS] + by_address[:, _LENGTH]
    return bool((ends[:-1] > by_address[1:, _ADDRESS]).any())


def packed(operation: Callable[[torch.Tensor, None, int], Any]) -> Callable[[Pieces, None, int], Any]:
    """For an operation that wants a flat tensor."""

    def run(pieces: Pieces, _: None, root: int) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in pieces.work])
        operation(flat, None, root)
        fusion.unpack(flat, pieces.work)

    return run
