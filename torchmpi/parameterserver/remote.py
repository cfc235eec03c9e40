"""Shards on other hosts: the client's requests, and the thread that serves them.

A request is a header, then the data in messages of at most MESSAGE_BYTES in one direction, then a reply from the
server. A client has at most one request at a time with each rank, so four tags suffice.
"""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..communicators.call_queue import CallQueue
from ..communicators.group import Group
from ..errors import ArgumentError, TorchMPIError
from ..tensors.buffers import as_bytes
from ..timeline import events
from .kernels.shard_layout import NUM_COEFFICIENTS
from .rules import MAX_NAME_BYTES, PreparedRule, Rule
from .shards import MESSAGE_BYTES, Actor, RuleFailure, Shards, applied_part, message_ranges

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

# A rank is a client and a server, so data for its client and data for its server need different tags.
_REQUEST, _DATA_TO_SERVER, _DATA_TO_CLIENT, _REPLY = range(1, 5)
_APPLY, _READ, _LOOK_UP = 1, 2, 3
_DONE, _FAILED, _REFUSED = range(3)
_HEADER = struct.Struct(f"<5q{NUM_COEFFICIENTS}d{MAX_NAME_BYTES}s")
_REPLY_FORMAT = struct.Struct("<3q1000s")
_MAX_IN_FLIGHT = 4
"""Messages of one request that are in flight."""
_MIN_SLEEP, _MAX_IDLE_SLEEP, _MAX_BUSY_SLEEP = 20e-6, 8e-3, 200e-6
_EAGER_SECONDS = 2e-3


class RemoteServer(Protocol):
    """The attributes of a :class:`Server` that requests use."""

    number: int
    name: str
    dtype: torch.dtype
    parts: list[tuple[int, int]]
    shards: Shards

    def prepared(self, rule: str | Rule) -> PreparedRule:
        """Return the rule for the dtype of the server."""


class _Backoff:
    """Sleeps between polls of MPI, whose own waits would occupy a core: briefly at first, then for increasing times."""

    def __init__(self) -> None:
        self._seconds, self._since = _MIN_SLEEP, time.monotonic()

    def sleep(self, max_seconds: float, *, progressed: bool) -> None:
        if progressed:
            self._seconds, self._since = _MIN_SLEEP, time.monotonic()
        elif time.monotonic() - self._since > _EAGER_SECONDS:
            self._seconds = min(self._seconds * 1.25, max_seconds)
        time.sleep(self._seconds)


class _Header(NamedTuple):
    operation: int
    server: int
    rule: Rule
    num_messages: int

    def pack(self) -> bytes:
        coefficients = (*self.rule.coefficients, *[0.0] * NUM_COEFFICIENTS)[:NUM_COEFFICIENTS]
        name = self.rule.name.encode()
        lengths = len(self.rule.coefficients), len(name)
        return _HEADER.pack(self.operation, self.server, self.num_messages, *lengths, *coefficients, name)

    @classmethod
    def unpack(cls, data: bytes) -> _Header:
        operation, server, num_messages, num_coefficients, length, *coefficients, name = _HEADER.unpack(data)
        rule = Rule(name[:length].decode(), tuple(coefficients[:num_coefficients]))
        return cls(operation, server, rule, num_messages)


# ---- the client


