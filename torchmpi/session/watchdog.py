"""A thread that looks twice a second whether this rank waits too long, and says for whom.

It never touches the data path: it reads the ledgers, and the boards that ranks of one host share. It also answers when
another rank asks what this one is doing, so a report can name the line at which a missing rank is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..communicators import call_log
from ..communicators.call_queue import CallQueue
from ..communicators.group import Group, GroupContext
from ..communicators.status_board import request_status
from ..config import Config
from ..shared_memory import memory_layout
from .remote_status import Answer, Inquiry

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A rank that refuses a call raises, and its traceback ends the job. Only if it goes on, the ranks left behind speak up.
_REFUSAL_GRACE_SECONDS = 2.0
_ANSWER_PATIENCE_SECONDS = 2.0
_REMOTE_PATIENCE_SECONDS = 3.0
# The lowest rank that waits ends the job for all; the others do so only if that has not happened.
_SPOKESMAN_GRACE_SECONDS = 10.0

End = Callable[[str, int], None]
"""Ends the job: ``end(message, exit_status)``."""


class Watchdog(threading.Thread):
    """One per runtime."""

    def __init__(self, context: GroupContext, config: Config, end_job: End, *, comm: Any = None) -> None:
        """`comm` is a duplicate of the world, for jobs on several hosts."""
        super().__init__(name="torchmpi watchdog", daemon=True)
        self._inquiry = None if comm is None else Inquiry(context.MPI, comm, self._describe)
        self.context, self.config, self.end_job = context, config, end_job
        self._stopped = threading.Event()
        self._since: dict[Group, tuple[int, float]] = {}
        self._reported: dict[Group, int] = {}
        self._answered: dict[Group, int] = {}
        self._refused: dict[tuple[Group, int], float] = {}
        self._queues: dict[CallQueue, tuple[str | None, float, bool]] = {}

    def run(self) -> None:
        """Look until told to stop."""
        while not self._stopped.wait(self.config.watchdog_period_seconds):
            if self._inquiry is not None:
                self._inquiry.answer()
            for group in list(self.context.groups):
                try:
                    self._answer(group)
                    self._look_at(group)
                    for call_queue in list(group.peer_queues.values()):
                        self._look_at_queue(group, call_queue)
                except (ValueError, KeyError):
                    continue  # the group was freed under our eyes: its board is unmapped

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self is not threading.current_thread():
            self.join()
        self._since.clear()

    def _look_at(self, group: Group) -> None:
        current = group.call_log.current
        seq, since = self._since.get(group, (0, 0.0))
        now = time.monotonic()
        if current is None:
            self._since.pop(group, None)
            return
        if current[0] != seq:
            self._since[group] = (current[0], now)
            group.call_log.report_when_late = ""
            return
        waited = now - since
        self._check_refused(group, current)
        config = self.config
        if waited >= group.timeout_seconds > 0:
            self._expire(group, current, waited, f"than the timeout of {group.timeout_seconds:g} s that this group has")
        elif waited >= _REFUSAL_GRACE_SECONDS and (left := self._who_stops(group, current[0])):
            self._expire(group, current, waited, f"than can help: {left} in stop() already, at the end of its program")
        if waited >= config.stall_abort_seconds > 0:
            report = self._report(group, current, waited)
            if report is not None or waited >= config.stall_abort_seconds + _SPOKESMAN_GRACE_SECONDS:
                self.end_job(f"{report or ''} Giving up (stall_abort_seconds).".strip(), 1)
        elif waited >= config.stall_warning_seconds and self._reported.get(group) != seq:
            self._reported[group] = seq
            report = self._report(group, current, waited)
            if report is not None:
                print(report, file=sys.stderr, flush=True)

    def _who_stops(self, group: Group, seq: int) -> str:
        """A rank of this host that has not come to a call and never will, in words; '' if there is none."""
        world = self.context.groups[0]
        if group is world or group.log_board is None or world.log_board is None:
            return ""
        for row, rank in enumerate(group.world_ranks):
            if (
                row != group.rank
                and group.log_board.get(row, memory_layout.ENTERED) < seq
                and call_log.is_stopping(world.log_board, rank)
            ):
                return f"rank {rank} is"
        return ""

    def _expire(self, group: Group, current: tuple[int, int, tuple[int, ...]], waited: float, late: str) -> None:
        """End the wait of a call in shared memory that has taken too long; it raises what this says."""
        enders = [item for item in (group.shared, *group.attachments) if hasattr(item, "expire")]
        if not enders or group.call_log.report_when_late:
            return  # it cannot be ended, or is on its way out
        late = f"That is more {late}."
        report = self._report(group, current, waited, all_speak=True)
        group.call_log.report_when_late = f"{report}\n{late}" if report else late
        if group.call_log.current == current:
            for ender in enders:
                ender.expire(current[0])

    def _look_at_queue(self, group: Group, call_queue: CallQueue) -> None:
        """Point-to-point: the peer is named in the call, so there is nothing to ask."""
        doing = call_queue.doing
        if doing is None:
            self._queues.pop(call_queue, None)
            return
        known, since, reported = self._queues.get(call_queue, (None, 0.0, False))
        now = time.monotonic()
        if known is not doing:  # the very same string: the next call makes its own
            self._queues[call_queue] = (doing, now, False)
            return
        message = f"torchmpi: {group.where} has waited {now - since:.0f} s in {doing} on communicator {group.name}."
        if now - since >= self.config.stall_abort_seconds > 0:
            self.end_job(f"{message} Giving up (stall_abort_seconds).", 1)
        elif now - since >= self.config.stall_warning_seconds and not reported:
            self._queues[call_queue] = (doing, since, True)
            print(message, file=sys.stderr, flush=True)

    def _check_refused(self, group: Group, current: tuple[int, int, tuple[int, ...]]) -> None:
        log_board = group.log_board
        if log_board is None or log_board.get(group.rank, memory_layout.REFUSED) == current[0]:  # it is on its way out
            return
        for row in range(group.size):
            if row != group.rank and log_board.get(row, memory_layout.REFUSED) == current[0]:
                # This rank's own wait may be about to end because of it.
                since = self._refused.setdefault((group, current[0]), time.monotonic())
                if time.monotonic() - since < _REFUSAL_GRACE_SECONDS:
                    return
                message = (
                    f"torchmpi: {group.where}: {call_log.Call(*current)} on communicator {group.name} cannot end: rank "
                    f"{group.world_ranks[row]} called something else under that number and went on."
                )
                self.end_job(message, 1)

    def _report(
        self, group: Group, current: tuple[int, int, tuple[int, ...]], waited: float, *, all_speak: bool = False
    ) -> str | None:
        """What to tell the user; None if a lower rank waits for the same and will tell, unless all shall."""
        call = call_log.Call(*current)
        text = f"torchmpi: {group.where} has waited {waited:.0f} s in {call} on communicator {group.name}."
        states = self._from_status_board(group, call.seq) if group.log_board is not None else self._from_messages(group)
        if states is None:
            return f"{text} Who is missing is not known: calls are not compared (check='off')."
        own_rank = group.world_ranks[group.rank]
        if not all_speak and any(
            rank < own_rank and state is not None and state.waits for rank, state in states.items()
        ):
            return None
        lines = [
            f"  rank {rank}, after {state.entered} calls: {state.whereabouts}"
            if state is not None
            else f"  rank {rank} does not answer: stopped, or busy outside Python"
            for rank, state in states.items()
            if state is None or state.entered < call.seq
        ]
        if not lines:
            return f"{text} All ranks have arrived: the MPI library is still at it."
        return "\n".join([f"{text} Not arrived:", *lines])

    def _from_status_board(self, group: Group, seq: int) -> dict[int, Answer | None]:
        """The state of the other ranks of this host; those that are missing are asked where they are."""
        log_board = group.log_board
        assert log_board is not None
        states: dict[int, Answer | None] = {}
        for row, rank in enumerate(group.world_ranks):
            entered, left = log_board.get(row, memory_layout.ENTERED), log_board.get(row, memory_layout.LEFT)
            text = ""
            if entered < seq:
                text = request_status(
                    log_board, group.rank, row, patience_seconds=_ANSWER_PATIENCE_SECONDS, meanwhile=self._answer_all
                )
            if row != group.rank:
                answered = entered >= seq or text
                states[rank] = Answer(0, entered, entered > left, text.split("\n", 1)[0]) if answered else None
        return states

    def _from_messages(self, group: Group) -> dict[int, Answer | None] | None:
        if self._inquiry is None:
            return None
        others = [rank for row, rank in enumerate(group.world_ranks) if row != group.rank]
        answers = self._inquiry.ask(others, group.key, patience_seconds=_REMOTE_PATIENCE_SECONDS)
        return {rank: answers.get(rank) for rank in others}

    def _describe(self, key: int) -> Answer:
        """This rank's own state, for another host."""
        for group in list(self.context.groups):
            if group.key == key:
                return Answer(key, group.call_log.seq, group.call_log.current is not None, whereabouts())
        return Answer(key, 0, False, f"it has no such communicator; {whereabouts()}")

    def _answer_all(self) -> None:
        for group in list(self.context.groups):
            self._answer(group)

    def _answer(self, group: Group) -> None:
        """Write down what this rank is doing, if somebody has asked since the last look."""
        log_board = group.log_board
        if log_board is None:
            return
        asked = sum(log_board.get(row, memory_layout.ASKED) for row in range(group.size) if row != group.rank)
        if asked != self._answered.get(group, 0):
            self._answered[group] = asked
            log_board.write_text(group.rank, "\n".join([whereabouts(), *group.call_log.recent_in_words()]))
            log_board.set(group.rank, memory_layout.ANSWERED, log_board.get(group.rank, memory_layout.ANSWERED) + 1)


def whereabouts() -> str:
    """Where the main thread is, in the user's own code.

    >>> "in" in whereabouts()
    True
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its main thread has ended"
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if not entry.filename.startswith(_PACKAGE)]
    entry = (own or stack)[-1]
    return f"at {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
