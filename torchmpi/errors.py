"""The exceptions of torchmpi.

Messages name the rank, the call, the error and the remedy. :class:`TorchMPIError` is the base of all exceptions; errors
about arguments are also ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Set the rank that :func:`rank_prefix` names; None if this process is no rank."""
    global _rank
    _rank = rank


def kind_of(value: object) -> str:
    """Return the name of a class with its article, for messages.

    >>> kind_of(3), kind_of([])
    ('an int', 'a list')
    """
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return a noun after "a" or "an"."""
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"


def rank_prefix() -> str:
    """Return the beginning of messages of code that knows no communicator; '' before ``start()``.

    >>> rank_prefix()
    ''
    """
    return "" if _rank is None else f"rank {_rank}: "


class TorchMPIError(RuntimeError):
    """Base of all exceptions of torchmpi."""

    reason_is_elsewhere = False
    """Whether another rank aborted the call, so that the reason is in the message of that rank."""


# --- life cycle ------------------------------------------------------------------------------------


class NotStartedError(TorchMPIError):
    """A call that needs a running torchmpi was made before ``start()`` or after ``stop()``."""


class AlreadyStartedError(TorchMPIError):
    """``start()`` was called twice."""


class MissingMPIError(TorchMPIError):
    """No MPI library could be loaded."""


class LaunchError(TorchMPIError):
    """The launcher and the MPI library do not fit together, or MPI cannot be initialized again."""


# --- arguments, rejected before any communication -----------------------------------------------------


class ArgumentError(TorchMPIError, ValueError):
    """An argument has an invalid value: operation, root, level, shape, layout."""


class ConfigError(ArgumentError):
    """A setting is unknown or has an invalid value."""


class DtypeError(ArgumentError, TypeError):
    """The operation does not support the data type, or the argument is not a tensor."""


class KeywordError(ArgumentError, TypeError):
    """A call has a keyword that the function does not have."""


class DeviceError(ArgumentError):
    """The call does not support the device of the tensor."""


class CommunicatorError(ArgumentError):
    """The communicator is unknown, closed, or unsuitable for the call."""


class BackendUnavailableError(ArgumentError):
    """The requested backend cannot run this call here, for the reason in the message."""


class HookError(ArgumentError, AttributeError):
    """An engine has no hook point of this name, or the hook is not callable."""


# --- mismatches between ranks ----------------------------------------------------------


class MismatchError(TorchMPIError):
    """Ranks called different collectives, or one collective with different shapes, dtypes, operations or roots."""

    calls: Mapping[int, str] = MappingProxyType({})
    """The calls of ranks of the group, as far as they are known."""
    exited: Mapping[int, int] = MappingProxyType({})
    """The ranks of the world at the end of their programs, as far as they are known, and how they got there."""


class ReplicaError(TorchMPIError):
    """A parameter or buffer that should be equal on all ranks differs between ranks."""


class GradientError(TorchMPIError):
    """A gradient was computed at the wrong time or has the wrong form, or backward failed on some rank."""


# --- errors at run time ----------------------------------------------------------------------------


class StallError(TorchMPIError):
    """A call waited longer than the configured limit."""


class TransportError(TorchMPIError):
    """A communication library, for instance NCCL, is missing or has failed; the message includes its error."""


class RankLostError(TorchMPIError):
    """A rank was killed, or its host was lost: with ``on_lost_rank="raise"``, :func:`torchmpi.recover` continues."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.seconds = time.monotonic()
        """When the call failed, on the clock of ``time.monotonic()``: a handle may raise it much later."""


class InternalError(TorchMPIError):
    """A check of the compiled kernels failed (``TORCHMPI_KERNEL_CHECKS=1``): a bug in torchmpi."""


class JobError(TorchMPIError):
    """A job started by a command failed or exceeded its time limit, or its results could not be written."""


class CheckpointError(TorchMPIError):
    """A checkpoint is missing, damaged, or was written by another kind of job."""


class DatasetError(TorchMPIError):
    """The data of :func:`torchmpi.shared_dataset` cannot be made or shared; raised on all ranks."""
