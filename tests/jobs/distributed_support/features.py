"""Checks of features: each makes a call and compares its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "mpi"))


class Feature(NamedTuple):
    """One line of the table."""

    section: str
    name: str
    check: Callable[[], None]
    """Raises where it does not work."""
    renews: bool
    """Whether the group cannot be used after it."""
    turn: int
    """When it is checked: those after turn 0 leave a process behind that cannot make groups any more, or none."""


FEATURES: list[Feature] = []
Check = Callable[[], None]


def feature(section: str, name: str, *, renews: bool = False, turn: int = 0) -> Callable[[Check], Check]:
    """Have a function checked, on every rank."""

    def register(check: Check) -> Check:
        FEATURES.append(Feature(section, name, check, renews, turn))
        return check

    return register


class Wrong(AssertionError):
    """The result differs from the expected one."""


def equal(actual: Any, expected: Any) -> None:
    """Tensors are compared in shape, dtype and values."""
    if isinstance(actual, torch.Tensor):
        expected = torch.as_tensor(expected, dtype=actual.dtype)
        same = actual.shape == expected.shape and torch.equal(actual.detach(), expected.detach())
    else:
        same = actual == expected
    if not same:
        raise Wrong(f"wrong result: {actual!r} instead of {expected!r}")


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> None:
    """For results with rounding errors."""
    if not torch.allclose(actual.detach(), expected.detach(), rtol=tolerance, atol=tolerance):
        raise Wrong(f"wrong result: {actual!r} instead of {expected!r}")


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> BaseException:
    """The error of a call that has to fail."""
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
    """Of this process."""
    return dist.get_rank()


def other() -> int:
    """The rank of the other process; there are two."""
    return 1 - dist.get_rank()


def ones(*shape: int) -> torch.Tensor:
    """1 on rank 0, 2 on rank 1: the sum is 3."""
    return torch.full(shape or (3,), rank() + 1.0)
