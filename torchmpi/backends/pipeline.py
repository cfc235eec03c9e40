"""Chunks of a tensor in a pipeline: the order of the work, and memory for two chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..tensors import bucket_plan, buffers


class ChunkBuffers:
    """Host memory for some consecutive chunks, reused by all chunks and all calls."""

    def __init__(self, dtype: torch.dtype, num_chunks: int = 2) -> None:
        self.dtype, self._scratch = dtype, [buffers.Scratch() for _ in range(num_chunks)]

    def take(self, k: int, numel: int) -> torch.Tensor:
        """Return a flat tensor for chunk `k`, valid until chunk `k + num_chunks`."""
        with torch.inference_mode(False):  # a view made in inference mode is read-only in other modes
            return self._scratch[k % len(self._scratch)].take(numel, self.dtype)


class ChunkedTensors:
    """Flat tensors as one vector, in chunks: those inside of a tensor are views of it, others are copied.

    >>> tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    >>> chunks = ChunkedTensors(tensors, 3, ChunkBuffers(torch.float32))
    >>> chunks.pack(0).neg_(), chunks.pack(1).neg_()
    (tensor([-1., -2., -3.]), tensor([-4., -5.]))
    >>> chunks.unpack(0); chunks.unpack(1); tensors
    [tensor([-1., -2.]), tensor([-3., -4., -5.])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], chunk_numel: int, memory: ChunkBuffers) -> None:
        self._memory = memory
        self._parts: list[list[torch.Tensor]] = []
        self._chunks: dict[int, torch.Tensor] = {}
        room = 0
        for tensor in tensors:
            begin, numel = 0, tensor.numel()
            while begin < numel:
                if room == 0:
                    self._parts.append([])
                    room = chunk_numel
                length = min(room, numel - begin)
                self._parts[-1].append(tensor[begin : begin + length])
                begin, room = begin + length, room - length

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, k: int) -> torch.Tensor:
        """Return a packed chunk."""
        return self._chunks[k]

    def pack(self, k: int) -> torch.Tensor:
        """Return chunk `k`, in memory that is valid until it is unpacked."""
        parts = self._parts[k]
        if len(parts) == 1:
            self._chunks[k] = parts[0]
        else:
            packed = self._memory.take(k, sum(part.numel() for part in parts))
            self._chunks[k] = torch.cat(parts, out=packed)
        return self._chunks[k]

    def unpack(self, k: int) -> None:
        """Copy the values of a packed chunk to the tensors."""
        chunk, parts = self._chunks.pop(k), self._parts[k]
        if len(parts) > 1:
            bucket_plan.unpack(chunk, parts)


class Waitable(Protocol):
    """An operation in the background."""

    def wait(self) -> Any:
        """Return when the operation has ended."""


def run_pipelined(
    num_chunks: int, before: Callable[[int], Any], start: Callable[[int], Waitable | None], after: Callable[[int], Any]
) -> None:
    """Run three stages per chunk, of which the middle one may run in the background.

    `start` begins the middle stage of a chunk; its result, if any, is awaited before `after`. At most two chunks are
    in progress.

    >>> def stage(name): return lambda k: print(name, k)
    >>> run_pipelined(3, stage("before"), stage("start"), stage("after"))
    before 0
    start 0
    before 1
    start 1
    after 0
    before 2
    start 2
    after 1
    after 2
    """
    started: Waitable | None = None
    for k in range(num_chunks + 1):
        earlier = started
        if k < num_chunks:
            before(k)
            started = start(k)
        if k > 0:
            if earlier is not None:
                earlier.wait()
            after(k - 1)
