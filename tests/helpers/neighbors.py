"""The ranks before and after this one, in a ring of all ranks."""

from __future__ import annotations

import torchmpi as mpi


def neighbors() -> tuple[int, int]:
    """Return the rank before this one and the one after it."""
    return (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