class RemoteClient:
    """Sends requests to the ranks that this rank does not share memory with; one call at a time."""

    def __init__(self, MPI: Any, comm: Comm, group: Group, ranks: tuple[int, ...], queue: CallQueue) -> None:
        self._MPI, self._comm, self._group, self._ranks, self._queue = MPI, comm, group, ranks, queue

    def request(self, server: RemoteServer, data: torch.Tensor, rule: PreparedRule | None) -> tuple[int, int]:
        """Apply a rule to all remote shards, or copy them to `data`.

        Returns:
            The sum of the versions of the chunks, and their number.
        """
        if rule is None:
            call, header = "receive", _Header(_READ, server.number, Rule(""), 0)
        else:
            call, header = "send", _Header(_APPLY, server.number, Rule(rule.name, rule.coefficients), 0)
        ranks, world_ranks = [rank for rank in self._ranks if server.parts[rank][1]], self._group.world_ranks
        requests = self._perform(call, header, server, data.view(-1), ranks)
        failed = next((request for request in requests if request.status != _DONE), None)
        if failed is not None:
            kind = ArgumentError if failed.status == _REFUSED else TorchMPIError
            chunk, applied = server.shards.chunk_numel, list(map(_whole, server.shards.parts))
            for request in requests:
                begin, numel = server.parts[request.rank]
                applied.append((begin, begin + min(request.num_chunks * chunk, numel)))
            part = f"\n{applied_part(applied, server.parts, chunk)}" if rule is not None else ""
            raise kind(
                f"{self._group.where}: parameterserver.{call}: failed on rank {world_ranks[failed.rank]}: "
                f"{failed.problem}{part}"
            )
        return sum(request.versions for request in requests), sum(request.num_chunks for request in requests)

    def lacking(self, server: RemoteServer, rule: PreparedRule) -> list[int]:
        """Return the world ranks, of those that this rank shares no memory with, that do not know a rule."""
        header = _Header(_LOOK_UP, server.number, Rule(rule.name, rule.coefficients), 0)
        nothing = torch.empty(0, dtype=server.dtype, device="cpu")
        requests = self._perform("send", header, server, nothing, list(self._ranks))
        return [self._group.world_ranks[request.rank] for request in requests if request.status != _DONE]

    def _perform(
        self, call: str, header: _Header, server: RemoteServer, flat: torch.Tensor, ranks: list[int]
    ) -> list[_Request]:
        """Send a request to each of the ranks, and wait for the replies."""
        world_ranks = self._group.world_ranks
        names = ", ".join(str(world_ranks[rank]) for rank in ranks)
        self._queue.doing = f"parameterserver.{call} ({server.name}, waiting for the reply of rank {names})"
        requests = [_Request(self._MPI, self._comm, rank, server, flat, header=header) for rank in ranks]
        pending, backoff = list(requests), _Backoff()
        while pending:
            progressed = [request.advance() for request in pending]
            for request in pending:
                if request.is_complete and header.operation != _LOOK_UP:
                    request.record(call, server.name, world_ranks[request.rank])
            pending = [request for request in pending if not request.is_complete]
            if pending:
                backoff.sleep(_MAX_BUSY_SLEEP, progressed=any(progressed))
        return requests


def _whole(part: tuple[int, int]) -> tuple[int, int]:
    return part[0], part[0] + part[1]


class _Request:
    def __init__(
        self, MPI: Any, comm: Comm, rank: int, server: RemoteServer, flat: torch.Tensor, *, header: _Header
    ) -> None:
        self.rank, self.is_complete = rank, False
        self._begin = 0 if events.recorder is None else events.now()
        self.status, self.problem, self.versions, self.num_chunks = _DONE, "", 0, 0
        self._MPI, self._comm = MPI, comm
        begin, numel = server.parts[rank]
        self._data = flat[begin : begin + numel]  # kept alive until the messages have been sent or received
        self._is_reading = header.operation == _READ
        self._reply_data = bytearray(_REPLY_FORMAT.size)
        self._reply: Request | None = comm.Irecv(self._reply_data, rank, _REPLY)
        ranges = message_ranges(numel, server.shards.chunk_numel, server.dtype.itemsize)
        ranges = [] if header.rule.name == "zero" or header.operation == _LOOK_UP else ranges
        self._header = comm.Isend(header._replace(num_messages=len(ranges)).pack(), rank, _REQUEST)
        self._in_flight: deque[Request] = deque()
        self._ranges = iter(ranges)
        self._start_messages()

    def record(self, call: str, server: str, world_rank: int) -> None:
        """Report the request, which is complete, to the recorder, if there is one."""
        recorder = events.recorder
        if recorder is not None and self._begin:
            version = self.versions / max(self.num_chunks, 1)
            details = {"server": server, "rank": world_rank, "bytes": self._data.nbytes, "version": version}
            recorder.slice(call, events.SERVER_REQUEST, self._begin, f"requests to rank {world_rank}", **details)

    def _start_messages(self) -> None:
        while len(self._in_flight) < _MAX_IN_FLIGHT and (span := next(self._ranges, None)) is not None:
            buffer = as_bytes(self._MPI, self._data[slice(*span)]), self._MPI.BYTE
            self._in_flight.append(
                self._comm.Irecv(buffer, self.rank, _DATA_TO_CLIENT)
                if self._is_reading
                else self._comm.Isend(buffer, self.rank, _DATA_TO_SERVER)
            )

    def advance(self) -> bool:
        """Process completed messages; return whether there were any."""
        progressed = False
        while self._in_flight and self._in_flight[0].Test():
            self._in_flight.popleft()
            self._start_messages()
            progressed = True
        if self._reply is not None and self._reply.Test():
            self._reply, progressed = None, True
            self.status, self.versions, self.num_chunks, text = _REPLY_FORMAT.unpack(self._reply_data)
            self.problem = text.rstrip(b"\0").decode(errors="replace")
            if self.status != _DONE and self._is_reading:  # the server sends no data
                for request in self._in_flight:
                    request.Cancel()
                    request.Wait()
                self._in_flight.clear()
                self._ranges = iter(())
        if self._reply is None and not self._in_flight and self._header.Test():
            self.is_complete = True
        return progressed


