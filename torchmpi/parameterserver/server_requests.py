"""Requests to a server: sends with a rule and receives, whole or of rows; their records, and the order that they keep.

A request is a plan (:class:`ServerRequest`) and a record (:class:`RequestRecord`), which is written at its begin and
at its end: the watchdog, metrics and the flight record read it. A timeline and a recorded run are called at both
moments. A request that a program repeats is run by machine code (:mod:`.repeated`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..communicators.call_counts import MessageCount
from ..communicators.call_queue import CallQueue, RunLock
from ..communicators.flight_record import OF_REQUESTS, Ring
from ..communicators.group import Group
from ..communicators.message_record import ANY_RANK
from ..errors import CommunicatorError, RankLostError, TorchMPIError
from ..shared_memory.memory_layout import RECORD_LENGTH, RecordFields
from ..tensors import buffers, streams
from ..tensors import dtypes as dtype_table
from ..timeline import events
from .kernels.shard_layout import RequestFields
from .remote import Answer, RemoteServer
from .rules import PreparedRule
from .runs import observed_run
from .server_rows import Rows
from .shards import NOBODY, RuleFailure, Sender, Versions, applied_part


class RequestRecord:
    """The record of the sends of a client to a server, or of its receives: the last one, and how many there were."""

    def __init__(self, memory: memoryview, address: int, place: tuple[Ring, int] | None = None) -> None:
        self.fields, self.floats, self.address, self.place = memory.cast("q"), memory.cast("d"), address, place

    def begin(self, dtype: torch.dtype, num_bytes: int) -> None:
        fields = self.fields
        fields[RequestFields.dtype], fields[RequestFields.num_bytes] = dtype_table.info(dtype).code, num_bytes
        fields[RequestFields.begin] = events.now()
        fields[RequestFields.begun] += 1

    def end(self, found: Answer) -> None:
        """Write that it has been made, and the sums over its chunks."""
        fields, at = self.fields, RequestFields
        fields[at.versions], fields[at.num_chunks], self.floats[at.ages] = found
        fields[at.total_bytes] += fields[at.num_bytes]
        fields[at.end] = end = events.now()
        fields[at.total_ns] += end - fields[at.begin]
        fields[at.ended] += 1

    def withdraw(self) -> None:
        """Do not count a request that has failed."""
        self.fields[RequestFields.begun] = self.fields[RequestFields.ended]

    @property
    def count(self) -> int:
        """Number of requests that have been made."""
        return self.fields[RequestFields.ended]

    @property
    def begun(self) -> int:
        """Number of the request that is being made; 0 if none is."""
        begun = self.fields[RequestFields.begun]
        return begun if begun != self.fields[RequestFields.ended] else 0

    @property
    def num_bytes(self) -> int:
        return self.fields[RequestFields.total_bytes]

    @property
    def version(self) -> float:
        """Rules that had been applied to a chunk before the last one: mean over the chunks."""
        return self.fields[RequestFields.versions] / max(self.fields[RequestFields.num_chunks], 1)

    @property
    def staleness(self) -> float:
        """Rules of others that the last one did not know of: mean over the chunks."""
        return self.floats[RequestFields.ages] / max(self.fields[RequestFields.num_chunks], 1)

    def counted(self) -> MessageCount:
        """Return the number of requests, their bytes and nanoseconds, for the metrics."""
        return MessageCount(self.count, self.num_bytes, self.fields[RequestFields.total_ns], 0, 0, 0)

    def detach(self) -> None:
        """Keep what it says in memory of its own: the flight record uses its entry again."""
        own = memoryview(array("q", self.fields)).cast("B")
        fields, floats = self.fields, self.floats
        self.fields, self.floats, self.address = own.cast("q"), own.cast("d"), 0
        fields.release()
        floats.release()


class RequestRecords:
    """The memory of the records of a group: entries of the flight record."""

    def __init__(self, group: Group) -> None:
        self._group, self._rings = group, list[Ring]()
        self._unused: list[tuple[Ring, int]] = []

    def take(self, number: int, *, is_receive: bool, before: RequestRecord | None = None) -> RequestRecord:
        """Return an empty record of the server with a number, or one that continues another one."""
        if not self._unused:
            self._rings.append(self._group.record_memory(OF_REQUESTS))
            self._unused = [(self._rings[-1], index) for index in reversed(range(RECORD_LENGTH))]
        ring, index = self._unused.pop()
        begin = len(ring.memory) - (RECORD_LENGTH - index) * RecordFields.BYTES
        memory = ring.memory[begin : begin + RecordFields.BYTES]
        memory[:] = bytes(RecordFields.BYTES)
        record = RequestRecord(memory, ring.address + index * RecordFields.BYTES, (ring, index))
        record.fields[RequestFields.is_receive], record.fields[RequestFields.peer] = is_receive, ANY_RANK
        record.fields[RequestFields.tag] = number
        if before is not None:
            record.fields[:] = before.fields
        return record

    def give_back(self, record: RequestRecord) -> None:
        """Let another server use the entry of a record."""
        record.fields[RequestFields.begun] = 0
        record.detach()
        if record.place is not None:
            self._unused.append(record.place)

    def close(self) -> None:
        """Give the memory back to the flight record."""
        if (flight_record := self._group.context.flight_record) is not None:
            for ring in self._rings:
                flight_record.free(ring)


class RequestServer(RemoteServer, observed_run.ObservedServer, Protocol):
    """The attributes of a :class:`.servers.Server` that requests use."""

    context: Any
    numel: int
    is_local: bool
    is_open: bool
    problem: str
    sender: int
    num_clients: int
    versions: Versions
    lock: RunLock
    sends: RequestRecord
    receives: RequestRecord
    repeater: Any

    @property
    def group(self) -> Group:
        """The ranks that hold the shards."""

    def spans_of(self, rows: Rows) -> list[tuple[int, int]]:
        """Return the positions of rows whose elements are in memory."""

    def doing(self) -> str | None:
        """Describe the request that is being made."""


class RequestQueue(CallQueue):
    """The long requests of a client to the servers of a group, in order, and the description of any request."""

    def __init__(self, name: str, servers: Mapping[int, RequestServer], *, threaded: bool) -> None:
        super().__init__(name, threaded=threaded)
        self._servers = servers

    @property
    def doing(self) -> str | None:
        """The description of a request that is being made, the same string as long as it is."""
        described = (server.doing() for server in list(self._servers.values()))
        return super().doing or next(filter(None, described), None)

    @doing.setter
    def doing(self, description: str | None) -> None:
        self._doing = description


class ServerRequest:
    """A request to a server: a send with a rule, or a receive, of all elements or of rows.

    Args:
        server: The server.
        tensor: What is sent, or received into.
        rule: The rule of a send; None of a receive.
        what: The rank and the call, for messages.
        rows: The rows, in increasing order.
        order: Where the caller has the values of each; None if in that order.
        base: Of a send: the versions of the values from which it was computed.
    """

    __slots__ = ("_mark", "base", "data", "order", "rows", "rule", "server", "tensor", "what")

    def __init__(
        self,
        server: RequestServer,
        tensor: torch.Tensor,
        rule: PreparedRule | None,
        what: str,
        *,
        rows: Rows | None = None,
        order: torch.Tensor | None = None,
        base: NDArray[np.float64] | None = None,
    ) -> None:
        self.server, self.tensor, self.rule, self.what = server, tensor, rule, what
        self.rows, self.order, self.base = rows, order, base
        self._mark = None if tensor.is_cpu else streams.fence(tensor)
        self.data: torch.Tensor | None = None
        """Contiguous host memory with the elements; None if it is filled when the request is made."""
        if rule is not None:
            if tensor.is_cpu:
                self.data = self._in_order(buffers.plain(tensor, to_host=True))
        elif tensor.is_cpu and buffers.is_direct(tensor) and order is None:
            self.data = tensor
        else:
            shape = tensor.shape if rows is None else torch.Size([rows.numel])
            self.data = torch.empty(shape, dtype=tensor.dtype, device="cpu", pin_memory=not tensor.is_cpu)

    @property
    def name(self) -> str:
        """``send`` or ``receive``."""
        return "receive" if self.rule is None else "send"

    @property
    def is_repeatable(self) -> bool:
        """Whether machine code can make it: a compiled rule, or none, on all elements in the memory of the tensor."""
        is_compiled = self.rule is None or (self.rule.function is None and self.data is not None)
        return is_compiled and self.rows is None and self.base is None and self._uses_memory_of_tensor()

    def _uses_memory_of_tensor(self) -> bool:
        return self.data is not None and self.tensor.is_cpu and self.data.data_ptr() == self.tensor.data_ptr()

    def run(self) -> Any:
        """Make the request, in the order of a recorded run if there is one; the caller holds the lock of the server."""
        check_open(self.server, self.what)  # again: another thread may have freed it
        observer = observed_run.active
        if observer is None or observer.order is None:
            return self.perform()
        return observer.order.run(self.server, self.perform)

    def perform(self) -> Any:
        """Begin the record, make the request, and end the record; observers are called at both moments."""
        data = self._staged() if self.data is None else self.data
        record = self.server.receives if self.rule is None else self.server.sends
        end_calls = [begin(self, data) for begin in _observers()]
        record.begin(data.dtype, data.nbytes)
        try:
            found = self.visit(data)
        except BaseException:
            record.withdraw()
            raise
        record.end(found)
        for end in end_calls:
            end()
        return None if self.rule is not None else self._received(data)

    def visit(self, data: torch.Tensor) -> Answer:
        """Apply the rule to all shards, or read them, without a record; return the sums over their chunks."""
        server, rule, rows = self.server, self.rule, self.rows
        actor, shards, context = server.actor, server.shards, server.context
        versions, sender = server.versions if self.base is None else server.versions.since(self.base), NOBODY
        if rule is not None:
            if rule.function is not None:
                context.require_registered(server, rule)
            if rule.takes_context:
                sender = Sender(server.sender, server.num_clients)
            if rows is not None and rule.num_states:
                rows.steps = actor.count_step(shards, (0, server.numel))
        spans, found = [(0, server.numel)] * bool(shards.parts) if rows is None else server.spans_of(rows), Answer()
        try:
            for span in spans:
                address = data.data_ptr() + span[0] * data.element_size()
                actor.visit(shards, address, span, rule, versions=versions, sender=sender, rows=rows)
                found = found.plus(Answer(actor.versions, actor.num_chunks, actor.ages))
        except RuleFailure as error:
            raise self._failed(error) from error.__cause__
        if context.remote is None:
            return found
        far = context.remote.request(server, data, rule, versions=versions, num_clients=server.num_clients, rows=rows)
        return found.plus(far)

    def _failed(self, error: RuleFailure) -> TorchMPIError:
        server, actor = self.server, self.server.actor
        applied = (
            applied_part(actor.applied(server.shards), server.parts, server.shards.chunk_numel)
            if self.rows is None
            else f"The rule has been applied to {actor.num_chunks} of the chunks with these rows."
        )
        return TorchMPIError(f"{self.what}: failed on {server.group.where}: {error}\n{applied}")

    def _staged(self) -> torch.Tensor:
        """Return what a tensor on a device sends, in host memory."""
        staged = streams.run_after(self._mark, self.tensor.device, partial(buffers.plain, self.tensor, to_host=True))
        return self._in_order(staged)

    def _in_order(self, data: torch.Tensor) -> torch.Tensor:
        return data if self.rows is None or self.order is None else data.reshape(-1, self.rows.row_numel)[self.order]

    def _received(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor, with what has been received in host memory."""
        if data is self.tensor:
            buffers.touch(data)
        else:
            values = self._in_order(data).reshape(self.tensor.shape)
            streams.run_after(self._mark, self.tensor.device, partial(buffers.overwrite, self.tensor, values))
        return self.tensor


