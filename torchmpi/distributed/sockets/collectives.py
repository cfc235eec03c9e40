"""Collectives made of messages between pairs of ranks, after the plans of :mod:`torchmpi.backends.schedule`.

Each call has a number, which is the tag of its messages. Every rank must make the same calls in the same order, as MPI
wants it. Reductions combine in rank order, so that all ranks get the same bits.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...backends import schedule
from ...tensors import partition
from .datatypes import IN_PLACE, BufferSpec, Op, blocks_of, buffer_of, combine
from .matching import new_memory
from .messages import COLLECTIVES, Messenger, packed
from .requests import CommunicationError, Receive, Request
from .socket_endpoint import Endpoint

_SHORT_BYTES = 16 << 10
"""Up to this many in all, few rounds matter more than few bytes."""


class Collective(Messenger):
    """A communicator's collective calls."""

    def __init__(self, endpoint: Endpoint, world_ranks: Sequence[int], number: int) -> None:
        super().__init__(endpoint, world_ranks, number)
        self._num_calls = 0

    def _begin(self) -> int:
        """The number of the call that begins."""
        self.endpoint.check_members(self.members)
        self._num_calls = (self._num_calls + 1) & 0x7FFFFFFF
        return self._num_calls

    def _give(self, view: memoryview, dest: int, call: int) -> Request:
        return self._send(view, dest, call, COLLECTIVES)

    def _get(self, view: memoryview | None, source: int, call: int) -> Receive:
        return self._receive(view, source, call, COLLECTIVES)

    def _swap(
        self,
        step: schedule.Round,
        call: int,
        outgoing: Callable[[schedule.Message], memoryview],
        incoming: Callable[[schedule.Message], memoryview],
    ) -> None:
        """All messages of a round, receives first: what they are posted for is not copied."""
        requests: list[Request] = [self._get(incoming(message), message.peer, call) for message in step.receives]
        requests += [self._give(outgoing(message), message.peer, call) for message in step.sends]
        Request.Waitall(requests)

    # --- waiting for each other

    def Ibarrier(self) -> Request:
        """A request that ends when all have made this call; nobody needs to look after it."""
        return _Barrier(self, self._begin()).request

    def Barrier(self) -> None:
        """Return when all have come."""
        self.Ibarrier().Wait()

    # --- objects

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """The root's object, to all."""
        call, data = self._begin(), packed(obj) if self.rank == root else None
        for step in schedule.tree(self.rank, self.size, root):
            for message in step.receives:
                receive = self._get(None, message.peer, call)
                receive.Wait()
                data = memoryview(receive.memory)
            assert data is not None or not step.sends
            Request.Waitall([self._give(data, message.peer, call) for message in step.sends])  # type: ignore[arg-type]
        return obj if self.rank == root else pickle.loads(data)  # type: ignore[arg-type]

    def allgather(self, obj: Any) -> list[Any]:
        """The objects of all, in rank order."""
        call, found = self._begin(), {self.rank: bytes(packed(obj))}
        for (sent,), (received,) in schedule.doubling(self.rank, self.size):
            ranks = [(sent.first + k) % self.size for k in range(sent.num_blocks)]
            sending = self._give(packed({rank: found[rank] for rank in ranks}), sent.peer, call)
            receive = self._get(None, received.peer, call)
            Request.Waitall((receive, sending))
            found |= pickle.loads(receive.memory)
        return [pickle.loads(found[rank]) for rank in range(self.size)]

    def allreduce(self, obj: Any, op: Op) -> Any:
        """The objects of all, combined."""
        first, *others = self.allgather(obj)
        for other in others:
            first = op(first, other)
        return first

    # --- memory: movement

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """The root's memory, to all."""
        call, view = self._begin(), buffer_of(buf, written=self.rank != root).view
        for step in schedule.tree(self.rank, self.size, root):
            self._swap(step, call, lambda _: view, lambda _: view)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Everybody's block, to all."""
        self.Allgatherv(sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same for blocks that differ in length."""
        blocks = blocks_of(recvbuf, self.size, written=True)
        self._put_own(sendbuf, blocks[self.rank])
        self._share(blocks, self._begin())

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Everybody's block, to the root."""
        call, step = self._begin(), schedule.collect(self.rank, self.size, root)
        if self.rank != root:
            view = buffer_of(sendbuf).view
            self._swap(step, call, lambda _: view, lambda _: view)
            return
        blocks = blocks_of(recvbuf, self.size, written=True)
        self._put_own(sendbuf, blocks[root])
        self._swap(step, call, lambda _: blocks[root], lambda message: blocks[message.peer])

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """The root's blocks, one to each."""
        call = self._begin()
        if self.rank != root:
            self._get(buffer_of(recvbuf, written=True).view, root, call).Wait()
            return
        blocks = blocks_of(sendbuf, self.size)
        requests = [self._give(block, rank, call) for rank, block in enumerate(blocks) if rank != root]
        if recvbuf is not IN_PLACE:
            self._put_own((blocks[root], buffer_of(recvbuf).datatype), buffer_of(recvbuf, written=True).view)
        Request.Waitall(requests)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Block j to rank j."""
        self.Alltoallv(sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same for blocks that differ in length."""
        outgoing, incoming = blocks_of(sendbuf, self.size), blocks_of(recvbuf, self.size, written=True)
        self._exchange(outgoing, incoming, self._begin())

    # --- memory: reductions

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op) -> None:
        """The sum (or what `op` says) of everybody's elements, to all."""
        out = buffer_of(recvbuf, written=True)
        self._put_own(sendbuf, out.view)
        call = self._begin()
        if self.size <= 2 or len(out.view) * self.size <= _SHORT_BYTES:
            parts = self._versions(out.view, self.rank)
            self._share(parts, call)
            _combine(parts, out, op)
            return
        blocks = _parts_of(out, self.size)
        own = self._combined(blocks, out.datatype, op, call)
        blocks[self.rank][:] = own
        self._share(blocks, call)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op, root: int = 0) -> None:
        """The same to the root; the others' memory stays as it is."""
        given = buffer_of(recvbuf if sendbuf is IN_PLACE else sendbuf)
        call = self._begin()
        blocks = _parts_of(given, self.size)
        own = self._combined(blocks, given.datatype, op, call)
        step = schedule.collect(self.rank, self.size, root)
        if self.rank != root:
            self._swap(step, call, lambda _: own, lambda _: own)
            return
        results = _parts_of(buffer_of(recvbuf, written=True), self.size)
        results[root][:] = own
        self._swap(step, call, lambda _: own, lambda message: results[message.peer])

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int], op: Op) -> None:
        """The sum, cut into parts of these lengths: one to each."""
        given, out = buffer_of(sendbuf), buffer_of(recvbuf, written=True)
        begins = np.concatenate(([0], np.cumsum(recvcounts)[:-1])).tolist()
        blocks = blocks_of((given.view, list(recvcounts), begins, given.datatype), self.size)
        own = self._combined(blocks, given.datatype, op, self._begin())
        self._put_own((own, given.datatype), out.view)

    # --- the steps

    def _put_own(self, sendbuf: Any, target: memoryview) -> None:
        """The own block to its place, if it is not there."""
        if sendbuf is IN_PLACE:
            return
        view = buffer_of(sendbuf).view
        if len(view) != len(target):
            raise CommunicationError(f"rank {self.rank}: {len(view)} bytes to send, but room for {len(target)} of them")
        target[:] = view

    def _share(self, blocks: Sequence[memoryview], call: int) -> None:
        """The own block to everybody, and everybody's into its place."""
        if self.size > 2 and sum(map(len, blocks)) <= _SHORT_BYTES:
            for (sent,), (received,) in schedule.doubling(self.rank, self.size):
                places = [(received.first + k) % self.size for k in range(received.num_blocks)]
                data = b"".join(blocks[(sent.first + k) % self.size] for k in range(sent.num_blocks))
                incoming = new_memory(sum(len(blocks[place]) for place in places))
                sending = self._give(memoryview(data), sent.peer, call)
                Request.Waitall((self._get(incoming, received.peer, call), sending))
                for place in places:
                    blocks[place][:], incoming = incoming[: len(blocks[place])], incoming[len(blocks[place]) :]
            return
        step = schedule.spread(self.rank, self.size)
        self._swap(step, call, lambda message: blocks[self.rank], lambda message: blocks[message.peer])

    def _exchange(self, outgoing: Sequence[memoryview], incoming: Sequence[memoryview], call: int) -> None:
        """Block j to rank j, and everybody's for me into its place."""
        self._put_own((outgoing[self.rank], buffer_of(incoming[self.rank]).datatype), incoming[self.rank])
        step = schedule.exchange(self.rank, self.size)
        self._swap(step, call, lambda message: outgoing[message.peer], lambda message: incoming[message.peer])

    def _versions(self, own: memoryview, place: int) -> list[memoryview]:
        """Room for everybody's version of a block, and the own one among them."""
        return [own if rank == place else new_memory(len(own)) for rank in range(self.size)]

    def _combined(self, blocks: Sequence[memoryview], datatype: Any, op: Op, call: int) -> memoryview:
        """What all have in the block of this rank, combined."""
        parts = self._versions(new_memory(len(blocks[self.rank])), self.rank)
        self._exchange(blocks, parts, call)
        _combine(parts, BufferSpec(parts[self.rank], datatype), op)
        return parts[self.rank]


