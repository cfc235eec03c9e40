"""Recognizes processes that a rank has made, by fork or multiprocessing, such as DataLoader workers: they are no ranks.

A child inherits the variables of its launcher, and with ``spawn`` nothing else of its rank, so it would pass for that
rank. The configuration that multiprocessing passes to its children, by every start method, is memory that a fork copies
too; in it, ``start()`` notes the rank and its process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
from typing import Any

_KEY = "torchmpi rank"


def note_rank(rank: int) -> None:
    """Note that this process is a rank, until ``forget_rank()``."""
    _configuration()[_KEY] = rank, os.getpid()


def forget_rank() -> None:
    """Note that this process is no rank any more."""
    _configuration().pop(_KEY, None)


def why_no_rank() -> str:
    """Return why this process is no rank and cannot become one; '' if it is no child of a rank.

    >>> why_no_rank()
    ''
    """
    rank, process = _configuration().get(_KEY, (0, os.getpid()))
    if process == os.getpid():
        return ""
    return (
        f"This process is no rank: it was forked or spawned by rank {rank}, as a DataLoader worker or by "
        "multiprocessing. Call torchmpi in the main process only, also start(), and pass what a worker needs, such as "
        "mpi.rank(), to the dataset. (A spawned process runs the lines of the main module outside of "
        "`if __name__ == '__main__':` again.)"
    )


def remove_semaphores() -> None:
    """Remove the files of semaphores that this process has made for children, before it ends without exit handlers.

    The process that multiprocessing starts to remove them later is killed by the launcher with its rank.
    """
    synchronize = sys.modules.get("multiprocessing.synchronize")
    if synchronize is not None:
        for finalizer in list(multiprocessing.util._finalizer_registry.values()):  # type: ignore[attr-defined]
            if finalizer._callback == synchronize.SemLock._cleanup:
                with contextlib.suppress(OSError):
                    finalizer()


def _configuration() -> dict[str, Any]:
    return multiprocessing.current_process()._config  # type: ignore[attr-defined,no-any-return]
