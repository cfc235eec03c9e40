"""The communicator a net uses: the one the user means, or a private one that nothing else communicates on."""

from __future__ import annotations

from ..communicators.communicator import Communicator
from ..session import runtime


def resolve(comm: int | Communicator | None) -> Communicator:
    """The communicator meant by a ``comm=`` argument: None is the current one, a number is a level."""
    return runtime.communicator(comm)


def default_bucket_bytes(bucket_bytes: int | None) -> int:
    """`bucket_bytes`, or what the settings say if it is None."""
    return runtime.current().config.bucket_bytes if bucket_bytes is None else bucket_bytes


def open_private(communicator: Communicator, name: str) -> Communicator:
    """The same ranks with an order of calls of their own. Collective; give it back with `close_private`."""
    group = communicator.intra
    group.drain()
    private = group.duplicate(name)
    # No level of the stack: a span, which runs on the groups of the levels, would not be private.
    return Communicator(-1, name, private, None, split=communicator.split, parent=communicator)


def close_private(communicator: Communicator) -> None:
    """Give a private communicator back. Collective."""
    if not communicator.intra.call_queue.closed:
        communicator.intra.free()
