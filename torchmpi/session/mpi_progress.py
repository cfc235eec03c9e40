"""Progress of MPI between the calls of a rank, for jobs on several hosts.

A send may end for the sender while its data still wait in the process: MPI has copied them, and the connection takes no
more at the moment. Libraries without a thread of their own send the rest in the next call of MPI. A rank whose next
call waits in shared memory, or that computes, makes none, and its peer waits: for ever if this rank waits for a third
one that waits for the peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_PERIOD_SECONDS = 0.01
# As many elements as torch divides among two threads, at least.
_PARALLEL_NUMEL = 1 << 17


def start(MPI: Any) -> Callable[[], None]:
    """Start a thread that makes a short call of MPI periodically, and return the function that ends it.

    MPI must allow calls by several threads. End the thread before MPI is finalized.
    """
    stopped = threading.Event()

    def run() -> None:
        join_openmp()
        while not stopped.wait(_PERIOD_SECONDS):
            MPI.COMM_SELF.Iprobe(source=0)

    thread = threading.Thread(target=run, name="torchmpi MPI progress", daemon=True)
    thread.start()

    def end() -> None:
        stopped.set()
        thread.join()

    return end


def join_openmp() -> None:
    """Let OpenMP count one thread more than torch's, so that its threads wait by sleeping.

    They poll for milliseconds if there are no more of them than cores. But between hosts a thread of this process polls
    in MPI meanwhile, which OpenMP does not count: it lost the core to them, and links were idle.
    """
    torch.ones(_PARALLEL_NUMEL, device="cpu").add_(1)
