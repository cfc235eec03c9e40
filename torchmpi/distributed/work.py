"""Works: the objects by which torch.distributed waits for calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.message_handle import MessageHandle
from ..collectives.short_messages import DeferredReceive
from ..communicators.group import Group
from ..communicators.handle import Handle, JoinedHandle
from ..errors import StallError

Future = torch.futures.Future[Any]


class CompletedWork(dist.Work):
    """Work of a synchronous call, which had ended when it returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True immediately."""
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        """Return True: a failed call has raised."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def exception(self) -> None:
        """Return None: a failed call has raised."""

    def get_future(self) -> Future:
        future: Future = torch.futures.Future()
        future.set_result([])
        return future


COMPLETED = CompletedWork()
"""The work of all synchronous calls."""


class EndedMessage(CompletedWork):
    """Work of a message that had ended when the call returned."""

    def __init__(self, tensor: torch.Tensor, source: int) -> None:
        super().__init__()
        self._tensor, self._source = tensor, source

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def get_future(self) -> Future:
        future: Future = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


def awaited_ranks(group: Group) -> str:
    """Return the ranks whose messages a call of a group awaits; '' over an MPI library, which does not tell."""
    comms = [part.comm for part in (group, group.inter_host) if part is not None and hasattr(part.comm, "awaited")]
    return ", ".join(sorted({name for comm in comms for name in comm.awaited()}))


@dataclass
class GroupWorks:
    """What the works of a process group have in common.

    Attributes:
        awaited: Names the ranks for which a call waits.
        limit_seconds: The longest wait for a call; 0 for any time.
        block: The works in the block of a coalescing manager so far; None outside of a block.
    """

    awaited: Callable[[], str] | None = None
    limit_seconds: float = 0.0
    block: list[PendingWork] | None = None


class PendingWork(dist.Work):
    """Work of a call in the background."""

    _future: Future | None = None
    value: Any = None
    """The value of the future, if not what the call writes: that in the lists in which it was passed."""
    _when_late: Callable[[], object] | None = None

    def __init__(
        self, handle: Handle[Any], outputs: list[torch.Tensor], works: GroupWorks, limit_seconds: float | None = None
    ) -> None:
        """Make the work of a call that writes `outputs`; `limit_seconds`: its own limit of a wait."""
        super().__init__()
        self._handle, self._outputs = handle, outputs
        self._limit_seconds = works.limit_seconds if limit_seconds is None else limit_seconds
        handle.awaited = works.awaited
        if works.block is not None:
            works.block.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has ended; raise its error, or StallError after `timeout` or the group's timeout."""
        seconds = timeout.total_seconds() if timeout else 0.0
        if seconds <= 0:
            self._handle.run_here()
        try:
            self._handle.wait(seconds if seconds > 0 else self._limit_seconds or None)
        except StallError:
            if self._when_late is not None and not self._handle.done():
                self._when_late()
            raise
        return True

    def when_failed(self, action: Callable[[], object]) -> None:
        """Call `action` when the call has failed, and when a wait for it has exceeded its timeout."""
        self._when_late = action
        self._handle.when_done(lambda: action() if self._handle.failed else None)

    def synchronize(self) -> None:
        """Call :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._handle.done()

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self._handle.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if it has failed."""
        return self._handle.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the call writes."""
        return self._outputs

    def get_future(self) -> Future:
        """Return a future of the tensors that the call writes."""
        if self._future is None:
            devices: list[Any] = []
            for tensor in self._outputs:
                if not (tensor.is_cpu or tensor.device in devices):
                    devices.append(tensor.device)
            ended: Future = torch.futures.Future(devices=sorted(devices, key=str))
            # C++ waits for the child: only a child carries an error in the form that C++ expects. A future that was
            # given an exception in Python returns it as its value (torch 2.13).
            self._future = ended.then(methodcaller("value"))
            self._handle.when_done(partial(self._complete, ended))
        return self._future

    def _complete(self, future: Future) -> None:
        error = self._handle.error
        if error is None:
            future.set_result(self._outputs if self.value is None else self.value)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


class MessageWork(PendingWork):
    """Work of one point-to-point message."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block as :meth:`PendingWork.wait`; cancel a receive that exceeds the timeout of the group."""
        if not timeout and type(self._handle) is DeferredReceive and self._handle.receive():
            return True
        if timeout is not None and timeout.total_seconds() > 0:
            return super().wait(timeout)
        message = self._message
        try:
            message.wait(self._limit_seconds or None)
        except StallError:
            if not isinstance(message, MessageHandle):  # the error of one that has failed
                raise
            limit = f"the timeout of {self._limit_seconds:g} s that this group has"
            late = StallError(f"{message.description} has not ended within {limit}.")
            message.abort(late)
            raise late from None
        return True

    @property
    def _message(self) -> Any:
        """The message, which begins now if it has not; of a receive that has ended or failed, an ended handle."""
        return self._handle.handle() if isinstance(self._handle, DeferredReceive) else self._handle

    def source_rank(self) -> int:
        """Return the rank in the group that sent the message."""
        self.wait()
        handle = self._handle
        source: int = handle.source if isinstance(handle, (MessageHandle, DeferredReceive)) else -1
        return source

    _source_rank = source_rank


class JoinedWork(PendingWork):
    """Work of several calls that are one to the program."""

    def __init__(self, works: list[PendingWork], outputs: list[torch.Tensor]) -> None:
        handle = JoinedHandle([work._handle for work in works], None, "coalesced calls")
        super().__init__(handle, outputs, GroupWorks())
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all calls have ended, each for its own timeout at most; raise the first error."""
        try:
            return all([work.wait(timeout) for work in self._works])
        finally:
            self.exception()  # after an error those of the other calls count as seen


def joined(works: Sequence[dist.Work], outputs: list[torch.Tensor]) -> dist.Work:
    """Return the work of several calls."""
    pending = [work for work in works if isinstance(work, PendingWork)]
    return JoinedWork(pending, outputs) if pending else COMPLETED
