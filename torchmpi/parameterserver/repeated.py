"""Requests that a program repeats, by machine code: with the same rule, or into the same tensor, of a server.

The path through Python (:mod:`.server_requests`) remembers a request when it makes one like the last one. What is
remembered is dropped when something reads requests that pass through Python: a timeline, a profiler, a recorded run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..communicators.handle import Handle
from ..shared_memory import fast_path, kernels
from ..tensors import buffers, dlpack
from ..tensors import dtypes as dtype_table
from .kernels.shard_layout import RepeatedRequest, RepeatedRequests
from .remote import Answer
from .runs import observed_run
from .server_requests import RequestServer, ServerRequest

_MOST_REQUESTS = 16
"""Of a server, of each kind: machine code looks through all of them."""
_all: weakref.WeakSet[Repeater] = weakref.WeakSet()


def _nothing(tensor: object, key: object) -> None:
    """Leave a request to Python."""


class Repeater:
    """The requests of a client to a server whose shards are all in shared memory.

    Attributes:
        send: ``send(tensor, rule)`` applies the rule and returns the tensor, or a handle; None leaves it to Python. The
            rule is the object of the program, or what it has been prepared to, which is the same for equal rules.
        receive: ``receive(tensor, key)`` is the same for the values of the server; `key` is the tensor, or None if that
            has been made for the call.
    """

    def __init__(self, server: RequestServer) -> None:
        self._server = server
        self._last: list[Callable[[], object]] = [lambda: None, lambda: None]
        """Return the keys of the last send and of the last receive, unless that tensor has gone."""
        self._last_rule: object = None
        self._is_open = False
        self.send: Callable[[object, object], Any] = _nothing
        self.receive: Callable[[object, object], Any] = _nothing
        self._known: tuple[dict[int, tuple[RepeatedRequest, object]], ...] = ({}, {})
        """The sends and the receives by their keys, with what keeps those, or tells that one has gone."""
        self._record = RepeatedRequests.new()
        self._settler = self._settle  # machine code has its address

    def remember(self, request: ServerRequest, key: object) -> None:
        """Let machine code make requests like this one, if the last one was like it; the caller holds the lock.

        What is used once, such as a rule with a new learning rate, is not remembered. An equal rule that the program
        has made anew has another key, but the same prepared rule.
        """
        server = self._server
        if not (self._is_open and request.is_repeatable and _may_repeat()):
            return
        is_receive = request.rule is None
        last, known = self._last[is_receive](), self._known[is_receive]
        if not is_receive:
            before, self._last_rule = self._last_rule, request.rule
            if last is not key and before is request.rule:
                last = key = request.rule
        keeper: Callable[[], object] = (lambda: key) if not isinstance(key, torch.Tensor) else weakref.ref(key)
        self._last[is_receive] = keeper
        if last is not key or id(key) in known:
            return
        if self.send is _nothing:
            self._make_functions()
        plan, numbers = server.actor.prepared(server.shards, (0, server.numel), request.rule, server.versions)
        made = RepeatedRequest.new().write(key=id(key))
        made.cells[RepeatedRequest.prepared : RepeatedRequest.prepared + len(plan)] = plan
        made.cells[RepeatedRequest.numbers : RepeatedRequest.numbers + len(numbers)] = numbers
        if isinstance(key, torch.Tensor):  # whose memory can be written: Python has looked
            made.write(address=key.data_ptr())
            keeper = weakref.ref(key, partial(_forget, weakref.ref(self), id(key)))
        if len(known) >= _MOST_REQUESTS:
            known.clear()
        known[id(key)] = made, keeper
        self._link()

    def _make_functions(self) -> None:
        server = self._server
        self._path = fast_path.objects_for(self._settler)
        self._record.write(
            path=self._path, run_lock=server.lock.address, plan=server.actor.address, numel=server.numel,
            num_bytes=server.numel * server.dtype.itemsize, dlpack_dtype=dlpack.dtype_number(server.dtype),
            dtype=dtype_table.info(server.dtype).code, sends=server.sends.address, receives=server.receives.address,
        )  # fmt: skip
        self.send = kernels.with_record("repeat_send", "repeat_send", int(self._record))
        self.receive = kernels.with_record("repeat_receive", "repeat_receive", int(self._record))
        _all.add(self)

    def forget(self, key: int | None = None) -> None:
        """Drop the receives of a key, or all requests."""
        if key is None:
            for known in self._known:
                known.clear()
        else:
            self._known[1].pop(key, None)
        self._link()

    def open(self) -> None:
        """Begin, or after :meth:`close` begin again, to leave requests to machine code."""
        self._is_open = self._server.context.repeats

    def close(self) -> None:
        """Leave all requests to Python."""
        self._is_open, self.send, self.receive = False, _nothing, _nothing
        self.forget()

    def _link(self) -> None:
        """Write the chains that machine code follows, which holds the GIL as this does."""
        firsts: list[int] = []
        for known in self._known:
            following = 0
            for made, _ in list(known.values()):
                made.write(following=following)
                following = int(made)
            firsts.append(following)
        self._record.write(first_send=firsts[0], first_receive=firsts[1])

    def _settle(self, status: int, tensor: torch.Tensor, key: object, is_receive: int) -> Handle[Any]:
        """Continue a request that machine code has begun, and that waits for a lock; return its handle."""
        server, record = self._server, self._server.receives if is_receive else self._server.sends
        handle: Handle[Any] = Handle(f"{server.group.where}: parameterserver.{'receive' if is_receive else 'send'}")
        actor = server.actor
        try:
            actor.finish()
            record.end(Answer(actor.versions, actor.num_chunks, actor.ages))
            if is_receive:
                buffers.touch(tensor)
        except Exception as error:
            record.withdraw()
            server.context.note_failed(handle, error)
        else:
            handle.end(tensor if is_receive else None)
        return handle


def _may_repeat() -> bool:
    return fast_path.takes_calls() and observed_run.active is None


def _forget(repeater: weakref.ref[Repeater], key: int, _: object) -> None:
    if (found := repeater()) is not None:
        found.forget(key)


def forget_all() -> None:
    """Drop the requests of all servers."""
    for repeater in list(_all):
        repeater.forget()


fast_path.when_invalidated.append(forget_all)
observed_run.when_changed.append(forget_all)
