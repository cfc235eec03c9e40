"""Shards in memory: their layout, and the actors that apply rules to them and read them.

A server's tensor is split into one shard per rank, and each shard into chunks. A chunk is the unit of locking. The
protocol is described in docs/design/parameterserver.md.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import traceback
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..communicators.levels import CallsForbidden
from ..errors import TorchMPIError, TransportError
from ..shared_memory import kernels
from ..shared_memory.process_vm import has_ended
from ..shared_memory.segments import Segment, Ticket
from .kernels import SHARDING
from .kernels import shard_layout as fields
from .rules import PreparedRule, RuleContext
from .server_rows import Rows

MESSAGE_BYTES = 1 << 20
"""Upper limit of the data of one message to another host."""
CLIENT, SERVER = range(2)
"""The two actors of a rank."""
ACTORS = 2
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
    num_images: int = 0
    """Number of copies of chunks, one for each actor,"""
    images: int = 0
    """where their headers are,"""
    image_arrays: int = 0
    """and their arrays."""


def chunk_numel(item_bytes: int, state_bytes: int) -> int:
    """Return the number of elements of a chunk: CHUNK_BYTES in the array with the largest elements.

    >>> chunk_numel(4, 4), chunk_numel(2, 4), chunk_numel(8, 8)
    (16384, 16384, 8192)
    """
    return fields.CHUNK_BYTES // max(item_bytes, state_bytes)


def layout(numels: tuple[int, ...], item_bytes: int, state_bytes: int, num_images: int = 0) -> Layout:
    """Lay out shards with these numbers of elements. Each array begins on a page, so unused arrays take no memory.

    >>> layout((10, 0), 4, 4)[:3]
    (16384, (0, 16384), ((4096, 8192, 12288), (16384, 16384, 16384)))
    """
    position, headers, arrays = 0, [], []
    chunk = chunk_numel(item_bytes, state_bytes)
    for numel in numels:
        headers.append(position)
        position += _whole_pages(-(-numel // chunk) * fields.Header.BYTES)
        own = []
        for which in range(fields.NUM_ARRAYS):
            own.append(position)
            position += _whole_pages(numel * (state_bytes if which else item_bytes))
        arrays.append(tuple(own))
    image_arrays = position + _whole_pages(num_images * fields.Image.BYTES)
    end = image_arrays + num_images * fields.NUM_ARRAYS * fields.CHUNK_BYTES
    return Layout(max(end, _PAGE_BYTES), tuple(headers), tuple(arrays), num_images, position, image_arrays)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def message_ranges(numel: int, chunk: int, item_bytes: int, max_bytes: int = MESSAGE_BYTES) -> list[tuple[int, int]]:
    """Return begin and end of the ranges in which a shard is sent: whole chunks, except at the end of the shard.

    >>> message_ranges(10, 4, 1, 8), message_ranges(0, 4, 1, 8)
    ([(0, 8), (8, 10)], [])
    """
    step = max(1, max_bytes // (chunk * item_bytes)) * chunk
    return [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]


def first_chunks(parts: Sequence[tuple[int, int]], chunk: int) -> list[int]:
    """Return the number of the first chunk of each shard, and last the number of all chunks.

    >>> first_chunks([(0, 9), (9, 0), (9, 4)], 4)
    [0, 3, 3, 4]
    """
    return [0, *accumulate(-(-numel // chunk) for _, numel in parts)]


def joined_parts(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return begin and end of the ranges of elements that shards cover together.

    >>> joined_parts([(0, 4), (4, 2), (9, 3), (12, 0)])
    [(0, 6), (9, 12)]
    """
    joined: list[tuple[int, int]] = []
    for begin, numel in parts:
        first = joined.pop()[0] if joined and joined[-1][1] == begin else begin
        joined.append((first, begin + numel))
    return joined


