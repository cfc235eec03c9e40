"""Detection of deadlocks: ranks of a host that wait for each other in calls on different communicators.

A rank waits for the ranks that have not entered the call in which its main thread is. If these waits form a circle,
none of the calls can end. A rank takes part only if nothing else can continue there, which might make the missing call:
its main thread has not moved between two checks, no other thread runs code of the program, and no asynchronous calls
are queued on other groups.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from ..communicators.group import Group, GroupContext
from ..shared_memory import memory_layout
from .program_lines import PACKAGE, installed_files


class WaitingRanks:
    """The ranks for which the main thread of this rank waits; observed by the watchdog at each check."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._state: tuple[int, int, Group, int] | None = None
        self._is_blocked = False

    def observe(self) -> None:
        """Determine whether the main thread is at the place of the previous call of this function."""
        state = self._blocking_call()
        self._is_blocked = state is not None and state == self._state
        self._state = state

    def now(self) -> list[int]:
        """Return the ranks that have not entered the call in which the main thread is; empty if it may continue."""
        if not self._is_blocked or self._state is None:
            return []
        *_, group, seq = self._state
        board, current = group.log_board, group.call_log.current
        if board is None or current is None or current[0] != seq:
            return []
        return [
            rank
            for index, rank in enumerate(group.world_ranks)
            if index != group.rank and board.get(index, memory_layout.ENTERED) < seq
        ]

    def _blocking_call(self) -> tuple[int, int, Group, int] | None:
        """Return the position of the main thread, and the call in which it waits."""
        frames = sys._current_frames()
        main = frames.pop(threading.main_thread().ident or 0, None)
        if main is None or not main.f_code.co_filename.startswith(PACKAGE) or any(map(_runs_program, frames.values())):
            return None
        group = self._group_of(main)
        current = None if group is None else group.call_log.current
        if group is None or current is None or any(map(_has_queued, set(self._context.groups) - {group})):
            return None
        return id(main), main.f_lasti, group, current[0]

    def _group_of(self, main: FrameType) -> Group | None:
        """Return the group of the call that the main thread makes, or the only one that has a call."""
        frame: FrameType | None = main
        while frame is not None:
            if frame.f_code is Group.perform.__code__:
                group = frame.f_locals.get("self")
                return group if isinstance(group, Group) else None
            frame = frame.f_back
        groups = list(self._context.groups)
        parts = {part for group in groups for part in (group.local, group.across)}
        active = [group for group in groups if group not in parts and group.call_log.current is not None]
        return active[0] if len(active) == 1 else None


def _has_queued(group: Group) -> bool:
    return any(queue.pending for queue in (group.call_queue, *list(group.peer_queues.values())))


def _runs_program(frame: FrameType | None) -> bool:
    """Return whether a thread is in a function of the program, and not only of libraries."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(installed_files()):
            return True
        frame = frame.f_back
    return False


def find_circle(waits: Mapping[int, Sequence[int]], start: int) -> list[int]:
    """Return ranks each of which waits for the next one, and the last for the first, `start`; empty if there are none.

    >>> find_circle({0: [1, 2], 1: [], 2: [3], 3: [0]}, 0), find_circle({0: [1], 1: [2], 2: [1]}, 0)
    ([0, 2, 3], [])
    """
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop()
        for rank in waits.get(path[-1], ()):
            if rank == start:
                return path
            if rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []
