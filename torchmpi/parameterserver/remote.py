"""Servers on other hosts: the client's requests, and the thread that serves them.

A request is a header, then pieces of the tensor one way or the other, then a status from the server. A client has one
request at a time with each rank, so that four tags tell everything apart.
"""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..communicators.call_queue import CallQueue
from ..errors import ArgumentError, TorchMPIError
from ..tensors.buffers import as_bytes
from .actor import Actor
from .rules import MOST_COEFFICIENTS, MOST_NAME_BYTES, Prepared, Rule
from .shards import PIECE_BYTES, pieces

# A rank is client and server, so that data to the one and to the other must not be mixed up.
_REQUEST, _DATA_TO_SERVER, _DATA_TO_CLIENT, _STATUS = range(1, 5)
_SEND, _RECEIVE = 1, 2
_HEADER = struct.Struct(f"<5q{MOST_COEFFICIENTS}d{MOST_NAME_BYTES}s")
_ANSWER = struct.Struct("<3q1000s")
_IN_FLIGHT = 4
"""Pieces of a request that are under way at once."""
_SHORTEST_NAP, _LONGEST_NAP, _LONGEST_BUSY_NAP = 20e-6, 8e-3, 200e-6
_EAGER_SECONDS = 2e-3


class _Naps:
    """How to wait for MPI without burning a core: at first by the shortest naps, then by ever longer ones."""

    def __init__(self) -> None:
        self._nap, self._since = _SHORTEST_NAP, time.monotonic()

    def take(self, longest: float, *, moved: bool) -> None:
        """Sleep; `moved`: something has happened since the last nap."""
        if moved:
            self._nap, self._since = _SHORTEST_NAP, time.monotonic()
        elif time.monotonic() - self._since > _EAGER_SECONDS:
            self._nap = min(self._nap * 1.25, longest)
        time.sleep(self._nap)


class _Header(NamedTuple):
    collective: int
    server: int
    rule: Rule
    num_pieces: int

    def pack(self) -> bytes:
        coefficients = (*self.rule.coefficients, *[0.0] * MOST_COEFFICIENTS)[:MOST_COEFFICIENTS]
        name = self.rule.name.encode()
        return _HEADER.pack(
            self.collective, self.server, self.num_pieces, len(self.rule.coefficients), len(name), *coefficients, name
        )

    @classmethod
    def unpack(cls, data: bytes) -> _Header:
        collective, server, num_pieces, num_coefficients, length, *coefficients, name = _HEADER.unpack(data)
        return cls(collective, server, Rule(name[:length].decode(), tuple(coefficients[:num_coefficients])), num_pieces)


class Requests:
    """What a client asks of servers that it does not reach through memory; used in the lane's turn."""

    def __init__(self, MPI: Any, comm: Any, call_queue: CallQueue, far_ranks: tuple[int, ...]) -> None:
        self._MPI, self._comm, self._call_queue, self._far_ranks = MPI, comm, call_queue, far_ranks

    def send(self, server: Any, data: torch.Tensor, prepared: Prepared) -> tuple[int, int]:
        """Have all far ranks apply a rule; how many rules their chunks had seen in sum, and how many there are."""
        header = _Header(_SEND, server.number, Rule(prepared.name, prepared.coefficients), 0)
        return self._ask(server, data.view(-1), header)

    def receive(self, server: Any, data: torch.Tensor) -> tuple[int, int]:
        """Fetch the shards of all far ranks; what `send` returns."""
        return self._ask(server, data.view(-1), _Header(_RECEIVE, server.number, Rule(""), 0))

    def _ask(self, server: Any, flat: torch.Tensor, header: _Header) -> tuple[int, int]:
        collective = "send" if header.collective == _SEND else "receive"
        ranks = [rank for rank in self._far_ranks if server.parts[rank][1]]
        names = ", ".join(str(server.group.world_ranks[rank]) for rank in ranks)
        self._call_queue.doing = f"parameterserver.{collective} ({server.name}, for which rank {names} must answer)"
        exchanges = [_Exchange(self._MPI, self._comm, rank, server, flat, header=header) for rank in ranks]
        waiting, naps = list(exchanges), _Naps()
        while waiting:
            moved = [exchange.advance() for exchange in waiting]
            waiting = [exchange for exchange in waiting if not exchange.is_over]
            if waiting:
                naps.take(_LONGEST_BUSY_NAP, moved=any(moved))
        for exchange in exchanges:
            if exchange.problem:
                rank = server.group.world_ranks[exchange.rank]
                kind = ArgumentError if exchange.is_refused else TorchMPIError
                what = f"{server.group.where}: parameterserver.{collective}"
                raise kind(f"{what}: rank {rank} could not do its part: {exchange.problem}")
        return sum(exchange.found for exchange in exchanges), sum(exchange.num_chunks for exchange in exchanges)


class _Exchange:
    """One request to one rank, as its client sees it."""

    def __init__(self, MPI: Any, comm: Any, rank: int, server: Any, flat: torch.Tensor, *, header: _Header) -> None:
        self.rank, self.is_over, self.is_refused, self.problem, self.found, self.num_chunks = (
            rank,
            False,
            False,
            "",
            0,
            0,
        )
        self._answer = bytearray(_ANSWER.size)
        self._status = comm.Irecv(self._answer, rank, _STATUS)
        begin, numel = server.parts[rank]
        spans = pieces(numel, server.shards.chunk_numel, server.dtype.itemsize)
        move, tag = (comm.Isend, _DATA_TO_SERVER) if header.collective == _SEND else (comm.Irecv, _DATA_TO_CLIENT)

        def start(span: tuple[int, int]) -> Any:
            return move((as_bytes(MPI, flat[begin + span[0] : begin + span[1]]), MPI.BYTE), rank, tag)

        self._flat = flat  # lives as long as the requests
        self._is_reading = header.collective == _RECEIVE
        self._header = comm.Isend(header._replace(num_pieces=len(spans)).pack(), rank, _REQUEST)
        self._moving: deque[Any] = deque()
        self._left = iter(spans)
        self._start: Callable[[tuple[int, int]], Any] = start
        self._fill()

    def _fill(self) -> None:
        while len(self._moving) < _IN_FLIGHT and (span := next(self._left, None)) is not None:
            self._moving.append(self._start(span))

    def advance(self) -> bool:
        """Look what has ended; whether anything has."""
        moved = False
        while self._moving and self._moving[0].Test():
            self._moving.popleft()
            self._fill()
            moved = True
        if self._status is not None and self._status.Test():
            self._status, moved = None, True
            kind, self.found, self.num_chunks, text = _ANSWER.unpack(self._answer)
            self.is_refused, self.problem = kind == 2, text.rstrip(b"\0").decode(errors="replace")
            if self.problem and self._is_reading:  # nothing will come
                for request in self._moving:
                    request.Cancel()
                    request.Wait()
                self._moving.clear()
                self._left = iter(())
        if self._status is None and not self._moving and self._header.Test():
            self.is_over = True
        return moved


class ServingThread(threading.Thread):
    """Serves the shard of this rank to those who cannot reach it through memory."""

    def __init__(
        self,
        MPI: Any,
        comm: Any,
        actor: Actor,
        servers: dict[int, Any],
        *,
        name: str,
        end_job: Callable[[str, int], None],
    ) -> None:
        """`end_job` is called when MPI fails, since clients would wait in vain."""
        super().__init__(name=f"torchmpi parameter server {name}", daemon=True)
        self._end_job = end_job
        self._MPI, self._comm, self._actor, self._servers = MPI, comm, actor, servers
        self._must_stop = False
        self._sessions: list[_Session] = []

    def run(self) -> None:
        """Look for requests, serve a piece of each, nap."""
        try:
            self._serve()
        except BaseException:
            self._end_job(f"{self.name} cannot go on, which ends the job:\n{traceback.format_exc()}", 1)

    def _serve(self) -> None:
        naps = _Naps()
        while not self._must_stop or self._sessions:
            moved = self._accept()
            for session in list(self._sessions):
                moved |= session.advance()
                if session.is_over:
                    self._sessions.remove(session)
            naps.take(_LONGEST_BUSY_NAP if self._sessions else _LONGEST_NAP, moved=moved)

    def _accept(self) -> bool:
        status, accepted = self._MPI.Status(), False
        while self._comm.Iprobe(self._MPI.ANY_SOURCE, _REQUEST, status):
            source, message = status.Get_source(), bytearray(_HEADER.size)
            self._comm.Recv(message, source, _REQUEST)
            header = _Header.unpack(bytes(message))
            kind = _Sending if header.collective == _SEND else _Receiving
            self._sessions.append(kind(self, source, header))
            accepted = True
        return accepted

    def stop(self) -> None:
        """End the thread, when all requests have been served."""
        self._must_stop = True
        self.join()


class _Session:
    """One request of one client, as the server sees it."""

    def __init__(self, thread: ServingThread, source: int, header: _Header) -> None:
        self.MPI, self.comm, self.actor = thread._MPI, thread._comm, thread._actor
        self.source, self.is_over, self.kind, self.problem = source, False, 0, ""
        self.found = self.num_chunks = 0
        self.server: Any = thread._servers.get(header.server)
        self.moving: deque[tuple[Any, Any, tuple[int, int]]] = deque()
        self._status: Any = None
        self.prepared: Prepared | None = None
        if self.server is None:
            self.kind, self.problem = 2, f"it has no server {header.server}: freed?"
            self.item_bytes, self.left = 1, iter([(0, PIECE_BYTES)] * header.num_pieces)  # which come all the same
            return
        self.item_bytes = self.server.dtype.itemsize
        begin, numel = self.server.parts[self.comm.rank]
        cut = pieces(numel, self.server.shards.chunk_numel, self.server.dtype.itemsize)
        self.left = iter([(begin + first, begin + last) for first, last in cut])
        if header.collective == _SEND:
            try:
                self.prepared = self.server.prepared(header.rule)
            except ArgumentError as error:
                self.kind, self.problem = 2, str(error)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something to the shard; what goes wrong is told to the client."""
        if self.problem:
            return
        try:
            action(*arguments)
        except BaseException as error:  # SystemExit would end the thread, and nobody would hear of it
            lines = traceback.format_exception_only(type(error), error)
            self.kind, self.problem = 1, "".join(lines).strip()
        else:
            self.found += self.actor.versions
            self.num_chunks += self.actor.num_chunks

    def buffer_for(self, span: tuple[int, int], buffers: list[Any]) -> tuple[Any, int, list[Any]]:
        """A buffer, its address, and what MPI is told of it."""
        memory = buffers.pop() if buffers else np.empty(PIECE_BYTES, np.uint8)
        num_bytes = (span[1] - span[0]) * self.item_bytes
        return memory, int(memory.ctypes.data), [memory[:num_bytes], self.MPI.BYTE]

    def answer(self) -> bool:
        """Tell the client how it went; the session is over when that has left."""
        if self._status is None:
            text = self.problem.encode(errors="replace")[:999]
            self._status = self.comm.Isend(
                _ANSWER.pack(self.kind, self.found, self.num_chunks, text), self.source, _STATUS
            )
        self.is_over = self._status.Test()
        return self.is_over

    def advance(self) -> bool:
        """Do what can be done without waiting; whether there was anything."""
        raise NotImplementedError


class _Sending(_Session):
    """The client sends: a few pieces are awaited at once, and applied one after the other."""

    def __init__(self, thread: ServingThread, source: int, header: _Header) -> None:
        super().__init__(thread, source, header)
        self._spare: list[Any] = []

    def advance(self) -> bool:
        """Apply what has come."""
        moved = self._await_pieces()
        while self.moving and self.moving[0][0].Test():
            _, memory, span = self.moving.popleft()
            if self.prepared is not None:
                self.attempt(self.actor.apply, self.server.shards, int(memory.ctypes.data), span, self.prepared)
            self._spare.append(memory)
            self._await_pieces()
            moved = True
        return moved if self.moving else self.answer() or moved

    def _await_pieces(self) -> bool:
        started = False
        while len(self.moving) < _IN_FLIGHT and (span := next(self.left, None)) is not None:
            memory, _, view = self.buffer_for(span, self._spare)
            self.moving.append((self.comm.Irecv(view, self.source, _DATA_TO_SERVER), memory, span))
            started = True
        return started


class _Receiving(_Session):
    """The client receives: pieces are read and sent off, a few at once."""

    def __init__(self, thread: ServingThread, source: int, header: _Header) -> None:
        super().__init__(thread, source, header)
        self._spare: list[Any] = []
        if self.problem:
            self.left = iter(())

    def advance(self) -> bool:
        """Send off what there is room for."""
        moved = False
        while self.moving and self.moving[0][0].Test():
            self._spare.append(self.moving.popleft()[1])
            moved = True
        while len(self.moving) < _IN_FLIGHT and (span := next(self.left, None)) is not None:
            memory, address, view = self.buffer_for(span, self._spare)
            self.attempt(self.actor.read, self.server.shards, address, span)
            self.moving.append((self.comm.Isend(view, self.source, _DATA_TO_CLIENT), memory, span))
            moved = True
        return moved if self.moving else self.answer() or moved
