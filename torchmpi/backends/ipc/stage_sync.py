"""How the hosts of ranks that share staging areas meet: each publishes in shared memory how far it has come.

The number has the call in its upper bits, so that it only ever grows, whatever becomes of a call. Who waits does so
politely: the worker of a lane must not keep the interpreter from the thread that computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...shared_memory.memory_layout import BLOCK_FIELDS, BROUGHT, ENQUEUED, REFUSED
from .chunk_plan import STAGE_BITS

# A look takes a fraction of a microsecond, a turn to the other threads about one. The device needs longer for a chunk.
_NUM_LOOKS, _NUM_TURNS = 20, 2000
_LEAST_SLEEP_SECONDS, _MOST_SLEEP_SECONDS = 0.00005, 0.001


class StageSync:
    """The meetings of one rank on one group. The words of the page are written by their rank alone."""

    def __init__(self, group: Any) -> None:
        self._status_board, self._call_log = group.status_board, group.call_log
        self._rank, self.size = group.rank, group.size
        self._fields = group.status_board.fields
        self._own = group.rank * BLOCK_FIELDS + ENQUEUED
        self.seq = 0
        """The call that this rank is in."""
        self.late = 0
        """The call whose waits the watchdog has ended."""

    def begin(self, stage: int) -> None:
        """Be in the call that the ledger has entered: all that belongs to earlier ones is enqueued."""
        self.seq = self._call_log.current[0]
        self.publish(stage)

    def publish(self, stage: int) -> None:
        """Tell the others that this rank has come to a stage of its call."""
        self._fields[self._own] = self.number(stage)

    def number(self, stage: int) -> int:
        """What is published for a stage of the current call."""
        return self.seq << STAGE_BITS | stage

    def bring(self, number: int) -> None:
        """Leave a number for the others to read, once they know that it is there."""
        self._fields[self._rank * BLOCK_FIELDS + BROUGHT] = number

    def brought(self) -> list[int]:
        """The numbers of all ranks."""
        return [self._fields[rank * BLOCK_FIELDS + BROUGHT] for rank in range(self.size)]

    def wait_for(self, ranks: Sequence[int], number: int) -> None:
        """Return when these ranks have published this or more. Raises when one of them never will."""
        fields, missing = self._fields, ranks
        for look in range(_NUM_LOOKS + _NUM_TURNS):
            missing = [rank for rank in missing if fields[rank * BLOCK_FIELDS + ENQUEUED] < number]
            if not missing:
                break
            if look >= _NUM_LOOKS:
                time.sleep(0)  # lets other threads have the interpreter, unlike a loop
        else:
            self._wait_long(missing, number)
        if any(fields[rank * BLOCK_FIELDS + ENQUEUED] >> STAGE_BITS > self.seq for rank in ranks):
            self._check(ranks)  # gone on to a later call: having ended this one, or having given it up

    def _wait_long(self, missing: Sequence[int], number: int) -> None:
        seconds = _LEAST_SLEEP_SECONDS
        while missing:
            self._check(range(self.size))
            if self.late >= self.seq:
                self._call_log.expired()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MOST_SLEEP_SECONDS)
            missing = [rank for rank in missing if self._fields[rank * BLOCK_FIELDS + ENQUEUED] < number]

    def _check(self, ranks: Sequence[int]) -> None:
        """Raise if one of the ranks has given this call up, or a later one."""
        for rank in ranks:
            if rank != self._rank and self._status_board.get(rank, REFUSED) >= self.seq:
                self._call_log.compare()  # says it better, if this rank and a neighbor called different things
                self._call_log.raise_aborted(rank)

    def abort(self) -> None:
        """Tell the others that this rank does not finish its call."""
        current = self._call_log.current
        if current is not None:
            self._status_board.set(self._rank, REFUSED, current[0])
