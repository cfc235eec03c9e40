"""Synchronization of the processes at the begin of a call, in shared memory.

After all ranks have entered a call, each enqueues its work without regard to the others: from there on the streams
synchronize (:mod:`torchmpi.backends.ipc.stream_memory`). So a missing rank, a different call or an aborted one is an
error on the host, and no stream waits for it. A wait yields the interpreter to other threads: the worker of
a call queue must not slow down the thread that computes.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence

from ...communicators.group import Group
from ...errors import MismatchError
from ...shared_memory.memory_layout import BLOCK_FIELDS, ENQUEUED, REFUSED
from .chunk_plan import STAGE_BITS

# Polling takes a fraction of a microsecond, yielding to other threads about one.
_NUM_POLLS, _YIELD_SECONDS = 20, 0.002
_LEAST_SLEEP_SECONDS, _MOST_SLEEP_SECONDS = 0.00005, 0.001
_NO_CALL = sys.maxsize


class StageSync:
    """The calls of one rank on one group. Each rank writes only its own block of the status board."""

    def __init__(self, group: Group) -> None:
        assert group.status_board is not None
        self._status_board, self._call_log = group.status_board, group.call_log
        self._rank = group.rank
        self._fields = group.status_board.fields
        self._entries = {rank: rank * BLOCK_FIELDS + ENQUEUED for rank in range(group.size)}
        self._refusals = [rank * BLOCK_FIELDS + REFUSED for rank in range(group.size)]
        self.seq = self._previous = _NO_CALL
        """Sequence numbers of the current call and of the one before on this backend."""
        self.has_entered = False
        """Whether all ranks are known to have entered the current call."""
        self.expired_seq = 0
        """Sequence number of the call whose wait the watchdog has ended."""
        self._nothing = select.poll()

    def begin(self) -> None:
        """Enter the current call of the call log."""
        self._previous, self.seq, self.has_entered = self.seq, self._seq_of_call_log(), False
        self._fields[self._entries[self._rank]] = self.seq

    def _seq_of_call_log(self) -> int:
        assert self._call_log.current is not None
        return self._call_log.current[0]

    def number(self, stage: int) -> int:
        """Return the number that is published for a stage of the current call; the numbers only grow."""
        return self.seq << STAGE_BITS | stage

    def wait_for_entry(self) -> bool:
        """Wait until all ranks have entered the call; return whether a call since the last one was aborted.

        Raises:
            MismatchError: A rank has aborted this call, or the last one after other ranks had enqueued it.
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
        refused = [fields[refusal] for refusal in self._refusals]
        if max(refused) < self._previous:
            return False
        self._check_current(refused)
        self._check_previous(refused)
        return True

    def _yield(self) -> None:
        """Let other threads of this process run, and other processes. time.sleep(0) would take 50 us and more."""
        self._nothing.poll(0)
        os.sched_yield()

    def _wait_long(self, missing: Sequence[int]) -> None:
        seconds = _LEAST_SLEEP_SECONDS
        while missing:
            self._check_current([self._fields[refusal] for refusal in self._refusals])
            if self.expired_seq >= self.seq:
                self._call_log.expired()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MOST_SLEEP_SECONDS)
            missing = [rank for rank in missing if self._fields[self._entries[rank]] < self.seq]

    def _check_current(self, refused: Sequence[int]) -> None:
        """Raise if a rank has aborted this call."""
        for rank, seq in enumerate(refused):
            if rank != self._rank and seq >= self.seq:
                self._call_log.compare()  # raises the more informative error if the calls differ
                self._call_log.raise_aborted(rank)

    def _check_previous(self, refused: Sequence[int]) -> None:
        """Raise on all ranks if some of them, but not all, have aborted the last call."""
        previous = self._previous
        if previous in refused and min(refused) < previous:
            first = refused.index(previous)
            unaware = ", ".join(str(rank) for rank, seq in enumerate(refused) if seq < previous)
            error = MismatchError(
                f"rank {self._rank} of communicator {self._call_log.name}: rank {first} has aborted call #{previous} "
                f"after it was enqueued on rank {unaware}, where its result is undefined. The message of rank {first} "
                f"has the reason. All ranks abort call #{self.seq}, and may continue after it."
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
        return seq + 1 << STAGE_BITS if seq == self.seq else None
