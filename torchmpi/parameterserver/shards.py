"""Shards in memory: their layout, and the actors that apply rules to them and read them.

A server's tensor is split into one shard per rank, and each shard into chunks. A chunk is the unit of locking. The
protocol is described in docs/design/parameterserver.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ..shared_memory import kernels
from ..shared_memory.kernels import shard_layout as fields
from ..shared_memory.segments import Segment, Ticket
from .rules import PreparedRule

MESSAGE_BYTES = 1 << 20
"""Upper limit of the data of one message to another host."""
CLIENT, SERVER = range(2)
"""The two actors of a rank."""
_ACTORS_PER_RANK = 2
_PAGE_BYTES = 4096
_SPINS, _CROWDED_SPINS, _YIELDS = 2000, 50, 200


# ---- layout: pure arithmetic


class Layout(NamedTuple):
    """Byte offsets of the shards of the ranks that share memory."""

    num_bytes: int
    headers: tuple[int, ...]
    """For each shard: the headers of its chunks."""
    arrays: tuple[tuple[int, ...], ...]
    """For each shard: its values and its states."""


def chunk_numel(item_bytes: int, state_bytes: int) -> int:
    """Return the number of elements of a chunk: CHUNK_BYTES in the array with the largest elements.

    >>> chunk_numel(4, 4), chunk_numel(2, 4), chunk_numel(8, 8)
    (16384, 16384, 8192)
    """
    return fields.CHUNK_BYTES // max(item_bytes, state_bytes)


def layout(numels: tuple[int, ...], item_bytes: int, state_bytes: int) -> Layout:
    """Lay out shards with these numbers of elements. Each array begins on a page, so unused arrays take no memory.

    >>> layout((10, 0), 4, 4)
    Layout(num_bytes=16384, headers=(0, 16384), arrays=((4096, 8192, 12288), (16384, 16384, 16384)))
    """
    position, headers, arrays = 0, [], []
    chunk = chunk_numel(item_bytes, state_bytes)
    for numel in numels:
        headers.append(position)
        position += _whole_pages(-(-numel // chunk) * fields.HEADER_BYTES)
        own = []
        for array in range(fields.NUM_ARRAYS):
            own.append(position)
            position += _whole_pages(numel * (state_bytes if array else item_bytes))
        arrays.append(tuple(own))
    return Layout(max(position, _PAGE_BYTES), tuple(headers), tuple(arrays))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def message_ranges(numel: int, chunk: int, item_bytes: int, max_bytes: int = MESSAGE_BYTES) -> list[tuple[int, int]]:
    """Return begin and end of the ranges in which a shard is sent: whole chunks, except at the end of the shard.

    >>> message_ranges(10, 4, 1, 8), message_ranges(0, 4, 1, 8)
    ([(0, 8), (8, 10)], [])
    """
    step = max(1, max_bytes // (chunk * item_bytes)) * chunk
    return [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]


# ---- memory


def private_segment(num_bytes: int) -> Segment:
    """Return zeroed memory of this process alone, for a rank that shares memory with no other."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return Segment(memory, None, None, Ticket("", 0, 0, num_bytes))


