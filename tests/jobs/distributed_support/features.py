"""Checks of features: each makes a call and compares its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


class Feature(NamedTuple):
    """One line of the table."""

    section: str
    name: str
    check: Callable[[], None]
    """Raises if the feature does not work."""
    renews: bool
    """Whether the group cannot be used after the check."""
    turn: int
    """Order of the checks: after those with a turn above 0 the process cannot create groups, or has ended."""


FEATURES: list[Feature] = []
Check = Callable[[], None]


def feature(section: str, name: str, *, renews: bool = False, turn: int = 0) -> Callable[[Check], Check]:
    """Register a function as a check, which runs on every rank."""

    def register(check: Check) -> Check:
        FEATURES.append(Feature(section, name, check, renews, turn))
        return check

    return register


class Wrong(AssertionError):
    """The result differs from the expected one."""


def equal(actual: Any, expected: Any) -> None:
    """Raise unless two values are equal; tensors in shape, dtype and values."""
    if isinstance(actual, torch.Tensor):
        expected = torch.as_tensor(expected, dtype=actual.dtype)
        same = actual.shape == expected.shape and torch.equal(actual.detach(), expected.detach())
    else:
        same = actual == expected
    if not same:
        raise Wrong(f"wrong result: {actual!r} instead of {expected!r}")


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> None:
    """Raise unless two tensors are equal within the tolerance."""
    if not torch.allclose(actual.detach(), expected.detach(), rtol=tolerance, atol=tolerance):
        raise Wrong(f"wrong result: {actual!r} instead of {expected!r}")


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> BaseException:
    """Return the error of a call; raise if the call succeeds."""
    try:
        call()
    except kind as error:
        return error
    raise Wrong("no error")


def finished(works: Any) -> None:
    """Wait for the result of an asynchronous call, in one of its forms."""
    for work in works if isinstance(works, Iterable) else [works]:
        work.wait()


def without_addresses(backend: str) -> dict[str, str]:
    """Options of init_process_group under a launcher of MPI, or under torchrun."""
    return {"init_method": "mpi://"} if backend == "gloo" and "RANK" not in os.environ else {}


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank()


def other() -> int:
    """Return the rank of the other process; there are two."""
    return 1 - dist.get_rank()


def ones(*shape: int) -> torch.Tensor:
    """Return ones on rank 0 and twos on rank 1, whose sum is 3."""
    return torch.full(shape or (3,), rank() + 1.0)