class Versions:
    """What a client knows of the chunks of a server.

    Attributes:
        first: Number of the first of these chunks.
        base: For each chunk, the rules of others that the values of the client contain; nan before it has fetched some.
        own: For each chunk, the rules that the client has applied.
    """

    def __init__(self, num_chunks: int, first: int = 0) -> None:
        self.first = first
        self.base: NDArray[np.float64] = np.full(num_chunks, np.nan)
        self.own: NDArray[np.float64] = np.zeros(num_chunks)
        self.addresses = self._find_addresses()
        """What a kernel gets: where the numbers of chunk 0 would be. Found once: it takes a microsecond."""

    def fit(self, base: object) -> bool:
        """Return whether `base` can be passed to `since()`: kernels read it without checks."""
        mine = self.base
        return isinstance(base, np.ndarray) and (base.shape, base.dtype, base.strides) == (
            mine.shape,
            mine.dtype,
            mine.strides,
        )

    def since(self, base: NDArray[np.float64]) -> Versions:
        """Return the same for values of another time; the sends of the client are counted in both."""
        other = copy(self)
        other.base = base
        other.addresses = other._find_addresses()
        return other

    def _find_addresses(self) -> tuple[int, int]:
        shift = 8 * self.first
        return self.base.ctypes.data - shift, self.own.ctypes.data - shift

    def fetched(self, chunk: int) -> float:
        """Return the version that a chunk has if only the client has sent since; nan if it is unknown."""
        return float(self.base[chunk - self.first] + self.own[chunk - self.first])


# ---- memory


