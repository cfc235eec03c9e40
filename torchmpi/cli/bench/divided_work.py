"""The contestants of ``torchmpi bench parallel``: ways to do the work of one model on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bench_job import BenchJob

ONE_PROCESS = "one process"
"""The contestant that the others are compared with: rank 0 with one thread."""
_TOLERANCE = 1e-4


class ParallelContestant(NamedTuple):
    """A way to do the work of one step."""

    name: str
    step: Callable[[], object]
    """Runs one step; collective, unless `alone`."""
    alone: bool = False
    """Whether rank 0 does the work, while the other ranks sleep."""
    why_not: str | None = None
    """Why this rank has no right result, which is then not timed."""
    held_bytes: int = 0
    """What this rank holds between steps: parameters, gradients, state of the optimizer."""


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of the parameters of this rank, of their gradients and of the state of their optimizer.

    >>> layer = nn.Linear(3, 1)
    >>> layer(torch.ones(3)).backward()
    >>> held_bytes(layer)
    32
    """
    tensors: list[Any] = list(model.parameters())
    tensors += [each.grad for each in tensors if each.grad is not None]
    states = [] if optimizer is None else optimizer.state.values()
    tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes for each in tensors)


def compared(
    job: BenchJob,
    name: str,
    step: Callable[[], float],
    expected: Sequence[float],
    held: Callable[[], int] = lambda: 0,
) -> ParallelContestant:
    """Run the first steps, and return a contestant that is refused if its losses are not those of one process.

    A loss is the average of what the ranks return. Collective.
    """
    losses = [job.comm.allreduce(step()) / job.size for _ in expected]
    is_right = all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(losses, expected, strict=True))
    why_not = None if is_right else f"wrong: the losses are {losses} instead of {list(expected)}"
    return ParallelContestant(name, step, why_not=why_not, held_bytes=held())
