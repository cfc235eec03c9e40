"""The protocol of backends: each is one class that runs collectives on contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, get_args

import numpy as np
import torch

from ..collective_specs import COLLECTIVES, SPECS
from ..communicators.group import Group
from ..communicators.plan import Run
from ..config import BackendName
from ..shared_memory.fast_path import CachedCall
from ..tensors import bucket_plan

NAMES: tuple[str, ...] = get_args(BackendName)
"""All backends of the design, implemented or not."""


class TensorTable(Protocol):
    """Tensors at separate addresses that an operation reduces as one stream of bytes."""

    table: np.ndarray
    """For each tensor its offset in the stream, address and length in bytes."""
    num_bytes: int
    """The length of the stream."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a backend gives for a collective on a group."""

    run: Run
    """``run(source, destination, root) -> result``, on contiguous tensors of a device that the backend accepts."""
    run_list: Callable[[TensorTable, None, int], Any] | None = None
    """The same for tensors at separate addresses; None if the backend needs them packed."""
    compares: bool = False
    """Whether it compares the calls of a strict group itself."""
    cached_call: Callable[[int, int | None], CachedCall | None] | None = None
    """``cached_call(root, most_bytes)``: the call with a root for the fast path, for tensors of at most `most_bytes`
    (None: of any size); None if the fast path cannot run it."""
    cached_list: Callable[[int, int | None], CachedCall | None] | None = None
    """The same of the call that `run_list` runs."""


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

    def lacks(self, collective: str, dtype: torch.dtype | None, op: str | None) -> str | None:
        """Return the reason why it cannot run a collective that it has with a dtype and operation; None if it can."""
        return None

    def is_tested(self, group: Group) -> bool:
        """Return whether such groups have been tested with it; otherwise it runs on request only."""
        return True

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
    """Prepare a collective on a group; its calls are published for the comparison between the ranks."""
    operation = backend.bind(group, collective, dtype, op)
    announces = operation.compares if group.is_strict else backend.announces
    return operation if announces else announced(group, operation)


def announced(group: Group, operation: Operation) -> Operation:
    """Return an operation that publishes the current call before it runs; in a strict group, it compares the call."""
    announce = group.announce if group.is_strict else group.call_log.announce

    def after_announcement(run: Run) -> Run:
        def announce_and_run(tensor: Any, out: Any, root: int) -> Any:
            announce()
            return run(tensor, out, root)

        return announce_and_run

    run_list = None if operation.run_list is None else after_announcement(operation.run_list)
    return Operation(after_announcement(operation.run), run_list)


def on_rows(exchange: Run, size: int) -> Run:
    """Return an exchange of lists of parts, or of equal parts of two contiguous tensors, given one of lists."""

    def run(source: Any, destination: Any, root: int) -> Any:
        if not isinstance(source, torch.Tensor):
            exchange(source, destination, root)
        else:
            shape = size, source.numel() // size
            exchange(source.view(shape).unbind(), destination.view(shape).unbind(), root)
        return destination

    return run


def by_size(parts: list[tuple[int | None, Operation]], dtype: torch.dtype | None) -> Operation:
    """Return one operation from several, each for tensors of up to a number of bytes; the last takes all larger ones.

    >>> give = lambda result: Operation(lambda tensor, out, root: result)
    >>> run = by_size([(8, give("small")), (None, give("large"))], torch.float32).run
    >>> run(torch.ones(2), None, 0), run(torch.ones(3), None, 0)
    ('small', 'large')
    """
    (_, last), *smaller = reversed(parts)
    if not smaller:
        return last
    run, run_list = last.run, last.run_list
    for limit, operation in smaller:
        assert limit is not None and dtype is not None
        most_numel = limit // dtype.itemsize
        run = _switch(most_numel, operation.run, run)
        if run_list is not None:  # short lists may be packed
            run_list = _switch(most_numel, operation.run_list or _packing(operation.run), run_list)
    limit, first = parts[0]
    return Operation(run, run_list, cached_call=first.cached_call and partial(_limited, first.cached_call, limit))


def _limited(
    cached_call: Callable[[int, int | None], CachedCall | None], limit: int | None, root: int, most_bytes: int | None
) -> CachedCall | None:
    sizes = [size for size in (limit, most_bytes) if size is not None]
    return cached_call(root, min(sizes, default=None))


def _switch(most_numel: int, small: Run, large: Run) -> Run:
    def run(tensor: torch.Tensor, out: Any, root: int) -> Any:
        return (small if tensor.numel() <= most_numel else large)(tensor, out, root)

    return run


def _packing(run: Run) -> Run:
    """Return a function on tensor lists that packs them for one on a flat tensor."""

    def run_packed(tensors: Any, _: None, root: int) -> None:
        flat = bucket_plan.pack(tensors.work)
        run(flat, None, root)
        bucket_plan.unpack(flat, tensors.work)

    return run_packed
