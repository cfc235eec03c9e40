"""Exceptions that programs for Horovod catch by name."""

from __future__ import annotations

from ..errors import GradientError, NotStartedError, TorchMPIError


class HorovodInternalError(TorchMPIError):
    """A collective failed: the ranks made different calls, or a rank has left."""


class EarlyGradientError(GradientError, AssertionError):
    """A gradient is used between backward and its synchronization: an assertion of Horovod."""


class HostsUpdatedInterrupt(Exception):
    """The set of hosts has changed. Never raised here: a job under MPI keeps its ranks.

    Args:
        skip_sync: Whether the state need not be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The library differs from the one that another process has. Never raised here."""


class internal_errors:
    """Raise errors of a call as :class:`HorovodInternalError`; those about arguments are ValueErrors and unchanged."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, TorchMPIError):
            refuse(error)


def refuse(error: TorchMPIError) -> None:
    """Raise an error of a call as :class:`internal_errors` does; return for one that stays as it is."""
    if isinstance(error, (ValueError, HorovodInternalError)):
        return
    if isinstance(error, NotStartedError):
        raise HorovodInternalError("torchmpi has been stopped or never started. Call hvd.init() first.") from None
    raise HorovodInternalError(str(error)) from error
