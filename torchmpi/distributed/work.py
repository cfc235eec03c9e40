"""What torch.distributed calls return: the promise that a call has ended, in torch's form."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..communicators.handle import Handle
from ..errors import StallError
from .transfers import Transfer


class Ended(dist.Work):
    """A call that had ended when it returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It was."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def exception(self) -> None:
        """It raised already, if at all."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


ENDED = Ended()
"""Of synchronous calls, whose work nobody keeps."""


class Pending(dist.Work):
    """A call under way."""

    def __init__(self, handle: Handle, outputs: list[torch.Tensor], limit_seconds: float) -> None:
        super().__init__()
        self._handle, self._outputs, self._limit_seconds = handle, outputs, limit_seconds
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call has ended, or raise its error; also if it takes longer than `timeout`."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._handle.wait(seconds if seconds > 0 else self._limit_seconds or None)
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._handle.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._handle.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it has."""
        return self._handle.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call fills."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors that the call fills."""
        if self._future is None:
            self._future = _future_of(self._handle, self._outputs)
        return self._future


def _future_of(handle: Handle, outputs: list[torch.Tensor]) -> torch.futures.Future[Any]:
    devices: list[Any] = sorted({tensor.device for tensor in outputs if tensor.device.type != "cpu"}, key=str)
    ended: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

    def complete() -> None:
        error = handle.error
        if error is None:
            ended.set_result(outputs)
        else:
            ended.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    # What C++ waits for must carry the error as C++ knows it, which only a child future does (torch 2.13): one that
    # was given an exception in Python hands it out as its value.
    child: torch.futures.Future[Any] = ended.then(_value)
    handle.when_done(complete)
    return child


def _value(future: torch.futures.Future[Any]) -> Any:
    return future.value()


class PendingMessage(Pending):
    """A message under way; a receive knows from whom."""

    def __init__(self, transfer: Transfer, outputs: list[torch.Tensor], limit_seconds: float) -> None:
        super().__init__(transfer, outputs, limit_seconds)
        self._transfer = transfer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As :meth:`Pending.wait`; a receive is over when the group allows no more time."""
        if timeout is not None and timeout.total_seconds() > 0:
            return super().wait(timeout)
        try:
            self._transfer.wait(self._limit_seconds or None)
        except StallError:
            limit = f"the timeout of {self._limit_seconds:g} s that this group has"
            late = StallError(f"{self._transfer.what} has not ended within {limit}.")
            self._transfer.abort(late)
            raise late from None
        return True

    def source_rank(self) -> int:
        """The rank in the group whose message came."""
        self.wait()
        return self._transfer.source

    _source_rank = source_rank
