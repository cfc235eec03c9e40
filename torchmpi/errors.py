"""Every exception torchmpi raises on purpose, in one tree.

Messages follow one pattern: *which rank*, *which call*, *what was wrong*, *what to do about it*. Catch
:class:`TorchMPIError` for all of them; the argument errors are also ``ValueError`` or ``TypeError``, so
code that knows nothing of torchmpi treats them as usual.
"""

from __future__ import annotations


class TorchMPIError(RuntimeError):
    """Base of everything raised here."""


# --- life cycle ------------------------------------------------------------------------------------


class NotStartedError(TorchMPIError):
    """A call that needs a running runtime came before ``start()`` or after ``stop()``."""


class AlreadyStartedError(TorchMPIError):
    """``start()`` was called twice."""


class MissingMPIError(TorchMPIError):
    """No MPI library could be loaded."""


class LaunchError(TorchMPIError):
    """The launcher and the MPI library do not belong together, or the ranks disagree about the job."""


# --- arguments, refused before any communication -----------------------------------------------------


class ArgumentError(TorchMPIError, ValueError):
    """An argument has a wrong value: operation, root, level, shape, layout."""


class ConfigError(ArgumentError):
    """A setting is unknown or has a wrong value."""


class DtypeError(ArgumentError, TypeError):
    """The data type cannot take part in this operation, or the argument is no tensor at all."""


class DeviceError(ArgumentError):
    """The tensor lives on a device this call cannot use."""


class CommunicatorError(ArgumentError):
    """The communicator is unknown, closed, or does not fit the call."""


class BackendUnavailableError(ArgumentError):
    """The backend asked for cannot run this call here; the message has the reason."""


class HookError(ArgumentError, AttributeError):
    """An engine has no hook point of this name, or what was put there cannot be called."""


# --- several ranks that do not fit together ----------------------------------------------------------


class MismatchError(TorchMPIError):
    """Ranks called different collectives, or the same with other shapes, dtypes, operations or roots."""

    reason_is_elsewhere = False
    """Whether this rank only knows that another has given the call up, and that one's message has the reason."""


class ReplicaError(TorchMPIError):
    """Replicas that should be equal are not: a parameter or buffer differs between ranks."""


class GradientError(TorchMPIError):
    """A gradient came at the wrong time or in the wrong form, or the backward failed on some rank."""


# --- trouble while running ----------------------------------------------------------------------------


class StallError(TorchMPIError):
    """A wait took longer than the configured limit."""


class TransportError(TorchMPIError):
    """A library that moves data, NCCL for instance, is missing or has failed; the message has its own words."""


class InternalError(TorchMPIError):
    """A check of the compiled kernels failed (``TORCHMPI_KERNEL_CHECKS=1``): a bug in torchmpi."""


class CudaError(TorchMPIError):
    """A call of the CUDA driver failed."""


class JobError(TorchMPIError):
    """A job that a command has started failed or did not end in time, or its results could not be written."""


class CheckpointError(TorchMPIError):
    """A checkpoint is missing, damaged, or was written by another kind of job."""
