"""Ranks that are threads of this process: the shared-memory backend and its compiled kernels, without MPI.

The memory of a group is laid out, and its calls are made, by the code that also does so in a job. What MPI tells the
ranks of a job, the rig tells its threads: size, hosts and processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from torchmpi.backends.shm import SharedMemoryBackend
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.call_queue import CallQueue
from torchmpi.communicators.group import slot_bytes
from torchmpi.communicators.plan import compared_shape
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.config import Config
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.segments import Segment
from torchmpi.shared_memory.shared_tensors import SharedHeap
from torchmpi.tensors import dtypes

LIMIT_SECONDS = 60.0
"""Longer than any call takes: only a rank that does not come lets the others wait for so long."""


class Rank:
    """One rank of a group, whose calls are made in a thread of its own."""

    def __init__(self, rank: int, size: int, segment: Segment, reads_directly: bool) -> None:
        self.rank, self.size = rank, size
        board = StatusBoard(segment, size)
        processes = dict.fromkeys(range(size), os.getpid()) if reads_directly else {}
        self.log = CallLog("threads", rank, size, board)
        context = SimpleNamespace(is_crowded=True, processes=processes, hosts=["here"] * size)
        self.group: Any = SimpleNamespace(
            rank=rank, size=size, world_ranks=tuple(range(size)), hosts=["here"], context=context, where=f"rank {rank}",
            status_board=board, log_board=board, call_log=self.log, call_queue=CallQueue("threads", threaded=False),
            is_strict=False, shared=None, binding=threading.Lock(),
        )  # fmt: skip
        self.backend = SharedMemoryBackend(Config(), SharedHeap(size))
        assert self.backend.why_not("barrier", "cpu", self.group) is None

    def poll_little(self) -> None:
        """Leave time to the other ranks: with two cores for all, one that polls, or yields often, takes it."""
        polling = self.group.call_queue.polling
        polling.numbers[:] = polling.polite

    def call(
        self, collective: str, tensor: Any = None, out: Any = None, *, root: int = 0, op: str | None = None
    ) -> Any:
        """Make a call, as `Group.perform` does with the plan of a collective."""
        dtype = None if tensor is None else tensor.dtype
        operation = self.backend.bind(self.group, collective, dtype, op)
        self.poll_little()
        code = call_code(collective, op, 0 if dtype is None else dtypes.info(dtype).code) | root << 32
        shape_of = compared_shape(collective)
        self.log.enter(code, tensor.shape if shape_of is None else shape_of(tensor))
        try:
            result = operation.run(tensor, out, root)
            self.log.leave()
        except BaseException:
            self.log.abandon()
            raise
        return result


class Ranks:
    """A group of ranks with slots of a page or, from 65 ranks on, of two: short tensors take the paths of long ones."""

    def __init__(self, size: int, *, reads_directly: bool = False) -> None:
        self.segment = Segment.create("ranks", memory_layout.segment_bytes(size, slot_bytes(size, 4096)))
        self.segment.withdraw()
        self.members = [Rank(rank, size, self.segment, reads_directly) for rank in range(size)]
        self._pool = ThreadPoolExecutor(size)

    def together(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Let each rank do the work in its thread; return the results, or the exceptions, in the order of the ranks."""
        futures = [self._pool.submit(work, member) for member in self.members]
        return [future.exception(LIMIT_SECONDS) or future.result() for future in futures]

    def call(self, collective: str, tensors: Sequence[torch.Tensor], **options: Any) -> list[Any]:
        """Let each rank make the call with its tensor."""
        return self.together(lambda member: member.call(collective, tensors[member.rank], **options))

    def close(self) -> None:
        """End the threads, and release the memory."""
        self._pool.shutdown()
        for member in self.members:
            member.group.status_board.fields.release()
        self.segment.close()