def private_segment(num_bytes: int) -> Segment:
    """Allocate zeroed private memory, for a rank that shares memory with no other rank."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return Segment(memory, None, None, Ticket("", 0, 0, num_bytes))


class Shards:
    """The shards of one server that this process accesses through memory."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        parts: list[tuple[int, int]],
        *,
        dtypes: tuple[torch.dtype, torch.dtype],
        all_parts: Sequence[tuple[int, int]] = (),
        chunk: int = 0,
    ) -> None:
        """Map the shards.

        Args:
            segment: Their memory.
            layout: Where they are in it.
            parts: First element and length of each.
            dtypes: Of the values and of the states.
            all_parts: The parts of all shards of the server, by which chunks are numbered. Default: these.
            chunk: Number of elements of a chunk. Default: that of the dtypes.
        """
        self.segment, address = segment, segment.address
        self.dtype, self.state_dtype = dtypes
        self.chunk_numel = chunk or chunk_numel(self.dtype.itemsize, self.state_dtype.itemsize)
        self.parts, self.all_parts = parts, list(all_parts or parts)
        self.images = address + layout.images, layout.num_images, address + layout.image_arrays
        """What a pass is told of the copies of chunks."""
        self.table = np.zeros((len(parts), fields.Shard.FIELDS), np.int64)
        for entry, (begin, numel), headers, arrays in zip(
            self.table, parts, layout.headers, layout.arrays, strict=True
        ):
            entry[fields.Shard.headers] = address + headers
            entry[fields.Shard.arrays : fields.Shard.begin] = [address + place for place in arrays]
            entry[fields.Shard.begin], entry[fields.Shard.numel] = begin, numel
        self.first_chunks = first_chunks(self.all_parts, self.chunk_numel)
        """Number of the first chunk of each shard of the server; last, the number of all chunks."""
        numbers = dict(zip(self.all_parts, self.first_chunks, strict=False))
        self.table[:, fields.Shard.first_chunk] = [numbers[part] for part in parts]

    def array(self, index: int, which: int = 0) -> torch.Tensor:
        """Return the values (`which` = 0) or a state of one shard, without a lock and without keeping it alive."""
        entry, (_, numel) = self.table[index], self.parts[index]
        return _tensor_at(int(entry[fields.Shard.arrays + which]), numel, self.state_dtype if which else self.dtype)

    def headers(self, index: int) -> torch.Tensor:
        """Return the headers of the chunks of one shard, a row for each: LOCK, VERSION, STEPS, and padding."""
        num_chunks = -(-self.parts[index][1] // self.chunk_numel)
        flat = _tensor_at(int(self.table[index, fields.Shard.headers]), num_chunks * 8, torch.int64)
        return flat.view(num_chunks, 8)

    def close(self) -> None:
        self.segment.close()


def _tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


# ---- actors


class RuleFailure(TorchMPIError):
    """A registered rule has raised an exception, which is the cause of this one."""


def applied_part(ranges: Iterable[tuple[int, int]], parts: Iterable[tuple[int, int]], chunk: int) -> str:
    """Describe to which chunks a rule has been applied that has failed. `parts`: first element and length of shards.

    >>> applied_part([(0, 8), (8, 8), (20, 24)], [(0, 20), (20, 10)], 4)
    'The rule has been applied to 3 of 8 chunks (elements 0 to 7 and 20 to 23), and the others are unchanged.'
    >>> applied_part([], [(0, 20)], 4)
    'The rule has been applied to none of 5 chunks: the values are unchanged.'
    """
    joined: list[tuple[int, int]] = []
    num_applied, num_chunks = 0, sum(-(-numel // chunk) for _, numel in parts)
    for begin, end in sorted(span for span in ranges if span[0] < span[1]):
        num_applied += -(-(end - begin) // chunk)
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    if not joined:
        return f"The rule has been applied to none of {num_chunks} chunks: the values are unchanged."
    elements = " and ".join(f"{begin} to {end - 1}" for begin, end in joined)
    return (
        f"The rule has been applied to {num_applied} of {num_chunks} chunks (elements {elements}), and the others are "
        "unchanged."
    )


class Sender(NamedTuple):
    """Who sends: its rank in the communicator of the server, and how many ranks send."""

    rank: int
    num_clients: int


NOBODY = Sender(-1, 0)
"""Of sends without a communicator."""


class _Call(NamedTuple):
    """What a registered rule is applied to: `data` is the address of element `first` of the data."""

    shards: Shards
    data: int
    first: int
    rule: PreparedRule
    versions: Versions | None
    sender: Sender


class Actor:
    """Applies rules to shards and reads them, one call at a time.

    Each rank has two: its client, and its server thread.

    Args:
        kind: CLIENT or SERVER.
        index: Index of this rank among those that share memory. Clients begin with different shards.
        ranks: Rank of each process that shares memory with this one, for messages.
        is_crowded: Whether ranks share cores; a wait for a lock then polls briefly before it sleeps.
    """

    def __init__(
        self, kind: int, index: int = 0, *, ranks: Mapping[int, int] | None = None, is_crowded: bool = False
    ) -> None:
        loaded = kernels.load(which=SHARDING)
        self._pass_over, self._pass_over_rows = loaded["pass_over"], loaded["pass_over_rows"]
        self._end_chunk, self._count_step = loaded["end_chunk"], loaded["count_step"]
        self._take_over = loaded["take_over"]
        self._plan = np.zeros(fields.Pass.FIELDS, np.int64)
        self._coefficients = np.zeros(fields.NUM_NUMBERS, np.float64)
        self._scratch = np.empty(fields.NUM_ARRAYS * fields.CHUNK_BYTES, np.uint8)
        self._ranks = ranks or {}
        self._rows: Rows | None = None
        self._index, self.address = index, int(self._plan.ctypes.data)
        self._image = ACTORS * index + kind
        spins = _CROWDED_SPINS if is_crowded else _SPINS
        addresses = self._scratch.ctypes.data, self._coefficients.ctypes.data
        self._plan[fields.Pass.actor : fields.Pass.yields + 1] = 2 * os.getpid() + kind, *addresses, spins, _YIELDS
        self.on_wait: Callable[[int], object] = lambda rank: None
        """Called every tenth of a second of a wait for a lock, with the rank of its holder."""
        self.on_taken_over: Callable[[int, tuple[int, int], bool], object] | None = None
        """Called when a chunk is taken over from a process that has ended, with its rank, the range of elements, and
        whether a half applied rule could be undone; None if such chunks are refused, as the job ends."""

    @property
    def versions(self) -> int:
        """Sum of the VERSIONs that the last call found in its chunks."""
        return int(self._plan[fields.Pass.versions])

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the last call."""
        return int(self._plan[fields.Pass.position])

    @property
    def ages(self) -> float:
        """Sum of the staleness of the last call in its chunks; nan if the versions of its values are unknown."""
        return float(self._coefficients[fields.AGES])

    def applied(self, shards: Shards) -> list[tuple[int, int]]:
        """Return the ranges of elements that the last call has processed, which is all unless it has failed."""
        ranges, left = [], self.num_chunks
        for shift in range(len(shards.parts)):
            begin, numel = shards.parts[(self._index + shift) % len(shards.parts)]
            chunks = min(left, -(-numel // shards.chunk_numel))
            ranges.append((begin, begin + min(chunks * shards.chunk_numel, numel)))
            left -= chunks
        return ranges

    def visit(
        self,
        shards: Shards,
        data: int,
        span: tuple[int, int],
        rule: PreparedRule | None,
        *,
        versions: Versions | None = None,
        sender: Sender = NOBODY,
        rows: Rows | None = None,
    ) -> None:
        """Apply a rule to the elements of `span` that are in `shards`, or copy them, without a rule.

        Args:
            shards: The shards.
            data: Address of the sent values, or of those to receive.
            span: Their range of elements; with `rows` the range of elements of these rows.
            rule: The rule; None to read.
            versions: What the client knows of the chunks: its own sends are counted, or the versions read are noted.
            sender: Who has sent the values.
            rows: The rows to which the rule is applied, or that are read; these shards have all elements of `span`.

        Raises:
            RuleFailure: A registered rule has raised; it has been applied to the first `num_chunks` chunks.
            TransportError: A process was killed while it changed one of the chunks, which cannot be taken over.
        """
        self._prepare(shards, data, span, rule, versions=versions, rows=rows)
        if rule is None or rule.function is None:
            self._run()
            return
        # An interrupt may come before any instruction, and not all of them are in the try block that they are written
        # in: neither the jump back to the condition of a loop (Python 3.12) nor the beginning of the finally block.
        # Hence a loop in a function of its own, and a second block for an interrupt at the end of the first one.
        try:
            self._apply_function(_Call(shards, data, span[0], rule, versions, sender))
        finally:
            self._end_chunk(self.address, 0)

    def _apply_function(self, call: _Call) -> None:
        """Apply a registered rule to all chunks, and release the chunk that is still locked after an exception."""
        try:
            self._visit_chunks(call)
        finally:
            self._end_chunk(self.address, 0)

    def _visit_chunks(self, call: _Call) -> None:
        while self._run() == fields.TAKEN:
            self._call_function(call)
            self._end_chunk(self.address, 1)

    def prepared(
        self, shards: Shards, span: tuple[int, int], rule: PreparedRule | None, versions: Versions
    ) -> tuple[array[int], array[int]]:
        """Return what machine code stores in the plan, and in the numbers, for a call that is repeated."""
        self._prepare(shards, 0, span, rule, versions=versions)
        plan = array("q", self._plan[fields.Pass.shards : fields.Pass.rows].tobytes())
        return plan, array("q", self._coefficients.tobytes())

    def finish(self) -> None:
        """Continue a call that machine code has begun, and that waits for a lock."""
        self._rows = None
        self._run()

    def count_step(self, shards: Shards, span: tuple[int, int]) -> NDArray[np.int64]:
        """Count a step of a rule with states on rows of a server, in the shards that have elements of `span`.

        Return its number in each of the shards.
        """
        numbers = np.zeros(len(shards.parts), np.int64)
        self._prepare(shards, 0, span, None)
        self._plan[fields.Pass.row_steps] = numbers.ctypes.data
        self._count_step(self.address)
        return numbers

    def _prepare(
        self,
        shards: Shards,
        data: int,
        span: tuple[int, int],
        rule: PreparedRule | None,
        *,
        versions: Versions | None = None,
        rows: Rows | None = None,
    ) -> None:
        num_shards, plan, numbers = len(shards.parts), self._plan, self._coefficients
        num_states, halves, address = 0, 0, fields.READING
        if rule is not None:
            num_states, halves = rule.num_states, rule.halves
            address = rule.address if rule.function is None else fields.IN_PYTHON
            numbers[: len(rule.coefficients)] = rule.coefficients
            numbers[fields.OFFSET] = rule.offset
        numbers[fields.AGES] = 0.0 if versions is not None else math.nan
        if rows is not None:
            plan[fields.Pass.rows : fields.Pass.cursor_end + 1] = (*rows.cells, *span)
        elif self._rows is not None:
            plan[fields.Pass.row_numel] = 0
        self._rows = rows  # kept alive, with the memory of its numbers
        plan[fields.Pass.shards : fields.Pass.halves + 1] = (
            shards.table.ctypes.data,
            num_shards,
            shards.chunk_numel,
            shards.dtype.itemsize,
            shards.state_dtype.itemsize,
            *shards.images,
            self._image,
            num_states,
            address,
            data,
            *span,
            *(0, 0, 0, 0, 0, 0),  # position to header
            self._index % max(num_shards, 1),
            *((0, 0) if versions is None else versions.addresses),
            halves,
        )

    def _run(self) -> int:
        pass_over = self._pass_over if self._rows is None else self._pass_over_rows
        while (status := pass_over(self.address)) == fields.HELD:
            process = int(self._plan[fields.Pass.holder]) // 2
            rank = self._ranks.get(process, -1)
            if not has_ended(process):
                self.on_wait(rank)
            elif self.on_taken_over is not None:
                self._take_chunk_over(int(self._plan[fields.Pass.holder]))
            else:
                raise TransportError(
                    f"rank {rank} (process {process}) has ended while it changed a chunk of a parameter server. The "
                    "chunk can no longer be used. Look for the cause in the messages of that rank."
                )
        return status

    def _take_chunk_over(self, holder: int) -> None:
        """Unlock the chunk at hand, whose holder has ended, and undo what that has not completed."""
        status, plan = self._take_over(self.address, holder), self._plan
        if status != fields.HELD and self.on_taken_over is not None:
            span = int(plan[fields.Pass.chunk_begin]), int(plan[fields.Pass.chunk_end])
            self.on_taken_over(self._ranks.get(holder // 2, -1), span, status == fields.DONE)

    def repair(self, shards: Shards) -> None:
        """Take over all chunks that are locked, while no process that is left makes requests."""
        for index, (begin, numel) in enumerate(shards.parts):
            holders = shards.headers(index)[:, fields.Header.lock]
            for chunk in holders.nonzero().view(-1).tolist():
                first = begin + chunk * shards.chunk_numel
                self._prepare(shards, 0, (first, min(first + shards.chunk_numel, begin + numel)), None)
                self._take_chunk_over(int(holders[chunk]))

    def _call_function(self, call: _Call) -> None:
        """Call a registered rule on the scratch memory."""
        shards, rule, plan = call.shards, call.rule, self._plan
        assert rule.function is not None
        names = (fields.Pass.chunk_begin, fields.Pass.chunk_end)
        if self._rows is not None:
            names = (fields.Pass.cursor, fields.Pass.data_end)
        begin, end = (int(plan[name]) for name in names)
        address = call.data + (begin - call.first) * shards.dtype.itemsize
        sent = _tensor_at(address, end - begin, shards.dtype).clone()  # may be changed
        scratch = int(plan[fields.Pass.scratch])
        arrays = [
            _tensor_at(scratch + which * fields.CHUNK_BYTES, end - begin, shards.state_dtype if which else shards.dtype)
            for which in range(1 + rule.num_states)
        ]
        forbidden = CallsForbidden(
            f"rule {rule.name!r} of the parameter server has called torchmpi. A rule runs under the lock of a chunk, "
            "on any rank and in any thread, where a call that waits for other ranks would never end. Compute with the "
            "arguments only, and make the call before send() or after wait()."
        )
        try:
            with torch.no_grad():
                function = partial(rule.function, **self._context(call))
                forbidden.call(function, arrays[0], sent, *arrays[1:], *rule.coefficients)
        except (Exception, SystemExit) as error:  # a SystemExit would end a server thread
            raise RuleFailure("".join(traceback.format_exception_only(type(error), error)).strip()) from error

    def _context(self, call: _Call) -> dict[str, RuleContext]:
        """Return the keyword argument of a registered rule that takes a context."""
        if not call.rule.takes_context:
            return {}
        chunk, version = int(self._plan[fields.Pass.chunk]), int(self._plan[fields.Pass.version])
        known = math.nan if call.versions is None else call.versions.fetched(chunk)
        fetched = None if math.isnan(known) else known
        staleness = 0.0 if fetched is None else version - fetched
        return {"context": RuleContext(*call.sender, version=version, fetched=fetched, staleness=staleness)}