class _Barrier:
    """Rounds of messages to ranks at distance 1, 2, 4, ...: each is sent when the message of the last has come."""

    def __init__(self, comm: Collective, call: int) -> None:
        self.request = Request(comm.endpoint.poller)
        self._comm, self._call, self._distance = comm, call, 1
        self._receive: Receive | None = None
        self._advance()

    def _advance(self) -> None:
        comm, poller = self._comm, self._comm.endpoint.poller
        error = self._receive.error if self._receive is not None else None
        if error is not None or self._distance >= comm.size:
            poller.complete(self.request, error)
            return
        distance, self._distance = self._distance, 2 * self._distance
        try:
            nothing = new_memory(0)
            comm._give(nothing, (comm.rank + distance) % comm.size, self._call)
            self._receive = comm._get(nothing, (comm.rank - distance) % comm.size, self._call)
        except CommunicationError as failure:
            poller.complete(self.request, str(failure))
            return
        poller.when_done(self._receive, self._advance)


def _parts_of(given: BufferSpec, size: int) -> list[memoryview]:
    """An even partition by elements."""
    spans = partition.even_partition(len(given.view) // given.datatype.itemsize, size)
    return blocks_of((given.view, [numel for _, numel in spans], [begin for begin, _ in spans], given.datatype), size)


def _combine(parts: Sequence[memoryview], out: BufferSpec, op: Op) -> None:
    arrays = [BufferSpec(part, out.datatype).array() for part in parts]
    combine(arrays, op, out.array())
