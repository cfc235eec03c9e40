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

from . import progress
from .communicator import Group, GroupContext
from .config import Config
from .lane import Lane

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# A rank that refuses a call raises, and its traceback ends the job. Only if it goes on, the ranks left behind speak up.
_REFUSAL_GRACE_SECONDS = 2.0
_ANSWER_PATIENCE_SECONDS = 2.0

End = Callable[[str, int], None]
"""Ends the job: ``end(message, exit_status)``."""


class Watchdog(threading.Thread):
    """One per runtime."""

    def __init__(self, context: GroupContext, config: Config, end_job: End) -> None:
        super().__init__(name="torchmpi watchdog", daemon=True)
        self.context, self.config, self.end_job = context, config, end_job
        self._stopped = threading.Event()
        self._since: dict[Group, tuple[int, float]] = {}
        self._reported: dict[Group, int] = {}
        self._answered: dict[Group, int] = {}
        self._lanes: dict[Lane, tuple[str | None, float, bool]] = {}

    def run(self) -> None:
        """Look until told to stop."""
        while not self._stopped.wait(self.config.watchdog_period_seconds):
            for group in list(self.context.groups):
                try:
                    self._answer(group)
                    self._look_at(group)
                    for lane in list(group.side_lanes.values()):
                        self._look_at_lane(group, lane)
                except (ValueError, KeyError):
                    continue  # the group was freed under our eyes: its board is unmapped

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self is not threading.current_thread():
            self.join()
        self._since.clear()

    def _look_at(self, group: Group) -> None:
        current = group.ledger.current
        seq, since = self._since.get(group, (0, 0.0))
        now = time.monotonic()
        if current is None:
            self._since.pop(group, None)
            return
        if current[0] != seq:
            self._since[group] = (current[0], now)
            return
        waited = now - since
        self._check_refused(group, current, waited)
        config = self.config
        if waited >= config.stall_abort_seconds > 0:
            self.end_job(self._report(group, current, waited) + " Giving up (stall_abort_seconds).", 1)
        elif waited >= config.stall_warning_seconds and self._reported.get(group) != seq:
            self._reported[group] = seq
            if self._is_spokesman(group, seq):
                print(self._report(group, current, waited), file=sys.stderr, flush=True)

    def _look_at_lane(self, group: Group, lane: Lane) -> None:
        """Point-to-point: the peer is named in the call, so there is nothing to ask."""
        doing = lane.doing
        if doing is None:
            self._lanes.pop(lane, None)
            return
        known, since, reported = self._lanes.get(lane, (None, 0.0, False))
        now = time.monotonic()
        if known is not doing:  # the very same string: the next call makes its own
            self._lanes[lane] = (doing, now, False)
            return
        message = f"torchmpi: {group.where} has waited {now - since:.0f} s in {doing} on communicator {group.name}."
        if now - since >= self.config.stall_abort_seconds > 0:
            self.end_job(f"{message} Giving up (stall_abort_seconds).", 1)
        elif now - since >= self.config.stall_warning_seconds and not reported:
            self._lanes[lane] = (doing, since, True)
            print(message, file=sys.stderr, flush=True)

    def _check_refused(self, group: Group, current: tuple[int, int, tuple[int, ...]], waited: float) -> None:
        board = group.board
        if board is None or waited < _REFUSAL_GRACE_SECONDS:
            return
        for row in range(group.size):
            if row != group.rank and board.get(row, progress.REFUSED) == current[0]:
                message = (
                    f"torchmpi: {group.where}: {progress.Call(*current)} on communicator {group.name} cannot end: rank "
                    f"{group.world_ranks[row]} called something else under that number and went on."
                )
                self.end_job(message, 1)

    def _is_spokesman(self, group: Group, seq: int) -> bool:
        """One report per host is enough: the lowest rank that waits gives it."""
        board = group.board
        return board is None or not any(self._waits(board, row, seq) for row in range(group.rank))

    @staticmethod
    def _waits(board: progress.Board, row: int, seq: int) -> bool:
        return board.get(row, progress.ENTERED) >= seq > board.get(row, progress.LEFT)

    def _report(self, group: Group, current: tuple[int, int, tuple[int, ...]], waited: float) -> str:
        call = progress.Call(*current)
        text = f"torchmpi: {group.where} has waited {waited:.0f} s in {call} on communicator {group.name}."
        board = group.board
        if board is None:
            return f"{text} Who is missing is not known: these ranks share no page (several hosts, or check='off')."
        missing = [row for row in range(group.size) if board.get(row, progress.ENTERED) < call.seq]
        if not missing:
            return f"{text} All ranks have arrived: the MPI library is still at it."
        lines = [f"{text} Not arrived:"]
        for row in missing:
            answer = progress.ask(board, group.rank, row, patience_seconds=_ANSWER_PATIENCE_SECONDS)
            doing = answer.splitlines()[0] if answer else "it does not answer: stopped, or busy outside Python"
            lines.append(f"  rank {group.world_ranks[row]}, after {board.get(row, progress.ENTERED)} calls: {doing}")
        return "\n".join(lines)

    def _answer(self, group: Group) -> None:
        """Write down what this rank is doing, if somebody has asked since the last look."""
        board = group.board
        if board is None:
            return
        asked = sum(board.get(row, progress.ASKED) for row in range(group.size) if row != group.rank)
        if asked != self._answered.get(group, 0):
            self._answered[group] = asked
            calls = reversed(group.ledger.recent())
            history = [f"#{call.seq}: {progress.describe(call.code, call.shape)}" for call in calls]
            board.write_text(group.rank, "\n".join([whereabouts(), *history]))
            board.set(group.rank, progress.ANSWERED, board.get(group.rank, progress.ANSWERED) + 1)


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
