"""Tensors of a device through transports that take host memory: in pieces, so that copies and collectives overlap.

A piece is copied down while the transport is at work on the one before, and the copy up of the one before that runs at
the same time: three buffers are in use. All copies are queued on the current stream; the host waits for those that
bring down what it is about to send. Pieces of a reduction have the bits of the whole, since every transport combines
each element in the order of the ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..backends.base import Operation
from ..tensors import buffers, partition, streams

_NUM_BUFFERS = 3  # one on its way down, one in the transport, one on its way up


class Buffer:
    """Memory of the host that copies to and from a device go through."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._last = streams.NOTHING
        """Behind the last copy that was queued on it."""

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over the memory."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def follow(self, device: torch.device) -> None:
        """The current stream comes after the last copy, which may have been queued on another one."""
        streams.follow(self._last, device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy, from the device or to it."""
        target.copy_(source, non_blocking=True)
        self._last = streams.end_of(source, target)

    def wait(self) -> None:
        """Return when the memory may be read and written by the host."""
        streams.wait(self._last)


class Pool:
    """Buffers of one size: as many as are in use at a time, for all calls together."""

    def __init__(self, piece_bytes: int, allocate: Callable[[int], torch.Tensor], *, pinned: bool) -> None:
        self.piece_bytes = piece_bytes
        self._allocate, self._pinned = allocate, pinned
        self._changing = threading.Lock()
        self._free: list[Buffer] = []
        self._registered: list[torch.Tensor] = []
        self.num_made = 0

    @contextmanager
    def lend(self, number: int) -> Iterator[list[Buffer]]:
        """Some buffers, for a block."""
        with self._changing:
            taken = [self._free.pop() if self._free else self._make() for _ in range(number)]
        try:
            yield taken
        finally:
            with self._changing:
                self._free.extend(reversed(taken))

    def _make(self) -> Buffer:
        self.num_made += 1
        with torch.inference_mode(False):  # or no call outside of inference mode could write to it
            memory = self._allocate(self.piece_bytes)
            if self._pinned and not streams.pin(memory):
                memory = torch.empty(self.piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            elif self._pinned:
                self._registered.append(memory)
        return Buffer(memory)

    def close(self) -> None:
        """Give the memory back, once the device has finished with it. No call may be under way."""
        for buffer in self._free:
            buffer.wait()
        for memory in self._registered:
            streams.unpin(memory)
        self._free.clear()
        self._registered.clear()


class Staged:
    """A verb in place, or into `out`, by an operation that takes memory of the host."""

    def __init__(self, collective: str, operation: Operation, group: Any, pool: Pool) -> None:
        self._collective, self._operation, self._group, self._pool = collective, operation, group, pool

    def __call__(self, tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        is_root = self._group.rank == root
        reads = self._collective != "broadcast" or is_root
        writes = {"allreduce": True, "reduce": is_root, "broadcast": out is not None or not is_root}[self._collective]
        source = buffers.plain(tensor, to_host=False)
        wanted = tensor if out is None else out
        target = source
        if out is not None and writes:
            target = out.detach() if buffers.is_direct(out) else torch.empty_like(source)
        with torch.inference_mode(target.is_inference()):
            self._pump(source.view(-1) if reads else None, target.view(-1) if writes else None, source, root)
        if self._collective == "reduce" and not is_root:
            return tensor
        if writes and (target.data_ptr() != wanted.data_ptr() or not buffers.is_direct(wanted)):
            buffers.overwrite(wanted, target)
        else:
            buffers.touch(wanted)
        return wanted

    def _pump(self, source: torch.Tensor | None, target: torch.Tensor | None, like: torch.Tensor, root: int) -> None:
        """Each piece down, through the transport, and up again."""
        call_log, dtype = self._group.call_log, like.dtype
        piece_numel = max(1, self._pool.piece_bytes // dtype.itemsize)
        spans = partition.chunks(like.numel(), piece_numel) or [(0, 0)]
        with self._pool.lend(min(_NUM_BUFFERS, len(spans))) as ring:
            for buffer in ring:
                buffer.follow(like.device)
            if source is not None:
                _down(ring[0], source, spans[0])
            for k, (begin, numel) in enumerate(spans):
                if source is not None and k + 1 < len(spans):
                    _down(ring[(k + 1) % len(ring)], source, spans[k + 1])
                buffer = ring[k % len(ring)]
                buffer.wait()
                if k > 0:  # to the transport and to the other ranks each piece is a call
                    _, code, shape = call_log.current
                    call_log.leave()
                    call_log.enter(code, shape)
                piece = buffer.view(numel, dtype)
                self._operation(piece, None, root)
                if target is not None:
                    buffer.copy(target[begin : begin + numel], piece)


def _down(buffer: Buffer, source: torch.Tensor, span: tuple[int, int]) -> None:
    begin, numel = span
    buffer.copy(buffer.view(numel, source.dtype), source[begin : begin + numel])