def check_open(server: RequestServer, what: str) -> None:
    """Raise if a server has been freed, or a rank is lost."""
    if not server.is_open:
        problem = server.problem or f"{server.name} has been freed. Make a new one with parameterserver.init."
        raise CommunicatorError(f"{what}: {problem}")
    if loss := server.group.context.loss:
        raise RankLostError(f"{what}: {loss}. Nothing has been sent. Continue with recover().")


# ---- observers


def _observers() -> Iterator[Callable[[ServerRequest, torch.Tensor], Callable[[], object]]]:
    """Yield what is called at the begin of a request, and returns what is called at its end."""
    if events.recorder is not None:
        yield _begin_in_timeline
    if observed_run.active is not None:
        yield observed_run.active.begin


def _begin_in_timeline(request: ServerRequest, data: torch.Tensor) -> Callable[[], None]:
    queue, recorder = request.server.context.call_queue, events.recorder
    queued = queue.origin if queue.runs_here() else None
    origin = queued if queued is not None or recorder is None else recorder.origin(0)
    return partial(_end_in_timeline, request, data, origin, events.now())


def _end_in_timeline(request: ServerRequest, data: torch.Tensor, place: events.PlainOrigin | None, begin: int) -> None:
    """Report a request that ends now to the recorder, if there still is one."""
    recorder, server = events.recorder, request.server
    if recorder is None or place is None:
        return
    origin = events.origin_of(place)
    details: dict[str, object] = {"version": server.received_version}
    if request.rule is not None:
        details = {"rule": request.rule.name, "version": server.sent_version}
        details |= {} if server.sent_staleness != server.sent_staleness else {"staleness": server.sent_staleness}
    details |= {"server": server.name, "bytes": data.nbytes, "dtype": dtype_table.short_name(data.dtype)}
    details |= {"communicator": server.group.name, "in memory of ranks": server.context.local_world_ranks}
    details |= {"line": origin.line} if origin.line else {}
    details |= {"label": origin.label} if origin.label else {}
    details |= {"queued us": (begin - origin.queued) / 1000} if origin.queued else {}
    recorder.slice(
        request.name, events.SERVER_CALL, begin, f"{server.context.call_queue.name} {server.name}", **details
    )
