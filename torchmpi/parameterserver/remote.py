"""Shards on other hosts: the client's requests, and the thread that serves them.

A request is a header, then words if it has some (numbers of rows, versions of the client's values), then the data in
messages of at most MESSAGE_BYTES in one direction, then a reply from the server, with the versions of chunks that were
read. A client has at most one request at a time about each shard, which has four tags.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..communicators.call_queue import CallQueue
from ..communicators.group import Group
from ..errors import ArgumentError, RankLostError, TorchMPIError
from ..tensors.buffers import as_bytes
from ..timeline import events
from .kernels.shard_layout import NUM_COEFFICIENTS
from .rules import MAX_NAME_BYTES, PreparedRule, Rule
from .server_rows import Rows
from .shards import (
    MESSAGE_BYTES,
    Actor,
    RuleFailure,
    Sender,
    Shards,
    Versions,
    applied_part,
    message_ranges,
)

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

# A rank is a client and a server, so data for its client and data for its server need different tags.
_REQUEST, _DATA_TO_SERVER, _DATA_TO_CLIENT, _REPLY = _TAGS = range(1, 5)
_APPLY, _READ, _LOOK_UP = 1, 2, 3
_DONE, _FAILED, _REFUSED = range(3)
_HEADER = struct.Struct(f"<11q{2 + NUM_COEFFICIENTS}d{MAX_NAME_BYTES}s")
_REPLY_FORMAT = struct.Struct("<3q1000s")
_MAX_IN_FLIGHT = 4
"""Messages of one request that are in flight."""
_MIN_SLEEP, _MAX_IDLE_SLEEP, _MAX_BUSY_SLEEP = 20e-6, 8e-3, 200e-6
_EAGER_SECONDS = 2e-3
_abandoned: list[object] = []
"""What has had messages in flight when a rank was lost: the library may still write to their memory."""


class RemoteServer(Protocol):
    """The attributes of a :class:`Server` that requests use."""

    number: int
    name: str
    dtype: torch.dtype
    parts: list[tuple[int, int]]
    shards: Shards
    holders: list[int]
    remote_shards: list[int]
    actor: Actor

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
    shard: int = 0
    num_messages: int = 0
    num_rows: int = 0
    row_numel: int = 0
    """Elements of a row; 0 for a request for all elements."""
    num_words: int = 0
    """Of the message after the header: numbers of rows, then versions."""
    num_versions: int = 0
    """Number of versions in the reply."""
    num_clients: int = 0

    def pack(self) -> bytes:
        rule = self.rule
        coefficients = (*rule.coefficients, *[0.0] * NUM_COEFFICIENTS)[:NUM_COEFFICIENTS]
        name = rule.name.encode()
        lengths = len(rule.coefficients), len(name)
        numbers = self.operation, self.server, *self[3:], *lengths
        return _HEADER.pack(*numbers, rule.power, rule.offset, *coefficients, name)

    @classmethod
    def unpack(cls, data: bytes) -> _Header:
        operation, server, *numbers, num_coefficients, length = (fields := _HEADER.unpack(data))[:11]
        power, offset, *coefficients, name = fields[11:]
        rule = Rule(name[:length].decode(), tuple(coefficients[:num_coefficients]), power, offset)
        return cls(operation, server, rule, *numbers)


class _Part(NamedTuple):
    """What a request to a rank is about: a shard that the rank holds, or the rows of it that are sent."""

    rank: int
    shard: int
    span: tuple[int, int]
    """Range of the data."""
    messages: list[tuple[int, int]]
    rows: Rows | None
    chunks: NDArray[np.int64]
    """Numbers of the chunks with these elements, among those of all shards."""


def _tag(kind: int, shard: int) -> int:
    return kind + len(_TAGS) * shard


def _part(server: RemoteServer, shard: int, rows: Rows | None) -> _Part:
    """Return what is about a shard; of `rows`, which may be a part already, those with elements in it.

    The messages are in the positions of `rows`.
    """
    (begin, numel), shards, rank = server.parts[shard], server.shards, server.holders[shard]
    first, end = shards.first_chunks[shard : shard + 2]
    if rows is None:
        ranges = message_ranges(numel, shards.chunk_numel, server.dtype.itemsize)
        messages = [(begin + start, begin + stop) for start, stop in ranges]
        return _Part(rank, shard, (begin, begin + numel), messages, None, np.arange(first, end))
    most = MESSAGE_BYTES // server.dtype.itemsize
    messages = rows.message_spans(begin, numel, shards.chunk_numel, most)
    chunks = first + rows.chunks(begin, numel, shards.chunk_numel)
    return _Part(rank, shard, rows.span(begin, begin + numel), messages, rows.within(begin, begin + numel), chunks)


# ---- the client


class Answer(NamedTuple):
    """Sums over the chunks of the shards of other hosts."""

    versions: int = 0
    num_chunks: int = 0
    ages: float = 0.0
    """Staleness; nan if the versions of the sent values are unknown."""

    def plus(self, other: Answer) -> Answer:
        """Return the sums over both."""
        return Answer(self.versions + other.versions, self.num_chunks + other.num_chunks, self.ages + other.ages)


def _applied(server: RemoteServer, requests: list[_Request], rows: Rows | None) -> str:
    """Describe to which chunks a rule has been applied that has failed, those of this host included."""
    chunk = server.shards.chunk_numel
    if rows is not None:
        num_applied, num_chunks = sum(each.num_chunks for each in requests), sum(len(each.chunks) for each in requests)
        return f"The rule has been applied to {num_applied} of {num_chunks} chunks with such rows of other hosts."
    applied = list(map(_whole, server.shards.parts))
    for request in requests:
        begin, numel = server.parts[request.shard]
        applied.append((begin, begin + min(request.num_chunks * chunk, numel)))
    return applied_part(applied, server.parts, chunk)


class RemoteClient:
    """Sends requests to the ranks that this rank does not share memory with; one call at a time."""

    def __init__(self, MPI: Any, comm: Comm, group: Group, ranks: tuple[int, ...], queue: CallQueue) -> None:
        self._MPI, self._comm, self._group, self._ranks, self._queue = MPI, comm, group, ranks, queue

    def request(
        self,
        server: RemoteServer,
        data: torch.Tensor,
        rule: PreparedRule | None,
        *,
        versions: Versions | None = None,
        num_clients: int = 0,
        rows: Rows | None = None,
    ) -> Answer:
        """Apply a rule to all remote shards, or copy them to `data`; with `rows` to their elements only."""
        parts = [_part(server, shard, rows) for shard in server.remote_shards if server.parts[shard][1]]
        if rule is None:
            call, header = "receive", _Header(_READ, server.number, Rule(""))
        else:
            given = Rule(rule.name, rule.coefficients, rule.halves / 2, rule.offset)
            call, header = "send", _Header(_APPLY, server.number, given, num_clients=num_clients)
        if rows is not None:  # the step of a rule with states is counted in all shards
            header = header._replace(row_numel=rows.row_numel)
            parts = [part for part in parts if part.messages or (rule is not None and rule.num_states)]
        requests = self._perform(call, header, server, data.view(-1), parts, rule=rule, versions=versions)
        failed = next((request for request in requests if request.status != _DONE), None)
        if failed is not None:
            kind = ArgumentError if failed.status == _REFUSED else TorchMPIError
            applied = "" if rule is None else f"\n{_applied(server, requests, rows)}"
            raise kind(
                f"{self._group.where}: parameterserver.{call}: failed on rank {self._group.world_ranks[failed.rank]}: "
                f"{failed.problem}{applied}"
            )
        answers = (Answer(each.versions, each.num_chunks, each.ages) for each in requests)
        return functools.reduce(Answer.plus, answers, Answer())

    def lacking(self, server: RemoteServer, rule: PreparedRule) -> list[int]:
        """Return the world ranks, of those that this rank shares no memory with, that do not know a rule."""
        header = _Header(_LOOK_UP, server.number, Rule(rule.name, rule.coefficients))
        nothing = torch.empty(0, dtype=server.dtype, device="cpu")
        parts = [_Part(rank, rank, (0, 0), [], None, np.arange(0)) for rank in self._ranks]
        requests = self._perform("send", header, server, nothing, parts)
        return [self._group.world_ranks[request.rank] for request in requests if request.status != _DONE]

    def _perform(
        self,
        call: str,
        header: _Header,
        server: RemoteServer,
        flat: torch.Tensor,
        parts: list[_Part],
        *,
        rule: PreparedRule | None = None,
        versions: Versions | None = None,
    ) -> list[_Request]:
        """Send a request to each of the ranks, and wait for the replies."""
        world_ranks = self._group.world_ranks
        names = ", ".join(dict.fromkeys(str(world_ranks[part.rank]) for part in parts))
        self._queue.doing = f"parameterserver.{call} ({server.name}, waiting for the reply of rank {names})"
        needs_versions = rule is not None and rule.needs_versions
        requests: list[_Request] = []
        options: dict[str, Any] = {"header": header, "versions": versions, "needs_versions": needs_versions}
        context, num_complete, backoff = self._group.context, 0, _Backoff()
        try:
            requests += (_Request(self._MPI, self._comm, part, flat, **options) for part in parts)
            pending = list(requests)
            while pending and not context.loss:
                progressed = [request.advance() for request in pending]
                for request in pending:
                    if request.is_complete and header.operation != _LOOK_UP:
                        request.record(call, server.name, world_ranks[request.rank])
                pending = [request for request in pending if not request.is_complete]
                num_complete = len(requests) - len(pending)
                if pending:
                    backoff.sleep(_MAX_BUSY_SLEEP, progressed=any(progressed))
        except Exception as error:
            if context.loss_behind(error) is None:
                raise
        finally:
            self._queue.doing = None
        if num_complete == len(parts):
            return requests
        _abandoned.append(requests)
        raise RankLostError(
            f"{self._group.where}: parameterserver.{call} ({server.name}): {context.loss}. Each chunk of another host "
            "has what was sent, or not. Continue with recover()."
        )


def _whole(part: tuple[int, int]) -> tuple[int, int]:
    return part[0], part[0] + part[1]


class _Request:
    def __init__(
        self,
        MPI: Any,
        comm: Comm,
        part: _Part,
        flat: torch.Tensor,
        *,
        header: _Header,
        versions: Versions | None,
        needs_versions: bool,
    ) -> None:
        self.rank, self.shard, self.chunks, self.is_complete = part.rank, part.shard, part.chunks, False
        self._begin = 0 if events.recorder is None else events.now()
        self.status, self.problem, self.versions, self.num_chunks = _DONE, "", 0, 0
        self.ages = math.nan
        self._MPI, self._comm = MPI, comm
        self._flat = flat  # kept alive until the messages have been sent or received
        self.num_bytes = (part.span[1] - part.span[0]) * flat.element_size()
        self._is_reading, self._is_applying = header.operation == _READ, header.operation == _APPLY
        self._known = versions
        num_versions = len(part.chunks) if self._is_reading and versions is not None else 0
        self._reply_data = bytearray(_REPLY_FORMAT.size + 8 * num_versions)
        self._reply: Request | None = comm.Irecv(self._reply_data, part.rank, _tag(_REPLY, part.shard))
        messages = part.messages if header.rule.name != "zero" else []
        numbers = np.empty(0, np.int64) if part.rows is None else part.rows.numbers
        words = [numbers]
        if needs_versions:
            known = versions if versions is not None else Versions(int(part.chunks.max(initial=0)) + 1)
            words.append((known.base + known.own)[part.chunks].view(np.int64))
        self._words = np.concatenate(words)
        header = header._replace(
            shard=part.shard, num_messages=len(messages), num_rows=len(numbers), num_words=len(self._words),
            num_versions=num_versions,
        )  # fmt: skip
        self._header = comm.Isend(header.pack(), part.rank, _REQUEST)
        self._in_flight: deque[Request] = deque()
        if len(self._words):
            buffer = self._words.view(np.uint8), MPI.BYTE
            self._in_flight.append(comm.Isend(buffer, part.rank, _tag(_DATA_TO_SERVER, part.shard)))
        self._ranges = iter(messages)
        self._start_messages()

    def record(self, call: str, server: str, world_rank: int) -> None:
        """Report the request, which is complete, to the recorder, if there is one."""
        recorder = events.recorder
        if recorder is not None and self._begin:
            version = self.versions / max(self.num_chunks, 1)
            details = {"server": server, "rank": world_rank, "bytes": self.num_bytes, "version": version}
            recorder.slice(call, events.SERVER_REQUEST, self._begin, f"requests to rank {world_rank}", **details)

    def _start_messages(self) -> None:
        while len(self._in_flight) < _MAX_IN_FLIGHT and (span := next(self._ranges, None)) is not None:
            buffer = as_bytes(self._MPI, self._flat[slice(*span)]), self._MPI.BYTE
            self._in_flight.append(
                self._comm.Irecv(buffer, self.rank, _tag(_DATA_TO_CLIENT, self.shard))
                if self._is_reading
                else self._comm.Isend(buffer, self.rank, _tag(_DATA_TO_SERVER, self.shard))
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
            self.status, self.versions, self.num_chunks, text = _REPLY_FORMAT.unpack_from(self._reply_data)
            self.problem = text.rstrip(b"\0").decode(errors="replace")
            self._note_versions()
            if self.status != _DONE and self._is_reading:  # the server sends no data
                for request in self._in_flight:
                    request.Cancel()
                    request.Wait()
                self._in_flight.clear()
                self._ranges = iter(())
        if self._reply is None and not self._in_flight and self._header.Test():
            self.is_complete = True
        return progressed

    def _note_versions(self) -> None:
        """Note the versions of the chunks that were read, or count the rules that were applied to them."""
        known, chunks = self._known, self.chunks
        if known is None:
            return
        if self._is_reading and self.status == _DONE:
            found = np.frombuffer(self._reply_data, np.int64, offset=_REPLY_FORMAT.size)
            known.base[chunks] = found - known.own[chunks]
        elif self._is_applying:
            done = chunks[: self.num_chunks]
            self.ages = self.versions - float((known.base[done] + known.own[done]).sum())
            known.own[done] += 1


# ---- the server


class ServerThread(threading.Thread):
    """Serves the shards in the memory of this rank to the ranks that it does not share memory with."""

    def __init__(
        self,
        group: Group,
        comm: Comm,
        actor: Actor,
        servers: Mapping[int, RemoteServer],
        *,
        end_job: Callable[[str, int], None],
    ) -> None:
        """Create the thread; `end_job` is called if it fails, since clients would wait forever."""
        super().__init__(name=f"torchmpi parameter server {group.name}", daemon=True)
        self._end_job, self._context = end_job, group.context
        self.MPI, self.comm, self.actor, self.servers = group.context.MPI, comm, actor, servers
        self.world_ranks = group.world_ranks
        self._must_stop = False
        self._sessions: list[_Session] = []

    def run(self) -> None:
        """Serve requests until `stop` is called, or a rank is lost."""
        try:
            self._serve()
        except BaseException as error:
            if self._context.loss_behind(error) is not None:
                return
            self._end_job(f"{self.name} failed, which ends the job:\n{traceback.format_exc()}", 1)

    def _serve(self) -> None:
        backoff = _Backoff()
        while not self._must_stop or (self._sessions and not self._context.loss):
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
        """End the thread when all requests have been served; after a loss at once, as some clients may be lost."""
        self._must_stop = True
        self.join()
        if self._sessions:
            _abandoned.append(self._sessions)


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
        self._server = thread.servers.get(header.server)
        self._header, self._sender = header, Sender(client, header.num_clients)
        self._rows: Rows | None = None
        self._known: Versions | None = None
        self._chunks = np.arange(0)
        self._item_bytes = 1
        self._ranges: Iterator[tuple[int, int]] = iter(())
        self._words = np.empty(header.num_words, np.int64)
        self._awaited: Request | None = None
        if header.num_words:
            words = self._words.view(np.uint8), self._byte
            self._awaited = self._comm.Irecv(words, client, _tag(_DATA_TO_SERVER, header.shard))
        else:
            self._prepare()

    def _prepare(self) -> None:
        """Determine what to do; the words of the request have arrived."""
        header, server = self._header, self._server
        # The data of a send arrive nevertheless.
        self._ranges = iter([(0, MESSAGE_BYTES)] * (0 if self._is_reading else header.num_messages))
        if server is None:
            self._fail(_REFUSED, f"there is no server {header.server}; it may have been freed")
            return
        numbers, shard = self._words[: header.num_rows], header.shard
        if header.row_numel:
            self._rows = Rows(numbers, header.row_numel)
        part = _part(server, shard, self._rows)
        if self._rows is not None and len(part.rows.numbers if part.rows is not None else ()) != len(numbers):
            self._fail(_REFUSED, "the request has rows of another rank")
            return
        if not self._is_reading:
            try:
                self._rule = server.prepared(header.rule)
            except ArgumentError as error:
                self._fail(_REFUSED, str(error))
        self._item_bytes, self._chunks = server.dtype.itemsize, part.chunks
        first, end = server.shards.first_chunks[shard : shard + 2]
        if header.num_versions or self._needs_versions():
            self._known = Versions(end - first, first)
            if self._needs_versions() and header.num_words == header.num_rows + len(part.chunks):
                self._known.base[part.chunks - first] = self._words[header.num_rows :].view(np.float64)
        if self._rows is not None and self._rule is not None and self._rule.num_states:
            begin, numel = server.parts[shard]
            self._rows.steps = self._actor.count_step(server.shards, (begin, begin + numel))
        if not self._is_look_up:
            self._ranges = iter(part.messages)
        if not self._is_reading and not header.num_messages:  # of the rule "zero"
            for span in self._ranges:
                self._access(np.empty(MESSAGE_BYTES, np.uint8), span)

    def _needs_versions(self) -> bool:
        return self._rule is not None and self._rule.needs_versions and not self._is_look_up

    def _fail(self, status: int, problem: str) -> None:
        self._status, self._problem = status, problem

    def advance(self) -> bool:
        """Process messages without waiting; return whether there was progress."""
        if self._awaited is not None:
            if not self._awaited.Test():
                return False
            self._awaited = None
            self._prepare()
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
                request = self._comm.Isend(buffer, self._client, _tag(_DATA_TO_CLIENT, self._header.shard))
            else:
                request = self._comm.Irecv(buffer, self._client, _tag(_DATA_TO_SERVER, self._header.shard))
            self._in_flight.append((request, memory, span))
            started = True
        return started

    def _access(self, memory: NDArray[np.uint8], span: tuple[int, int]) -> None:
        """Apply the rule to the shard, or read it, unless the request has failed; note an error for the reply."""
        if self._status != _DONE or self._server is None:
            return
        try:
            shards, address, known, rows = self._server.shards, int(memory.ctypes.data), self._known, self._rows
            sender, self._actor.on_taken_over = self._sender, self._server.actor.on_taken_over
            self._actor.visit(shards, address, span, self._rule, versions=known, sender=sender, rows=rows)
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
            if self._header.num_versions:
                data += self._found_versions().astype(np.int64).tobytes()
            self._record()  # before the client gets the reply, and may end the timeline
            self._reply = self._comm.Isend(data, self._client, _tag(_REPLY, self._header.shard))
        self.is_complete = self._reply.Test()

    def _found_versions(self) -> NDArray[np.float64]:
        if self._status != _DONE or self._known is None:
            return np.zeros(self._header.num_versions)
        return self._known.base[self._chunks - self._known.first]

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
