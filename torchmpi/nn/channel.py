"""Private communicators of a net, with separate call queues, and the size of its buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..communicators.communicator import NO_LEVEL, Communicator
from ..errors import ArgumentError, rank_prefix
from ..session import runtime


def default_bucket_bytes(bucket_bytes: int | None, tensors: Sequence[Tensor]) -> int:
    """Return `bucket_bytes`, or the setting for the device of `tensors` if it is None."""
    if bucket_bytes is not None:
        if bucket_bytes < 1:
            raise ArgumentError(f"{rank_prefix()}bucket_bytes={bucket_bytes} must be at least 1.")
        return bucket_bytes
    return runtime.current().config.bucket_bytes_on(tensors[0].device.type if tensors else "cpu")


def open_private(communicator: Communicator, name: str) -> Communicator:
    """Return a communicator of the same ranks with a separate call queue. Collective."""
    group = communicator.intra
    group.drain()
    private = group.duplicate(name)
    # Not a level of the stack: a span uses the groups of the levels, so it would not be private.
    return Communicator(NO_LEVEL, name, private, None, split=communicator.split, parent=communicator)


def close_private(communicator: Communicator) -> None:
    """Free a private communicator. Collective."""
    if not communicator.intra.call_queue.closed:
        communicator.intra.free()
