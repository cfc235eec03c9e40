"""Synchronization of the processes that share staging areas, in shared memory.

Each rank publishes the stage that it has enqueued, and only then do others make their streams wait for it. The upper
bits of the number are the sequence number of the call, so that the number only grows, also when a call is aborted. A
wait yields the interpreter to other threads: the worker of a call queue must not slow down the thread that computes.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from ...communicators.group import Group
from ...shared_memory.memory_layout import BLOCK_FIELDS, STAGE_BITS, Block

# Polling takes a fraction of a microsecond, yielding to other threads about one. The device needs longer for a chunk.
_NUM_POLLS, _YIELD_SECONDS = 20, 0.002
_LEAST_SLEEP_SECONDS, _MOST_SLEEP_SECONDS = 0.00005, 0.001


class StageSync:
    """The stages of one rank in the calls on one group. Each rank writes only its own block of the status board."""

    def __init__(self, group: Group) -> None:
        assert group.status_board is not None
        self.group = group
        self._status_board, self._call_log = group.status_board, group.call_log
        self._rank, self.size = group.rank, group.size
        self._fields = group.status_board.fields
        self._own = group.rank * BLOCK_FIELDS + Block.enqueued
        self.seq = 0
        """Sequence number of the current call."""
        self.last_use = [0, 0]
        """The number after which a rank has read the last chunk that this rank has put into a half of its area."""
        self.is_free = [False, False]
        """Whether the stream of this rank already follows the other ranks' reads of a half."""
        self.unpublished = 0
        """The number that the stream of this rank has still to publish, because the last call has left it out."""
        self._nothing = select.poll()

    def has_failed(self) -> bool:
        """Return whether a call of this rank has failed since it began the last one here."""
        return self._call_log.last_aborted >= self.seq

    def open(self) -> None:
        """Begin to use new staging areas."""
        self.last_use[:], self.is_free[:], self.unpublished = [0, 0], [False, False], 0

    def begin(self) -> bool:
        """Begin the current call of the call log; return `has_failed` before."""
        assert self._call_log.current is not None
        has_failed, self.seq = self.has_failed(), self._call_log.current[0]
        return has_failed

    def publish(self, stage: int) -> None:
        """Publish that this rank has reached a stage of the current call."""
        self._fields[self._own] = self.number(stage)

    def number(self, stage: int) -> int:
        """Return the number that is published for a stage of the current call."""
        return self.seq << STAGE_BITS | stage

    def wait_for(self, ranks: Sequence[int], number: int) -> None:
        """Wait until these ranks have published `number` or a later one; raise if one of them has aborted."""
        fields = self._fields
        latest = [fields[rank * BLOCK_FIELDS + Block.enqueued] for rank in ranks]
        if min(latest, default=number) < number:
            self._poll(ranks, number)
            latest = [fields[rank * BLOCK_FIELDS + Block.enqueued] for rank in ranks]
        if max(latest, default=0) >> STAGE_BITS > self.seq:
            self._check(ranks)  # a rank in a later call has completed this one, or aborted it

    def _poll(self, ranks: Sequence[int], number: int) -> None:
        fields, missing = self._fields, ranks
        num_polls, limit = 0, 0.0
        while missing := [rank for rank in missing if fields[rank * BLOCK_FIELDS + Block.enqueued] < number]:
            num_polls += 1
            if num_polls == _NUM_POLLS:
                limit = time.perf_counter() + _YIELD_SECONDS
            if num_polls > _NUM_POLLS:
                if time.perf_counter() >= limit:  # a yield may take long, and aborts are not checked meanwhile
                    self._wait_long(missing, number)
                    break
                self._yield()

    def _yield(self) -> None:
        """Let other threads of this process run, and other processes. time.sleep(0) waits for a timer."""
        self._nothing.poll(0)
        os.sched_yield()

    def _wait_long(self, missing: Sequence[int], number: int) -> None:
        seconds = _LEAST_SLEEP_SECONDS
        while missing:
            self._check(range(self.size))
            if self._call_log.ended_seq >= self.seq:
                self._call_log.expired()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MOST_SLEEP_SECONDS)
            missing = [rank for rank in missing if self._fields[rank * BLOCK_FIELDS + Block.enqueued] < number]

    def _check(self, ranks: Sequence[int]) -> None:
        """Raise if one of the ranks has aborted this call."""
        board, seq = self._status_board, self.seq
        for rank in ranks:
            refused = 0 if rank == self._rank else board.get(rank, Block.refused)
            # A rank may have completed this call and aborted a later one.
            if refused == seq or (refused > seq and board.get(rank, Block.completed) < seq):
                self._call_log.compare()  # raises the more informative error if the calls differ
                self._call_log.raise_aborted(rank)

    def complete(self) -> None:
        """Publish that this rank has completed its current call."""
        self._status_board.set(self._rank, Block.completed, self.seq)

    def abort(self) -> None:
        """Publish that this rank aborts its current call."""
        current = self._call_log.current
        if current is not None:
            self._status_board.set(self._rank, Block.refused, current[0])
