"""Detection of deadlocks: ranks that wait for each other in calls on different communicators.

A rank waits for the ranks that have not entered the call in which its main thread is. If these waits form a circle,
none of the calls can end. A rank takes part only if nothing else can continue there, which might make the missing call:
its main thread has not moved between two checks, no other thread runs code of the program, and no asynchronous calls
are queued on other groups.

The states of the ranks are read one after the other. A circle found in them exists all the same: the last rank of which
the state was read had not made the call for which the rank before it waits, so that rank has been waiting since, and so
on around the circle.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from ..communicators.group import Group, GroupContext
from ..communicators.rank_status import RankStatus
from ..shared_memory.kernels import no_garbage_collection
from .program_lines import PACKAGE, installed_files


class WaitingRanks:
    """The ranks for which the main thread of this rank waits; observed by the watchdog at each check."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._state: tuple[tuple[int, int], Group, int] | None = None
        self._is_blocked = False

    def observe(self, *, is_late: bool) -> None:
        """Determine whether the main thread is at the place of the previous call of this function.

        `is_late`: a call has waited long enough to look at the stacks, which keeps the tensors of calls that end at
        this moment alive until the watchdog continues.
        """
        state = self._blocking_call() if is_late else None
        self._is_blocked = state is not None and state == self._state
        self._state = state

    def blocking_call(self) -> tuple[Group, int] | None:
        """Return the group and the number of the call in which the main thread is; None if it may continue."""
        state = self._state  # read once, as the watchdog may write it at the same time
        if not self._is_blocked or state is None:
            return None
        _, group, seq = state
        current = group.call_log.current
        return None if current is None or current[0] != seq else (group, seq)

    @property
    def blocked(self) -> tuple[int, int]:
        """The key of the group and the number of `blocking_call`; zeros for none."""
        blocking = self.blocking_call()
        return (0, 0) if blocking is None else (blocking[0].key, blocking[1])

    def _blocking_call(self) -> tuple[tuple[int, int], Group, int] | None:
        """Return the position of the main thread, and the call in which it waits."""
        with no_garbage_collection():  # as in `location`
            frames = sys._current_frames()
            main = frames.pop(threading.main_thread().ident or 0, None)
            frames.pop(threading.get_ident(), None)  # a cycle, which would keep the tensors of all frames alive
            if main is None or any(map(_runs_program, frames.values())):
                return None
            frame, group = self._call_of(main)
        current = None if group is None else group.call_log.current
        if group is None or current is None:
            return None
        others = set(self._context.groups) - {group, group.intra_host, group.inter_host}
        return None if any(map(_has_queued, others)) else ((id(frame), frame.f_lasti), group, current[0])

    def _call_of(self, main: FrameType) -> tuple[FrameType, Group | None]:
        """Return the frame and the group of the call that the main thread makes, or the only one that has a call."""
        frame: FrameType | None = main
        outermost: FrameType | None = None  # the others are steps of that call
        while frame is not None and frame.f_code.co_filename.startswith(installed_files()):
            if frame.f_code is Group.perform.__code__:
                outermost = frame
            frame = frame.f_back
        if outermost is not None:
            group = outermost.f_locals.get("self")
            return outermost, group if isinstance(group, Group) else None
        if not main.f_code.co_filename.startswith(PACKAGE):
            return main, None
        groups = list(self._context.groups)
        parts = {part for group in groups for part in (group.intra_host, group.inter_host)}
        active = [group for group in groups if group not in parts and group.call_log.current is not None]
        return main, active[0] if len(active) == 1 else None


def _has_queued(group: Group) -> bool:
    return any(queue.pending for queue in (group.call_queue, *list(group.peer_queues.values())))


def _runs_program(frame: FrameType | None) -> bool:
    """Return whether a thread is in a function of the program, and not only of libraries."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(installed_files()):
            return True
        frame = frame.f_back
    return False


ORDER = "Make the calls on all communicators in the same order on all ranks."


def waits_of(states: Mapping[int, RankStatus]) -> dict[int, list[int]]:
    """Return the ranks for which each rank waits: those that have not entered the call in which its main thread is.

    >>> from torchmpi.communicators.rank_status import LastCall
    >>> waiting = RankStatus(calls={5: LastCall(1, True)}, blocked=(5, 1))
    >>> waits_of({0: waiting, 1: RankStatus(calls={5: LastCall(0)}), 2: RankStatus("not in a call")})
    {0: [1], 1: [], 2: []}
    """
    return {
        rank: [other for other, there in states.items() if _waits(status, there)] for rank, status in states.items()
    }


def _waits(status: RankStatus, there: RankStatus) -> bool:
    """Return whether a rank is known to wait for another one, given the status of both."""
    group, seq = status.blocked
    return group in there.calls and there.calls[group].seq < seq


def find_circle(waits: Mapping[int, Sequence[int]], through: int | None = None) -> list[int]:
    """Return ranks each of which waits for the next one, and the last for the first; empty if there are none.

    `waits`: the ranks for which each rank waits; `through`: the first rank of the circle, None for any.

    >>> find_circle({0: [1, 2], 1: [], 2: [3], 3: [0]}, 0), find_circle({0: [1], 1: [2], 2: [1]}, 0)
    ([0, 2, 3], [])
    >>> find_circle({0: [1, 2], 1: [4], 2: [3], 3: [2], 4: []}), find_circle({0: [1], 1: [2], 2: []})
    ([2, 3], [])
    """
    waiting: dict[int, list[int]] = {rank: list(others) for rank, others in waits.items() if others}
    is_reduced = True
    while is_reduced:  # by the ranks that wait only for ranks that do not wait
        kept = {rank: [other for other in others if other in waiting] for rank, others in waiting.items()}
        kept = {rank: others for rank, others in kept.items() if others}
        is_reduced, waiting = len(kept) < len(waiting), kept
    if through is None and waiting:
        walk = [min(waiting)]
        while (following := waiting[walk[-1]][0]) not in walk:
            walk.append(following)
        through = following
    if through is None or through not in waiting:
        return []
    paths, seen = [[through]], {through}
    while paths:
        path = paths.pop()
        for rank in waiting[path[-1]]:
            if rank == through:
                return path
            if rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []


def described(circle: Sequence[int]) -> str:
    """Describe the ranks of a circle.

    >>> described([0, 2])
    'rank 0 waits for rank 2, which waits for rank 0, in calls on different communicators: none can end.'
    """
    chain = ", which waits for ".join(f"rank {rank}" for rank in [*circle, circle[0]])
    return f"{chain.replace(', which waits', ' waits', 1)}, in calls on different communicators: none can end."