class Shards:
    """The shards of one server that this process reaches through memory."""

    def __init__(
        self, segment: Segment, layout: Layout, parts: list[tuple[int, int]], *, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        """Map the shards. `parts`: first element and length of each; `dtypes`: of the values and of the states."""
        self.segment, address = segment, segment.address
        self.dtype, self.state_dtype = dtypes
        self.chunk_numel = chunk_numel(self.dtype.itemsize, self.state_dtype.itemsize)
        self.parts = parts
        self.table = np.zeros((len(parts), fields.SHARD_FIELDS), np.int64)
        for entry, (begin, numel), headers, arrays in zip(
            self.table, parts, layout.headers, layout.arrays, strict=True
        ):
            entry[fields.SHARD_HEADERS] = address + headers
            entry[fields.SHARD_ARRAYS : fields.SHARD_BEGIN] = [address + array for array in arrays]
            entry[fields.SHARD_BEGIN], entry[fields.SHARD_NUMEL] = begin, numel

    def array(self, index: int, which: int = 0) -> torch.Tensor:
        """Return the values (`which` = 0) or a state of one shard, without a lock and without keeping it alive."""
        entry, (_, numel) = self.table[index], self.parts[index]
        return _tensor_at(int(entry[fields.SHARD_ARRAYS + which]), numel, self.state_dtype if which else self.dtype)

    def headers(self, index: int) -> torch.Tensor:
        """Return the headers of the chunks of one shard, a row for each: LOCK, VERSION, STEPS, and padding."""
        num_chunks = -(-self.parts[index][1] // self.chunk_numel)
        flat = _tensor_at(int(self.table[index, fields.SHARD_HEADERS]), num_chunks * 8, torch.int64)
        return flat.view(num_chunks, 8)

    def close(self) -> None:
        """Unmap the shards."""
        self.segment.close()


def _tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


# ---- actors


class ActorTable:
    """A block of shared memory for each actor of the ranks that share memory.

    An actor can hold the lock of a chunk: the client of a rank, and its server thread. Its block contains the identity
    of its process, its redo record and its scratch memory.
    """

    def __init__(self, segment: Segment, index: int) -> None:
        """Create the table; `index`: of this rank among those that share `segment`."""
        self.segment, self.index = segment, index

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return the size of the table for `num_ranks` ranks."""
        return num_ranks * _ACTORS_PER_RANK * fields.BLOCK_BYTES

    def register(self, kind: int) -> int:
        """Write the identity of this process into the block of its client or server; return the actor's number."""
        actor = self.index * _ACTORS_PER_RANK + kind + 1
        block = self._block(actor)
        block[fields.PROCESS], block[fields.STARTED] = os.getpid(), process_start(os.getpid())
        return actor

    def rank_of(self, actor: int) -> int:
        """Return the index of an actor's rank among those that share memory."""
        return (actor - 1) // _ACTORS_PER_RANK

    def is_dead(self, actor: int) -> bool:
        """Return whether an actor's process has ended; False if this process is out of file descriptors."""
        block = self._block(actor)
        process, started = block[fields.PROCESS], block[fields.STARTED]
        try:
            return process != 0 and process_start(process) != started
        except OSError:
            return False

    def _block(self, actor: int) -> memoryview[int]:
        begin = (actor - 1) * fields.BLOCK_BYTES
        return memoryview(self.segment.memory)[begin : begin + 64].cast("B").cast("q")


def process_start(process: int) -> int:
    """Return the start time of a process in clock ticks; 0 if it has ended, even if it has not been reaped.

    >>> process_start(os.getpid()) > 0, process_start(1 << 30)
    (True, 0)
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name, in parentheses, may contain anything.
            stat = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if stat[0] in (b"Z", b"X") else int(stat[19])


class Actor:
    """Applies rules to shards and reads them, one call at a time."""

    def __init__(self, table: ActorTable, kind: int, *, is_crowded: bool = False) -> None:
        self.table, self.number = table, table.register(kind)
        self._kernels = kernels.load(which="sharding")
        self._pass_over = self._kernels["pass_over"]
        self._plan = np.zeros(fields.PLAN_FIELDS, np.int64)
        self._coefficients = np.zeros(fields.NUM_COEFFICIENTS, np.float64)
        self._address = int(self._plan.ctypes.data)
        plan = self._plan
        plan[fields.ARENA], plan[fields.ACTOR] = table.segment.address, self.number
        plan[fields.COEFFICIENTS] = self._coefficients.ctypes.data
        plan[fields.SPINS], plan[fields.YIELDS] = _CROWDED_SPINS if is_crowded else _SPINS, _YIELDS
        self.on_wait: Callable[[int], None] = lambda holder: None
        """Called every tenth of a second of a wait for a lock, with the number of its holder."""

    @property
    def versions(self) -> int:
        """Sum of the VERSIONs that the last call found in its chunks."""
        return int(self._plan[fields.VERSIONS])

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the last call."""
        return int(self._plan[fields.POSITION])

    def apply(self, shards: Shards, data: int, span: tuple[int, int], rule: PreparedRule) -> None:
        """Apply a rule to the elements of `span` that are in `shards`, with the sent values at address `data`."""
        self._prepare(shards, data, span, rule)
        if rule.function is None:
            self._run()
        else:
            self._run_in_python(shards, data, span, rule)

    def read(self, shards: Shards, data: int, span: tuple[int, int]) -> None:
        """Copy the elements of `span` that are in `shards` to memory at address `data`."""
        self._prepare(shards, data, span, None)
        self._run()

    def _prepare(self, shards: Shards, data: int, span: tuple[int, int], rule: PreparedRule | None) -> None:
        plan, num_shards = self._plan, len(shards.parts)
        if rule is not None and rule.coefficients:
            self._coefficients[: len(rule.coefficients)] = rule.coefficients
        plan[fields.SHARDS : fields.RULE + 1] = (
            shards.table.ctypes.data,
            num_shards,
            self.table.rank_of(self.number) % num_shards,
            shards.chunk_numel,
            shards.dtype.itemsize,
            shards.state_dtype.itemsize,
            0 if rule is None else rule.num_states,
            0 if rule is None else rule.address,
        )
        plan[fields.DATA : fields.VERSIONS + 1] = data, *span, 0, 0

    def _run(self) -> None:
        while self._pass_over(self._address) == fields.HELD:
            self._check_holder()

    def _check_holder(self) -> None:
        holder = int(self._plan[fields.HOLDER])
        if self.table.is_dead(holder):
            self._kernels["take_over"](self._address)
        else:
            self.on_wait(holder)

    def _run_in_python(self, shards: Shards, data: int, span: tuple[int, int], rule: PreparedRule) -> None:
        kernel = self._kernels
        try:
            while (status := kernel["take_chunk"](self._address)) != fields.DONE:
                if status == fields.HELD:
                    self._check_holder()
                else:
                    self._call_function(shards, data - span[0] * shards.dtype.itemsize, rule)
                    kernel["end_chunk"](self._address, 1)
        finally:  # an interrupt may come between any two steps above: release the chunk that is locked, if any
            kernel["end_chunk"](self._address, 0)

    def _call_function(self, shards: Shards, data: int, rule: PreparedRule) -> None:
        """Call a registered rule on the scratch memory; `data` is the address where element 0 would be."""
        plan, function = self._plan, rule.function
        assert function is not None
        begin, end = int(plan[fields.CHUNK_BEGIN]), int(plan[fields.CHUNK_END])
        sent = _tensor_at(data + begin * shards.dtype.itemsize, end - begin, shards.dtype)
        arrays = [
            _tensor_at(int(plan[fields.TARGETS + array]), end - begin, shards.state_dtype if array else shards.dtype)
            for array in range(1 + rule.num_states)
        ]
        with torch.no_grad():
            function(arrays[0], sent, *arrays[1:], *rule.coefficients)
