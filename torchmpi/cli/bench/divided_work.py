"""The contestants of ``torchmpi bench parallel``: ways to do the work of one model on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ONE_PROCESS = "one process"
"""The contestant that the others are compared with: rank 0 with one thread."""


class ParallelContestant(NamedTuple):
    """A way to do the work of one step."""

    name: str
    step: Callable[[], object]
    """Runs one step; collective, unless `alone`."""
    alone: bool = False
    """Whether rank 0 does the work, while the other ranks sleep."""
    why_not: str | None = None
    """Why this rank has no right result, which is then not timed."""
