"""The protocol of backends: each is one class that runs collectives on contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol, get_args

import numpy as np
import torch

from ..collective_specs import COLLECTIVES, SPECS
from ..communicators.group import Group
from ..config import BackendName

Operation = Callable[[Any, Any, int], Any]
"""``operation(source, destination, root) -> result``, on contiguous tensors of a device that the backend accepts."""

NAMES: tuple[str, ...] = get_args(BackendName)
"""All backends of the design, implemented or not."""


class TensorTable(Protocol):
    """Tensors at separate addresses that an operation reduces as one stream of bytes.

    An operation has the attribute ``many``, an operation on such a table, if its backend supports tables.
    """

    table: np.ndarray
    """For each tensor its offset in the stream, address and length in bytes."""
    num_bytes: int
    """The length of the stream."""


class Backend(Protocol):
    """A backend as the selector and the collectives use it."""

    name: str
    """The value that users pass as ``backend=``."""

    announces: bool
    """Whether its operations themselves publish and compare the calls of the ranks."""

    enqueues: bool
    """Whether its operations on device tensors enqueue on the current stream and return. Other operations have
    completed when they return, and use device memory, if they accept it, without regard to streams."""

    @property
    def device_types(self) -> Collection[str]:
        """The types of devices whose tensors it takes, staged or not."""

    @property
    def collectives(self) -> Collection[str]:
        """The names of the collectives that it has, and of the other rows of `collective_specs`."""

    def takes(self, device_type: str, collective: str) -> bool:
        """Return whether the collective accepts tensors of this device type; others are staged through the host."""

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Return a reason of its own against a collective and device that it has; None if it knows none.

        :func:`refusal` asks, after the questions that are the same for all backends.

        With a group, the answer is for its ranks, and must be the same on all of them without communication. Without a
        group, it is None if the collective can run on some group.
        """

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective for repeated use on a group."""


def refusal(backend: Backend, collective: str, device_type: str, group: Group | None = None) -> str | None:
    """Return the reason why a backend cannot run a collective on such tensors, staged or not; None if it can.

    The answer is for the ranks of a group, or for some group: see `Backend.why_not`.
    """
    if device_type not in backend.device_types:
        return f"it takes {' and '.join(backend.device_types).upper()} tensors only"
    if collective not in backend.collectives:
        return f"it has no {collective}, only {', '.join(name for name in COLLECTIVES if name in backend.collectives)}"
    if device_type == "cuda" and not torch.cuda.is_available():
        return "this torch or this host has no CUDA"
    return backend.why_not(collective, device_type, group)


def collectives_of(*classes: type) -> frozenset[str]:
    """Return the collectives that are methods of some classes."""
    return frozenset(name for name in SPECS if any(hasattr(each, name) for each in classes))


def bind(backend: Backend, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
    """Prepare a collective on a group; its calls are published for the comparison between the ranks.

    An operation has the attribute ``compares`` if it compares the calls of a strict group itself.
    """
    operation = backend.bind(group, collective, dtype, op)
    announces = getattr(operation, "compares", False) if group.is_strict else backend.announces
    return operation if announces else announced(group, operation)


def announced(group: Group, operation: Operation) -> Operation:
    """Return an operation that publishes the current call before it runs; in a strict group, it compares the call."""
    announce = group.announce if group.is_strict else group.call_log.announce

    def run(tensor: Any, out: Any, root: int) -> Any:
        announce()
        return operation(tensor, out, root)

    many = getattr(operation, "many", None)
    if many is not None:
        run.many = announced(group, many)  # type: ignore[attr-defined]
    return run


def by_size(parts: list[tuple[int | None, Operation]], dtype: torch.dtype | None) -> Operation:
    """Return one operation from several, each for tensors of up to a number of bytes; the last takes all larger ones.

    >>> give = lambda result: lambda tensor, out, root: result
    >>> run = by_size([(8, give("small")), (None, give("large"))], torch.float32)
    >>> run(torch.ones(2), None, 0), run(torch.ones(3), None, 0)
    ('small', 'large')
    """
    (_, operation), *smaller = reversed(parts)
    for limit, small in smaller:
        assert limit is not None and dtype is not None
        operation = _switch(limit // dtype.itemsize, small, operation)
    limit, first = parts[0]
    if smaller and (cached := getattr(first, "cached_up_to", None)) is not None:  # the fast path, for short tensors
        operation.cached_call = partial(cached, limit)  # type: ignore[attr-defined]
    return operation


def _switch(most_numel: int, small: Operation, large: Operation) -> Operation:
    def run(tensor: torch.Tensor, out: Any, root: int) -> Any:
        return (small if tensor.numel() <= most_numel else large)(tensor, out, root)

    return run