# ---- the server


class ServerThread(threading.Thread):
    """Serves the shards of this rank to the ranks that it does not share memory with."""

    def __init__(
        self,
        MPI: Any,
        comm: Comm,
        actor: Actor,
        servers: Mapping[int, RemoteServer],
        *,
        name: str,
        end_job: Callable[[str, int], None],
        world_ranks: tuple[int, ...],
    ) -> None:
        """Create the thread; `end_job` is called if it fails, since clients would wait forever."""
        super().__init__(name=f"torchmpi parameter server {name}", daemon=True)
        self._end_job = end_job
        self.MPI, self.comm, self.actor, self.servers = MPI, comm, actor, servers
        self.world_ranks = world_ranks
        self._must_stop = False
        self._sessions: list[_Session] = []

    def run(self) -> None:
        """Serve requests until `stop` is called."""
        try:
            self._serve()
        except BaseException:
            self._end_job(f"{self.name} failed, which ends the job:\n{traceback.format_exc()}", 1)

    def _serve(self) -> None:
        backoff = _Backoff()
        while not self._must_stop or self._sessions:
            progressed = self._accept()
            for session in list(self._sessions):
                progressed |= session.advance()
                if session.is_complete:
                    self._sessions.remove(session)
            backoff.sleep(_MAX_BUSY_SLEEP if self._sessions else _MAX_IDLE_SLEEP, progressed=progressed)

    def _accept(self) -> bool:
        status, accepted = self.MPI.Status(), False
        while self.comm.Iprobe(self.MPI.ANY_SOURCE, _REQUEST, status):
            client, message = status.Get_source(), bytearray(_HEADER.size)
            self.comm.Recv(message, client, _REQUEST)
            header = _Header.unpack(bytes(message))
            self._sessions.append(_Session(self, client, header))
            accepted = True
        return accepted

    def stop(self) -> None:
        """End the thread when all requests have been served."""
        self._must_stop = True
        self.join()


