"""From a backend to an operation: announced to the other ranks, and chosen by the size of the tensor."""

from __future__ import annotations

from typing import Any

import torch

from . import Backend, Operation


def bind(backend: Backend, group: Any, verb: str, dtype: torch.dtype | None, op: str | None) -> Operation:
    """A verb on a group, which shows the others what it is if the backend itself does not."""
    operation = backend.bind(group, verb, dtype, op)
    return operation if backend.announces else announced(group, operation)


def announced(group: Any, operation: Operation) -> Operation:
    """Show the others the call that the ledger has entered, and run it."""
    announce = group.ledger.announce

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
