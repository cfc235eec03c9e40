"""Staging: collectives on device tensors through backends that take host memory.

The tensor is processed in chunks, so that copies and collectives overlap: a chunk is copied to the host while the
backend processes the previous chunk, and the chunk before the previous one is copied to the device. Three buffers are
in use. All copies are queued on the current stream; the host waits for the copy of a chunk before it passes the chunk
to the backend. The result has the same bits as without chunks, since every backend combines each element in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..collective_specs import CollectiveSpec
from ..communicators import call_parts
from ..communicators.group import Group
from ..communicators.plan import Run
from ..tensors import buffers, partition, streams

_NUM_BUFFERS = 3  # one receives a copy from the device, the backend uses one, one is copied to the device


class StagingBuffer:
    """A buffer of host memory for copies to and from a device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._last = streams.NOTHING
        """The end of the last copy from or to the buffer."""

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over the memory."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def follow(self, device: torch.device) -> None:
        """Make the current stream wait for the last copy, which may have been queued on another stream."""
        streams.follow(self._last, device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from or to the device."""
        target.copy_(source, non_blocking=True)
        self._last = streams.end_of(source, target)

    def wait(self) -> None:
        """Wait until the host may read and write the memory."""
        streams.wait(self._last)


class StagingPool:
    """Buffers of one size, shared by all calls; allocated on demand."""

    def __init__(self, chunk_bytes: int, allocate: Callable[[int], torch.Tensor], *, pinned: bool) -> None:
        self.chunk_bytes = chunk_bytes
        self._allocate, self._pinned = allocate, pinned
        self._changing = threading.Lock()
        self._free: list[StagingBuffer] = []
        self._registered: list[torch.Tensor] = []
        self.num_made = 0

    @contextmanager
    def lend(self, number: int) -> Iterator[list[StagingBuffer]]:
        """Provide `number` buffers for the duration of a with block."""
        with self._changing:
            taken = [self._free.pop() if self._free else self._make() for _ in range(number)]
        try:
            yield taken
        finally:
            with self._changing:
                self._free.extend(reversed(taken))

    def _make(self) -> StagingBuffer:
        self.num_made += 1
        with torch.inference_mode(False):  # otherwise only calls in inference mode could write to the memory
            memory = self._allocate(self.chunk_bytes)
            if self._pinned and not streams.pin(memory):
                memory = torch.empty(self.chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            elif self._pinned:
                self._registered.append(memory)
        return StagingBuffer(memory)

    def close(self) -> None:
        """Free the memory when the device has finished with it. No call may be running."""
        for buffer in self._free:
            buffer.wait()
        for memory in self._registered:
            streams.unpin(memory)
        self._free.clear()
        self._registered.clear()


class StagedOperation:
    """A collective on device tensors, in place or into `out`, by an operation that takes host memory."""

    def __init__(self, spec: CollectiveSpec, work: Run, group: Group, pool: StagingPool) -> None:
        self._spec, self._work, self._group, self._pool = spec, work, group, pool

    def run(self, tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        """Run the collective."""
        is_root = self._group.rank == root
        receives = self._spec.receives(is_root)
        reads = self._spec.flow != "root to all" or is_root
        writes = receives and (out is not None or self._spec.writes(is_root))
        source = buffers.plain(tensor, to_host=False)
        wanted = tensor if out is None else out
        target = source
        if out is not None and writes:
            # In memory that overlaps the source, the result of a chunk would overwrite a chunk not yet read.
            is_usable = buffers.is_direct(out) and not buffers.overlap(out, source)
            target = out.detach() if is_usable else torch.empty_like(source)
        with torch.inference_mode(target.is_inference()):
            self._pump(source.view(-1) if reads else None, target.view(-1) if writes else None, source, root)
        if not receives:
            return tensor
        if writes and (target.data_ptr() != wanted.data_ptr() or not buffers.is_direct(wanted)):
            buffers.overwrite(wanted, target)
        else:
            buffers.touch(wanted)
        return wanted

    def _pump(self, source: torch.Tensor | None, target: torch.Tensor | None, like: torch.Tensor, root: int) -> None:
        """Copy each chunk to the host, run the operation, and copy it to the device."""
        call_log, dtype = self._group.call_log, like.dtype
        chunk_numel = max(1, self._pool.chunk_bytes // dtype.itemsize)
        spans = partition.chunks(like.numel(), chunk_numel) or [(0, 0)]
        with self._pool.lend(min(_NUM_BUFFERS, len(spans))) as ring:
            for buffer in ring:
                buffer.follow(like.device)
            if source is not None:
                _copy_to_host(ring[0], source, spans[0])
            for k, (begin, numel) in enumerate(spans):
                if source is not None and k + 1 < len(spans):
                    _copy_to_host(ring[(k + 1) % len(ring)], source, spans[k + 1])
                buffer = ring[k % len(ring)]
                since = call_parts.begin()
                buffer.wait()
                call_parts.end("staging", since)
                if k > 0:  # for the backend and the other ranks, each chunk is a separate call
                    call_log.enter_next_chunk()
                chunk = buffer.view(numel, dtype)
                self._work(chunk, None, root)
                if target is not None:
                    buffer.copy(target[begin : begin + numel], chunk)


def _copy_to_host(buffer: StagingBuffer, source: torch.Tensor, span: tuple[int, int]) -> None:
    begin, numel = span
    buffer.copy(buffer.view(numel, source.dtype), source[begin : begin + numel])