class _Session:
    """One request of one client, on the server; several of its messages are in flight at a time."""

    def __init__(self, thread: ServerThread, client: int, header: _Header) -> None:
        self._comm, self._actor, self._byte, self._client = thread.comm, thread.actor, thread.MPI.BYTE, client
        self.is_complete, self._is_reading = False, header.operation == _READ
        self._is_look_up = header.operation == _LOOK_UP
        self._begin = 0 if events.recorder is None else events.now()
        self._rule_name, self._world_rank, self._num_bytes = header.rule.name, thread.world_ranks[client], 0
        self._in_flight: deque[tuple[Request, NDArray[np.uint8], tuple[int, int]]] = deque()
        self._spare: list[NDArray[np.uint8]] = []
        self._status, self._problem, self._versions, self._num_chunks = _DONE, "", 0, 0
        self._reply: Request | None = None
        self._rule: PreparedRule | None = None
        self._server = server = thread.servers.get(header.server)
        if server is None:
            self._fail(_REFUSED, f"there is no server {header.server}; it may have been freed")
            self._item_bytes = 1
            # The data of a send arrive nevertheless.
            self._ranges = iter([(0, MESSAGE_BYTES)] * (0 if self._is_reading else header.num_messages))
            return
        self._item_bytes = server.dtype.itemsize
        begin, numel = server.parts[thread.comm.rank]
        ranges = message_ranges(numel, server.shards.chunk_numel, self._item_bytes)
        ranges = [] if self._is_look_up else ranges
        self._ranges = iter([(begin + first, begin + last) for first, last in ranges])
        if not self._is_reading:
            try:
                self._rule = server.prepared(header.rule)
            except ArgumentError as error:
                self._fail(_REFUSED, str(error))
            if not header.num_messages:  # of the rule "zero"
                for span in self._ranges:
                    self._access(np.empty(MESSAGE_BYTES, np.uint8), span)

    def _fail(self, status: int, problem: str) -> None:
        self._status, self._problem = status, problem

    def advance(self) -> bool:
        """Process messages without waiting; return whether there was progress."""
        progressed = self._start_messages()
        while self._in_flight and self._in_flight[0][0].Test():
            _, memory, span = self._in_flight.popleft()
            if not self._is_reading:
                self._access(memory, span)
            self._spare.append(memory)
            self._start_messages()
            progressed = True
        if not self._in_flight:
            self._send_reply()
        return progressed or self.is_complete

    def _start_messages(self) -> bool:
        started = False
        while len(self._in_flight) < _MAX_IN_FLIGHT and (span := next(self._ranges, None)) is not None:
            memory = self._spare.pop() if self._spare else np.empty(MESSAGE_BYTES, np.uint8)
            buffer = memory[: (span[1] - span[0]) * self._item_bytes], self._byte
            if self._is_reading:
                self._access(memory, span)
                request = self._comm.Isend(buffer, self._client, _DATA_TO_CLIENT)
            else:
                request = self._comm.Irecv(buffer, self._client, _DATA_TO_SERVER)
            self._in_flight.append((request, memory, span))
            started = True
        return started

    def _access(self, memory: NDArray[np.uint8], span: tuple[int, int]) -> None:
        """Apply the rule to the shard, or read it, unless the request has failed; note an error for the reply."""
        if self._status != _DONE or self._server is None:
            return
        try:
            if self._rule is None:
                self._actor.read(self._server.shards, int(memory.ctypes.data), span)
            else:
                self._actor.apply(self._server.shards, int(memory.ctypes.data), span, self._rule)
        except BaseException as error:  # otherwise the thread would end, and the job with it
            self._num_chunks += self._actor.num_chunks
            described = "".join(traceback.format_exception_only(type(error), error)).strip()
            self._fail(_FAILED, str(error) if isinstance(error, RuleFailure) else described)
        else:
            self._versions += self._actor.versions
            self._num_chunks += self._actor.num_chunks
            self._num_bytes += (span[1] - span[0]) * self._item_bytes

    def _send_reply(self) -> None:
        if self._reply is None:
            text = self._problem.encode(errors="replace")[:999]
            data = _REPLY_FORMAT.pack(self._status, self._versions, self._num_chunks, text)
            self._record()  # before the client gets the reply, and may end the timeline
            self._reply = self._comm.Isend(data, self._client, _REPLY)
        self.is_complete = self._reply.Test()

    def _record(self) -> None:
        """Report the request to the recorder, if there is one."""
        recorder = events.recorder
        if recorder is None or not self._begin or self._server is None or self._is_look_up:
            return
        details = {"server": self._server.name, "rank": self._world_rank, "bytes": self._num_bytes}
        details |= {"version": self._versions / max(self._num_chunks, 1)}
        details |= {"error": self._problem} if self._problem else {}
        name, rule = ("read", {}) if self._is_reading else ("apply", {"rule": self._rule_name})
        track = f"requests of rank {self._world_rank}"
        recorder.slice(name, events.SERVED, self._begin, track, **details, **rule)
