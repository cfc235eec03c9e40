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

_PERIOD_SECONDS = 0.01


def start(MPI: Any) -> Callable[[], None]:
    """Start a thread that makes a short call of MPI periodically, and return the function that ends it.

    MPI must allow calls by several threads. End the thread before MPI is finalized.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(_PERIOD_SECONDS):
            MPI.COMM_SELF.Iprobe(source=0)

    thread = threading.Thread(target=run, name="torchmpi MPI progress", daemon=True)
    thread.start()

    def end() -> None:
        stopped.set()
        thread.join()

    return end
