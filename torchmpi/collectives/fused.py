"""An allreduce of many tensors: each where it lies if the transport can reach it there, else packed into messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..communicators.communicator import Communicator
from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers, fusion, streams
from ..tensors.tensor_lists import Pieces
from . import dispatch, prepared

_Tensor = torch.Tensor
_Started = tuple[Handle, Callable[[], object]]
"""A message under way, and what puts its result where it belongs."""


def allreduce_many(
    tensors: Iterable[_Tensor], *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> list[_Tensor]:
    """:func:`allreduce` of many tensors in few messages; in place, with the same bits as one by one.

    mpi.allreduce_many([p.grad for p in model.parameters()], op="avg")
    """
    return _start(tensors, op, comm, backend, asynchronous=False).wait()  # type: ignore[no-any-return]


def allreduce_many_async(
    tensors: Iterable[_Tensor], *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`allreduce_many` in the background; the messages are on their way while the next ones are packed."""
    return _start(tensors, op, comm, backend, asynchronous=True)


def _start(tensors: Iterable[_Tensor], op: str, comm: Comm, backend: str | None, *, asynchronous: bool) -> Handle:
    where = f"{runtime.current().world.where}: allreduce_many"
    tensors = list(tensors)
    for tensor in tensors:
        if not dispatch.is_simple(tensor):
            buffers.check(tensor, where, written=True)
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ArgumentError(f"{where}: a tensor is in the list twice, and would be reduced once. Pass each one once.")
    communicator = runtime.communicator(comm)
    lists = fusion.alike(tensors)
    way = _Way(op, communicator, backend, asynchronous)
    for alike in lists:
        way.plan(alike)  # refused here, if at all, before anything has been changed
    return _Delivering(tensors, [each for alike in lists for each in way.start(alike)])


def takes_as_they_lie(tensors: Sequence[_Tensor], comm: Communicator) -> bool:
    """Whether nothing need be packed to add these up; the same on all ranks."""
    way = _Way("sum", comm, None, False)
    return all(way.plan(alike).many is not None for alike in fusion.alike(tensors))


class _Way(NamedTuple):
    """How lists are reduced; each of tensors of one dtype on one device."""

    op: str
    comm: Communicator
    backend: str | None
    asynchronous: bool

    def plan(self, tensors: Sequence[_Tensor]) -> prepared.Plan:
        """What is prepared for such tensors."""
        dtype, device_type = tensors[0].dtype, tensors[0].device.type
        return dispatch.plan_for(
            self.comm, ("allreduce", self.op, dtype, device_type, True, self.backend, self.asynchronous)
        )

    def start(self, tensors: Sequence[_Tensor]) -> list[_Started]:
        """Call, now or in the background; gives what is still under way."""
        call = partial(dispatch.call, "allreduce", op=self.op, comm=self.comm, backend=self.backend)
        if len(tensors) == 1:
            handle = call(tensors[0], None, asynchronous=self.asynchronous)
            return [(handle, _nothing)] if self.asynchronous else []
        plan, group = self.plan(tensors), self.comm.intra
        if plan.many is not None:
            pieces = Pieces(tensors)
            if self.asynchronous:
                pieces.hold()
                return [(group.submit(plan.for_pieces(pieces), pieces, None, 0), pieces.deliver)]
            group.call(plan.for_pieces(pieces), pieces, None, 0)
            pieces.deliver()
            return []
        started: list[_Started] = []
        for members in fusion.plan_buckets(tensors, runtime.current().config.bucket_bytes):
            parts = [tensors[index] for index in members]
            if len(parts) == 1:
                started.append((call(parts[0], None, asynchronous=True), _nothing))
            else:
                flat = torch.cat([part.detach().reshape(-1) for part in parts])
                handle = call(flat, None, packed=tuple(part.shape for part in parts))
                started.append((handle, partial(_unpack, flat, parts)))
        return started


def _unpack(flat: _Tensor, parts: Sequence[_Tensor]) -> None:
    streams.use_here(flat)
    fusion.unpack(flat, parts)


def _nothing() -> None:
    """The result is where it belongs."""


class _Delivering(Handle):
    """Waits for all messages and puts the results where they belong."""

    __slots__ = ("_delivered", "_delivering", "_started", "_tensors")

    def __init__(self, tensors: list[_Tensor], started: list[_Started]) -> None:
        super().__init__("allreduce_many")
        self._tensors, self._started = tensors, started
        self._delivering = threading.Lock()

    def wait(self, timeout: float | None = None) -> Any:
        with self._delivering:
            if not self._is_done:
                for handle, deliver in self._started:
                    handle.wait(timeout)
                    deliver()
                self._delivered = streams.end_of(*self._tensors[:1])
                self.set_result(self._tensors)
        streams.follow(self._delivered, None)  # for another thread, which has a stream of its own
        return super().wait(timeout)

    def done(self) -> bool:
        return all(handle.done() for handle, _ in self._started)
