"""What happens when a rank dies without a word: the job ends.

An MPI library leaves that to its launcher. Here there is none, and who waits in shared memory for a rank that was
killed does not hear of its sockets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

_GRACE_SECONDS = 1.0
"""For a call that has failed for the same reason, and can say more."""


class LossWatch:
    """Of one rank, from start() to stop()."""

    def __init__(self, rank: int, end_job: Callable[[str, int], None]) -> None:
        self._rank, self._end_job = rank, end_job
        self._lost: list[int] = []
        self._is_over = threading.Event()

    def note(self, rank: int) -> None:
        """A connection has ended without a goodbye. Called by the thread that reads, which has more to do."""
        self._lost.append(rank)
        if len(self._lost) == 1:
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while it shuts down
                threading.Thread(target=self._end, name="torchmpi lost rank", daemon=True).start()

    def _end(self) -> None:
        # One rank is enough to say it: the lowest that is left. The others do so only if that has not helped.
        has_lower = any(rank not in self._lost for rank in range(self._rank))
        if not self._is_over.wait(_GRACE_SECONDS * (3 if has_lower else 1)):
            ranks = ", ".join(map(str, sorted(self._lost)))
            self._end_job(
                f"torchmpi: rank {self._rank}: rank {ranks} is gone without a word (killed?), which ends the job.", 1
            )

    def stop(self) -> None:
        """From now on, ranks may go."""
        self._is_over.set()
