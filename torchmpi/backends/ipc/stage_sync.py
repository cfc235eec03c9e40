"""Synchronization of the processes at the begin of a call, in shared memory.

After all ranks have entered a call, each enqueues its work without regard to the others: from there on the streams
synchronize (:mod:`torchmpi.backends.ipc.stream_memory`). So a missing rank, a different call, and one that was aborted
before all had entered it, are errors on the host, and no stream waits for them. A wait yields the interpreter to other
threads: the worker of a call queue must not slow down the thread that computes.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from ...communicators.group import Group
from ...errors import MismatchError
from ...shared_memory.memory_layout import BLOCK_FIELDS, BROKEN, ENQUEUED, REFUSED
from .chunk_plan import STAGE_BITS

# Polling takes a fraction of a microsecond, yielding to other threads about one.
_NUM_POLLS, _YIELD_SECONDS = 20, 0.002
_LEAST_SLEEP_SECONDS, _MOST_SLEEP_SECONDS = 0.00005, 0.001


class StageSync:
    """The calls of one rank on one group. Each rank writes only its own block of the status board."""

    def __init__(self, group: Group) -> None:
        assert group.status_board is not None
        self._status_board, self._call_log = group.status_board, group.call_log
        self._rank = group.rank
        self._fields = group.status_board.fields
        self._entries = {rank: rank * BLOCK_FIELDS + ENQUEUED for rank in range(group.size)}
        self._refusals = [rank * BLOCK_FIELDS + REFUSED for rank in range(group.size)]
        self._broken = [rank * BLOCK_FIELDS + BROKEN for rank in range(group.size)]
        self.seq = 0
        """Sequence number of the current call."""
        self._last_broken = 0
        """The last call whose abort this rank has taken into account."""
        self.has_entered = False
        """Whether all ranks are known to have entered the current call."""
        self.expired_seq = 0
        """Sequence number of the call whose wait the watchdog has ended."""
        self._nothing = select.poll()

    def begin(self) -> None:
        """Enter the current call of the call log."""
        self.seq, self.has_entered = self._seq_of_call_log(), False
        self._fields[self._entries[self._rank]] = self.seq

    def _seq_of_call_log(self) -> int:
        assert self._call_log.current is not None
        return self._call_log.current[0]

    def number(self, stage: int) -> int:
        """Return the number that is published for a stage of the current call; the numbers only grow."""
        return self.seq << STAGE_BITS | stage

    def wait_for_entry(self) -> bool:
        """Wait until all ranks have entered the call; return whether an earlier one was aborted since the last wait.

        Raises:
            MismatchError: A rank has aborted this call, or an earlier one after other ranks had enqueued it.
        """
        if self.has_entered:
            return False
        fields, entries, seq = self._fields, self._entries, self.seq
        missing: Sequence[int] = [rank for rank, entry in entries.items() if fields[entry] < seq]
        num_polls, limit = 0, 0.0
        while missing:
            num_polls += 1
            if num_polls == _NUM_POLLS:
                limit = time.perf_counter() + _YIELD_SECONDS
            if num_polls > _NUM_POLLS:
                if time.perf_counter() >= limit:  # a yield may take long, and aborts are not checked meanwhile
                    self._wait_long(missing)
                    break
                self._yield()
            missing = [rank for rank in missing if fields[entries[rank]] < seq]
        self.has_entered = True
        self._check_current()
        broken = [fields[each] for each in self._broken]
        if max(broken) <= self._last_broken:
            return False
        self._last_broken = max(broken)
        self._check_earlier(broken)
        return True

    def _yield(self) -> None:
        """Let other threads of this process run, and other processes. time.sleep(0) would take 50 us and more."""
        self._nothing.poll(0)
        os.sched_yield()

    def _wait_long(self, missing: Sequence[int]) -> None:
        seconds = _LEAST_SLEEP_SECONDS
        while missing:
            self._check_current()
            if self.expired_seq >= self.seq:
                self._call_log.expired()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MOST_SLEEP_SECONDS)
            missing = [rank for rank in missing if self._fields[self._entries[rank]] < self.seq]

    def _check_current(self) -> None:
        """Raise if a rank has aborted this call."""
        fields, seq = self._fields, self.seq
        for rank, refusal in enumerate(self._refusals):
            # A rank that has entered this call may have ended it, and aborted a later one.
            last = fields[refusal]
            if last < seq or rank == self._rank:
                continue
            if last == seq or fields[self._broken[rank]] == seq or fields[self._entries[rank]] < seq:
                self._call_log.compare()  # raises the more informative error if the calls differ
                self._call_log.raise_aborted(rank)

    def _check_earlier(self, broken: Sequence[int]) -> None:
        """Raise on all ranks if some of them, but not all, have aborted the last call that was aborted."""
        last = max(broken)
        # A rank that finds a mismatch before it enters a call refuses the call only.
        unaware = [r for r, seq in enumerate(broken) if seq < last and self._fields[self._refusals[r]] != last]
        if unaware:
            first, names = broken.index(last), ", ".join(map(str, unaware))
            error = MismatchError(
                f"rank {self._rank} of communicator {self._call_log.name}: rank {first} has aborted call #{last} after "
                f"it was enqueued on rank {names}, where its result is undefined. The message of rank {first} has the "
                f"reason. All ranks abort call #{self.seq}, and may continue after it."
            )
            error.reason_is_elsewhere = True
            raise error

    def abort(self) -> int | None:
        """Publish that this rank aborts its current call.

        Returns:
            The number that ends all stages of this rank in the call; None if no rank waits for them, because this rank
            has not entered the call.
        """
        seq = self._seq_of_call_log()
        self._status_board.set(self._rank, REFUSED, seq)
        if seq != self.seq:
            return None
        self._status_board.set(self._rank, BROKEN, seq)
        return seq + 1 << STAGE_BITS
