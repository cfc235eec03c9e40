"""Transports. Each is one class that runs verbs on contiguous tensors and says what it cannot do, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

Operation = Callable[[Any, Any, int], Any]
"""``operation(source, destination, root) -> result``, on contiguous tensors of a device the backend takes."""

NAMES = ("mpi", "shm", "p2p", "hierarchical", "nccl", "ipc", "gloo")
"""All backends of the design; :mod:`torchmpi.backends.selector` knows which exist."""


class TensorTable(Protocol):
    """Tensors at separate addresses that an operation reduces as one stream of bytes.

    An operation has the attribute ``many``, an operation on such a table, if its backend can do that.
    """

    table: np.ndarray
    """For each tensor its offset in the stream, address and length in bytes."""
    num_bytes: int
    """The length of the stream."""


class Backend(Protocol):
    """What the selector and the verbs need to know of a transport."""

    name: str
    """The word users pass as ``backend=``."""

    announces: bool
    """Whether its operations show the other ranks by themselves what is called, and compare."""

    enqueues: bool
    """Whether its operations on tensors of a device enqueue on the current stream and return; others have ended when
    they return, and take memory of a device, if they take it at all, without regard to streams."""

    def takes(self, device_type: str) -> bool:
        """Whether tensors of this device are handed over as they are; others are staged through the host."""

    def why_not(self, collective: str, device_type: str, group: Any = None) -> str | None:
        """None if the verb can run on such tensors, staged or not, or the reason why it cannot.

        With a group: whether it can among these ranks; the answer must be the same on all of them, without asking them.
        Without: whether it can among any.
        """

    def bind(self, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb for repeated use on a group."""


def bind(backend: Backend, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
    """A verb on a group, which shows the others what it is if the backend itself does not."""
    operation = backend.bind(group, collective, dtype, op)
    return operation if backend.announces else announced(group, operation)


def announced(group: Any, operation: Operation) -> Operation:
    """Show the others the call that the ledger has entered, and run it."""
    announce = group.call_log.announce

    def run(tensor: Any, out: Any, root: int) -> Any:
        announce()
        return operation(tensor, out, root)

    return run


def by_size(parts: list[tuple[int | None, Operation]], dtype: torch.dtype | None) -> Operation:
    """One operation from several for tensors of up to so many bytes, of which the last takes the rest.

    >>> say = lambda word: lambda tensor, out, root: word
    >>> run = by_size([(8, say("small")), (None, say("large"))], torch.float32)
    >>> run(torch.ones(2), None, 0), run(torch.ones(3), None, 0)
    ('small', 'large')
    """
    (_, operation), *smaller = reversed(parts)
    for limit, small in smaller:
        assert limit is not None and dtype is not None
        operation = _switch(limit // dtype.itemsize, small, operation)
    return operation


def _switch(most_numel: int, small: Operation, large: Operation) -> Operation:
    def run(tensor: torch.Tensor, out: Any, root: int) -> Any:
        return (small if tensor.numel() <= most_numel else large)(tensor, out, root)

    return run
