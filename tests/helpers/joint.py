"""Hypothesis with several ranks: rank 0 finds the examples, all ranks try each, and a failure on one is raised on all.

If every rank searched for examples independently, a rank with an error would continue with other examples than the
other ranks, and the job would stall, which hides the error.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies
from mpi4py import MPI


def try_together(
    body: Callable[[Any], object], strategy: strategies.SearchStrategy[Any], *, max_examples: int = 25
) -> None:
    """Call ``body(example)`` on all ranks, with the same examples; a failure is that of the smallest one found."""
    comm = MPI.COMM_WORLD

    @hypothesis.settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=max_examples,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def lead(example: Any) -> None:
        comm.bcast((example,))
        _attempt(body, example)

    if comm.rank == 0:
        try:
            lead()
        finally:
            comm.bcast(None)
        return
    while (message := comm.bcast(None)) is not None:
        with contextlib.suppress(AssertionError):  # rank 0 raises it
            _attempt(body, *message)


def _attempt(body: Callable[[Any], object], example: Any) -> None:
    """One example, and its first error on any rank."""
    problem = ""
    try:
        body(example)
    except Exception as error:
        problem = "".join(traceback.format_exception(error, limit=-4))
        # If the other ranks wait in a call, this is the only output.
        print(problem, file=sys.__stderr__, flush=True)
    everywhere = MPI.COMM_WORLD.allgather(problem)
    failed = [f"rank {rank}: {theirs}" for rank, theirs in enumerate(everywhere) if theirs]
    assert not failed, "\n".join(failed)
