"""Chunks of a tensor in a pipeline: the order of the work, and memory for two chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..tensors import buffers


class ChunkBuffers:
    """Host memory for the current chunk and the next one, reused by all chunks and all calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._scratch = dtype, (buffers.Scratch(), buffers.Scratch())

    def take(self, k: int, numel: int) -> torch.Tensor:
        """Return a flat tensor for chunk `k`, valid until chunk `k + 2`."""
        with torch.inference_mode(False):  # a view made in inference mode is read-only in other modes
            return self._scratch[k % 2].take(numel, self.dtype)


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
