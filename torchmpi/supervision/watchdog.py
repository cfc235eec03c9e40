"""Stall detection: a thread that reports calls which wait too long, with the ranks that have not arrived.

The thread never communicates on the groups of the program, but reads the call logs, and the status boards that ranks of
one host share. The thread also answers the status requests of other ranks, so that a report can contain the current
line of a missing rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from ..communicators import call_log
from ..communicators.call_queue import CallQueue
from ..communicators.group import Group, GroupContext
from ..communicators.status_board import request_status, request_statuses
from ..config import Config
from ..launch import mpi_library
from ..launch.stacks import StackRequests, stacks
from ..log import logger
from ..shared_memory.memory_layout import Block
from .deadlock import WaitingRanks, find_any_circle, find_circle, waits_of
from .heartbeat import Heartbeat, RankStatus
from .program_lines import location
from .report import NO_ANSWER, Activity, about_others

# A rank that rejects a call raises, and its traceback ends the job. Other ranks report only if it continues instead.
_REFUSAL_GRACE_SECONDS = 2.0
_STATUS_TIMEOUT_SECONDS = 2.0
_REMOTE_TIMEOUT_SECONDS = 3.0
# The lowest waiting rank ends the job for all; the others do so only if that has not happened after this time.
_ABORT_GRACE_SECONDS = 10.0
_NO_REPLY = "does not reply: it is stopped, or busy outside Python"
_ORDER = "Make the calls on all communicators in the same order on all ranks."
# A search on several hosts asks all ranks; the share of the time that rank 0 spends on it is limited.
_PAUSE_PER_SEARCH = 20
_LAST_CALLS = 3
_STOP = "stop(), "  # in the description of a call
_ENDED = "The wait exceeds stall_abort_seconds, which ends the job."

LoggedCall = tuple[int, int, tuple[int, ...]]
"""Sequence number, code and shape of a call, as in the call log."""
EndJob = Callable[[str, int], None]
"""Ends the job: ``end_job(message, exit_status)``."""


class Watchdog(threading.Thread):
    """The watchdog thread of a runtime."""

    def __init__(self, context: GroupContext, config: Config, end_job: EndJob) -> None:
        super().__init__(name="torchmpi watchdog", daemon=True)
        self.heartbeat: Heartbeat | None = None
        """The connections to the ranks of other hosts."""
        self.context, self.config, self.end_job = context, config, end_job
        # On several hosts, groups that are parts of the world come before it.
        self._world = next(group for group in context.groups if group.size == len(context.hosts))
        self._stopped = threading.Event()
        self._stack_requests = StackRequests()
        # Weak, as a program may make and free any number of groups.
        self._since: WeakKeyDictionary[Group, tuple[int, float]] = WeakKeyDictionary()
        self._reported: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
        self._answered: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
        self._refused: WeakKeyDictionary[Group, tuple[int, float]] = WeakKeyDictionary()
        self._steps: set[Group] = set()
        """Groups on which calls are steps of a call of the program, which is reported instead of the step."""
        self._queues: WeakKeyDictionary[CallQueue, tuple[str | None, float, bool]] = WeakKeyDictionary()
        self._ask_at: WeakKeyDictionary[CallQueue, float] = WeakKeyDictionary()
        """After how many seconds the rank of another host for which a message waits is asked."""
        self._waiting_ranks = WaitingRanks(context)
        self._circle_at: WeakKeyDictionary[Group, tuple[int, float]] = WeakKeyDictionary()
        """For each group, the call and the duration of its wait at which deadlocks are searched next."""
        self._search_from = 0.0
        """When deadlocks between hosts may be searched next."""
        self._launcher = 0
        self.checks: list[Callable[[], object]] = [
            self._check_launcher,
            self._take_requests,
            self._check_groups,
            self._check_hosts,
        ]
        """What the thread calls in each period, in this order; a check of another module is added at the end."""

    def run(self) -> None:
        """Make all checks periodically until :meth:`stop`."""
        self._launcher = mpi_library.parent_launcher()
        while not self._stopped.wait(self.config.watchdog_period_seconds):
            for check in self.checks:
                check()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self is not threading.current_thread():
            self.join()
        self._stack_requests.close()
        self._since.clear()

    # --- checks

    def _check_launcher(self) -> None:
        if self._launcher not in (0, os.getppid()):  # only MPICH's ends the ranks when it is killed
            message = f"the launcher (process {self._launcher}) has ended. That ends the job."
            self.end_job(f"{self._world.where}: {message}", 1)

    def _take_requests(self) -> None:
        """Do what other processes have asked for: save the last calls, print the stacks."""
        if (record := self.context.flight_record) is not None:
            record.note_ticks()
            if (request := record.take_request()) and self.heartbeat is not None:
                self.heartbeat.ask_for_records(request)
        if self._stack_requests.take():
            logger.warning(self._state_and_stacks())

    def _check_groups(self) -> None:
        limit = time.monotonic() - _REFUSAL_GRACE_SECONDS / 2  # two checks before deadlocks are searched
        groups = list(self.context.groups)
        since = [self._since[group][1] for group in groups if group in self._since]  # freed groups are left out
        self._waiting_ranks.observe(is_late=any(each <= limit for each in since))
        calling = [group for group in groups if group.call_log.current is not None]
        self._steps = {part for group in calling for part in (group.local, group.across) if part is not None}
        for group in groups:
            try:
                self._answer(group)
                self._check_group(group)
                for (_, peer), call_queue in list(group.peer_queues.items()):
                    self._check_queue(group, call_queue, group.world_ranks[peer])
            except (ValueError, KeyError):
                continue  # the group was freed meanwhile, and its status board is unmapped

    def _check_hosts(self) -> None:
        if self.heartbeat is not None and self.heartbeat.is_stalled and time.monotonic() >= self._search_from:
            self._search_on_all_hosts(self.heartbeat)

    def _check_group(self, group: Group) -> None:
        """Report, expire or abort the current call of a group if it waits too long."""
        current = group.call_log.current
        seq, since = self._since.get(group, (0, 0.0))
        now = time.monotonic()
        if current is None or self.context.loss:  # a call that waits for a lost rank is ended, and the program goes on
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
            self._expire(group, current, waited, f"The timeout of this group is {group.timeout_seconds:g} s.")
        elif (rank := self._stopping_rank(group, current[0])) is not None:
            reason = f"rank {rank} {self._how_it_stops(rank)}, and will not make this call."
            self._expire(group, current, waited, reason)
        elif waited >= _REFUSAL_GRACE_SECONDS:
            self._check_deadlock(group, current, waited)
        if group in self._steps:
            return
        if waited >= config.stall_abort_seconds > 0:
            report = self._report(group, current, waited)
            if report is not None or waited >= config.stall_abort_seconds + _ABORT_GRACE_SECONDS:
                self.end_job(f"{report or ''}\n{_ENDED} {self._where_calls_remain()}".strip(), 1)
        elif waited >= config.stall_warning_seconds and self._reported.get(group) != seq:
            self._reported[group] = seq
            self.context.num_stalls += 1
            group.call_log.count_stall(current[1])
            report = self._report(group, current, waited)
            if report is not None:
                logger.warning(f"{report}\n{self._how_to_compare()}")

    def _stopping_rank(self, group: Group, seq: int) -> int | None:
        """Return a rank of this host that has not entered a call and is in stop(), if there is one."""
        world = self._world
        if group is world or group.log_board is None or world.log_board is None:
            return None
        for index, rank in enumerate(group.world_ranks):
            if (
                index != group.rank
                and group.log_board.get(index, Block.entered) < seq
                and call_log.is_stopping(world.log_board, rank)
            ):
                return rank
        return None

    def _check_deadlock(self, group: Group, current: LoggedCall, waited: float) -> None:
        """End a call that waits for ranks which wait for this one. The search is repeated at growing intervals."""
        seq, at = self._circle_at.get(group, (0, 0.0))
        if (seq == current[0] and waited < at) or self._waiting_ranks.blocking_call() != (group, current[0]):
            return
        self._circle_at[group], begin = (current[0], 2 * waited), time.monotonic() - waited
        if self.heartbeat is not None:
            self.heartbeat.announce_stall()
        world, waits = self._world, self._waiting_ranks.now()
        if not waits or world.log_board is None:
            return
        others = [rank for rank in range(world.size) if rank != world.rank]
        texts = request_statuses(
            world.log_board, world.rank, others, patience_seconds=_STATUS_TIMEOUT_SECONDS, meanwhile=self._answer_all
        )
        answers = {rank: text.split("\n")[2:3] for rank, text in texts.items()}
        known = {rank: json.loads(lines[0]) for rank, lines in answers.items() if lines and lines[0].startswith("[")}
        circle = find_circle({**known, world.rank: waits}, world.rank)
        if not circle:
            return
        reason = f"{_described(circle)}: none can end. {_ORDER}"
        if group.can_expire and not group.call_log.report_when_late:
            self._expire(group, current, waited, reason)
            # The answers of the other ranks may have taken seconds: the call needs as long again to raise its error.
            self._circle_at[group] = (current[0], 2 * (time.monotonic() - begin))
        elif world.rank == min(circle):
            report = self._report(group, current, waited, unconditional=True)
            self.end_job(f"{report}\n{reason}", 1)

    def _search_on_all_hosts(self, heartbeat: Heartbeat) -> None:
        """Ask all ranks for their calls, and end the job if there is a deadlock. Only rank 0 does this, for all."""
        begin, world = time.monotonic(), self._world
        heartbeat.is_stalled = False
        others = range(1, world.size)
        states = heartbeat.request(others, world.key, timeout_seconds=_REMOTE_TIMEOUT_SECONDS)
        states[0] = self.own_status(world.key)
        circle = find_any_circle(waits_of(states))
        self._search_from = time.monotonic() + _PAUSE_PER_SEARCH * (time.monotonic() - begin)
        if circle:
            lines = about_others({rank: _activity_in(states[rank]) for rank in circle})
            self.end_job("\n".join([f"{_described(circle)}: none can end.", *lines, _ORDER]), 1)

    def _expire(self, group: Group, current: LoggedCall, waited: float, reason: str) -> None:
        """End a call in shared memory that waits too long; it raises an error with the report and the reason."""
        if not group.can_expire or group.call_log.report_when_late:
            return  # the call cannot be ended, or is being ended
        report = self._report(group, current, waited, unconditional=True)
        group.end_call(current[0], f"{report}\n{reason}" if report else reason)

    def _check_queue(self, group: Group, call_queue: CallQueue, peer: int) -> None:
        """Report or abort a call that waits too long, or a message to or from another rank that is in ``stop()``."""
        doing = call_queue.doing
        if doing is None:
            self._queues.pop(call_queue, None)
            return
        known, since, reported = self._queues.get(call_queue, (None, 0.0, False))
        now = time.monotonic()
        if known is not doing:  # compared by identity: each call has a separate string
            self._queues[call_queue] = (doing, now, False)
            self._ask_at[call_queue] = _REFUSAL_GRACE_SECONDS
            return
        message = f"{group.where} has waited {now - since:.0f} s in {doing} on communicator {group.name}."
        if now - since >= _REFUSAL_GRACE_SECONDS and (how := self._how_it_stops(peer)):
            reason = f"  rank {peer} {how}, and does not make the other call: {self._place(peer)}"
            self.end_job(f"{message}\n{reason}", 1)
        if now - since >= self._ask_at[call_queue] and self._is_elsewhere(peer):
            self._ask_at[call_queue] = 2 * (now - since)
            there = self._activity_elsewhere([peer], _STATUS_TIMEOUT_SECONDS).get(peer, NO_ANSWER)
            if there.doing.startswith(_STOP):
                reason = f"  rank {peer} is in stop(), and does not make the other call: {there.line}"
                self.end_job(f"{message}\n{reason}", 1)
        if now - since >= self.config.stall_abort_seconds > 0:
            self.end_job(f"{message}\n{_ENDED} {self._where_calls_remain()}", 1)
        elif now - since >= self.config.stall_warning_seconds and not reported:
            self._queues[call_queue] = (doing, since, True)
            self.context.num_stalls += 1
            self.context.call_counts.add_message_stall(group.name, doing.partition("(")[0])
            place = self._place(peer)
            where = f" rank {peer} is {place}" if place else ""
            logger.warning(f"{message}{where}\n{self._how_to_compare()}")

    def _how_it_stops(self, rank: int) -> str:
        """Describe how a rank of this host ended its program or that it is in ``stop()``; '' if neither is known."""
        board = self._world.log_board
        if board is None or rank == self._world.rank or not call_log.is_stopping(board, rank):
            return ""
        field = board.get(rank, Block.exited)
        return call_log.how_it_left(field) if field else "is in stop()"

    def _place(self, rank: int) -> str:
        """Return the location of another rank; '' if it is not known."""
        world = self._world
        if rank == world.rank:
            return ""
        if self._is_elsewhere(rank):
            return self._activity_elsewhere([rank], _STATUS_TIMEOUT_SECONDS).get(rank, NO_ANSWER).line
        if world.log_board is None:
            return ""
        text = request_status(
            world.log_board, world.rank, rank, patience_seconds=_STATUS_TIMEOUT_SECONDS, meanwhile=self._answer_all
        )
        return text.split("\n", 1)[0]

    def _check_refused(self, group: Group, current: LoggedCall) -> None:
        """End the job if a rank has rejected the current call and continued, so that this rank would wait forever."""
        log_board = group.log_board
        if log_board is None or log_board.get(group.rank, Block.refused) == current[0]:
            return  # this rank rejects the call too
        for index in range(group.size):
            if index != group.rank and log_board.get(index, Block.refused) == current[0]:
                # The wait of this rank may be about to end for the same reason.
                now, (seq, since) = time.monotonic(), self._refused.get(group, (0, 0.0))
                if seq != current[0]:
                    self._refused[group] = current[0], now
                if seq != current[0] or now - since < _REFUSAL_GRACE_SECONDS:
                    return
                message = (
                    f"{group.where}: {call_log.Call(*current)} on communicator {group.name} cannot complete: rank "
                    f"{group.world_ranks[index]} has aborted it, or made a different call, and continued."
                )
                self.end_job(message, 1)

    # --- reports

    def _report(self, group: Group, current: LoggedCall, waited: float, *, unconditional: bool = False) -> str | None:
        """Describe a stall; None if a lower rank waits in the same call and reports it, unless `unconditional`."""
        call = call_log.Call(*current)
        text = f"{group.where} has waited {waited:.0f} s in {call} on communicator {group.name}."
        states = self._status_on_host(group, call.seq) if group.log_board is not None else self._remote_status(group)
        if states is None:
            is_local = len(group.hosts) == 1
            reason = f"check={self.config.check!r}" if is_local else "no connections between the hosts"
            return f"{text} The status of the other ranks is not available ({reason})."
        own_rank = group.world_ranks[group.rank]
        if not unconditional and any(
            rank < own_rank and state is not None and state.is_waiting for rank, state in states.items()
        ):
            return None
        lines = [
            f"  rank {rank} {_NO_REPLY if state is None else state.problem}"
            if state is None or state.problem
            else f"  rank {rank}, after {state.entered} calls: {state.location}"
            for rank, state in states.items()
            if state is None or state.entered < call.seq
        ]
        if not lines:
            missing = "the device or the MPI library" if call.code & call_log.ON_DEVICE else "the MPI library"
            return f"{text} All ranks have arrived, but {missing} has not completed the call."
        return "\n".join([f"{text} Not arrived:", *lines])

    def save_record(self, folder: str) -> None:
        """Write a copy of the flight record to a folder, for `torchmpi dump` on another host."""
        try:
            if self.context.flight_record is not None:
                self.context.flight_record.save(Path(folder))
        except (OSError, ValueError) as error:
            logger.warning(f"the last calls cannot be written to {folder}, as `torchmpi dump` asks: {error}")

    def _how_to_compare(self) -> str:
        """Return the command that compares the last calls of the ranks while they wait."""
        return f"`torchmpi dump {os.getppid()}` compares the last calls of the ranks."

    def _where_calls_remain(self) -> str:
        """Return how to compare the last calls of the ranks when they have ended."""
        record = self.context.flight_record
        if record is not None and record.path is not None:
            return f"`torchmpi analyze {record.path.parent}` compares the last calls of the ranks."
        return "With TORCHMPI_FLIGHT_RECORD=FOLDER the last calls of the ranks remain, for `torchmpi analyze FOLDER`."

    def _state_and_stacks(self) -> str:
        """Describe what this rank is doing, its last calls, and the stacks of its threads."""
        lines = [f"{self._world.where}, process {os.getpid()}, after SIGUSR1: {self._activity()}"]
        for group in list(self.context.groups):
            if last := group.call_log.recent_in_words()[:_LAST_CALLS]:
                lines.append(f"last calls on communicator {group.name}: {'; '.join(last)}")
        record = self.context.flight_record
        if record is not None and record.path is not None:
            lines.append(f"flight record: {record.path}")
        return "\n".join([*lines, stacks()])

    def _status_on_host(self, group: Group, seq: int) -> dict[int, RankStatus | None]:
        """Return the status of the other ranks of this host; for missing ranks, request their location."""
        log_board = group.log_board
        assert log_board is not None
        states: dict[int, RankStatus | None] = {}
        for index, rank in enumerate(group.world_ranks):
            entered, left = log_board.get(index, Block.entered), log_board.get(index, Block.left)
            text = ""
            if entered < seq:
                text = request_status(
                    log_board, group.rank, index, patience_seconds=_STATUS_TIMEOUT_SECONDS, meanwhile=self._answer_all
                )
            if index != group.rank:
                is_known = entered >= seq or text
                states[rank] = RankStatus(entered, entered > left, text.split("\n", 1)[0]) if is_known else None
        return states

    def _remote_status(self, group: Group) -> dict[int, RankStatus | None] | None:
        if self.heartbeat is None:
            return None
        others = [rank for index, rank in enumerate(group.world_ranks) if index != group.rank]
        replies = self.heartbeat.request(others, group.key, timeout_seconds=_REMOTE_TIMEOUT_SECONDS)
        return {rank: replies.get(rank) for rank in others}

    def own_status(self, key: int) -> RankStatus:
        """Return the status of this rank, for a rank of another host."""
        groups, blocking = list(self.context.groups), self._waiting_ranks.blocking_call()
        for group in groups:
            if group.key == key:
                entered, is_waiting = group.call_log.seq, group.call_log.current is not None
                status = RankStatus(entered, is_waiting, location(), activity=self._activity())
                status = status._replace(calls={str(each.key): each.call_log.seq for each in groups})
                if blocking is not None:
                    status = status._replace(blocked_on=str(blocking[0].key), blocked_call=blocking[1])
                return status
        return RankStatus(0, False, f"this communicator does not exist there; {location()}")

    def activities_elsewhere(self, patience_seconds: float) -> dict[int, Activity]:
        """Return what the ranks of other hosts are doing; empty if they cannot be asked."""
        return self._activity_elsewhere(filter(self._is_elsewhere, range(self._world.size)), patience_seconds)

    def _is_elsewhere(self, rank: int) -> bool:
        hosts = self.context.hosts
        return hosts[rank] != hosts[self._world.rank]

    def _activity_elsewhere(self, ranks: Iterable[int], patience_seconds: float) -> dict[int, Activity]:
        if self.heartbeat is None or self.heartbeat.is_this_thread:
            return {}
        wanted = list(ranks)
        replies = self.heartbeat.request(wanted, self._world.key, timeout_seconds=patience_seconds)
        return {rank: _activity_in(replies.get(rank)) for rank in wanted}

    def _answer_all(self) -> None:
        for group in list(self.context.groups):
            self._answer(group)

    def _answer(self, group: Group) -> None:
        """Write location and recent calls of this rank to the status board, if requested by another rank."""
        log_board = group.log_board
        if log_board is None:
            return
        asked = sum(log_board.get(index, Block.asked) for index in range(group.size) if index != group.rank)
        if asked != self._answered.get(group, 0):
            self._answered[group] = asked
            state = [json.dumps(each) for each in (self._activity(), self._waiting_ranks.now())]
            lines = [location(), *state, *group.call_log.recent_in_words()]
            log_board.write_text(group.rank, "\n".join(lines))
            log_board.set(group.rank, Block.answered, log_board.get(group.rank, Block.answered) + 1)

    def _activity(self) -> Activity:
        """Return what this rank is doing: the call of the program, not a step of it on a part of its group."""
        if self.context.failure:
            return Activity(self.context.failure, 0.0, "")
        now, groups = time.monotonic(), list(self.context.groups)
        parts = {part for group in groups for part in (group.local, group.across)}
        for group in groups:
            if group in parts:
                continue
            if (current := group.call_log.current) is not None:
                seq, since = self._since.get(group, (0, now))
                seconds = now - since if seq == current[0] else 0.0
                return Activity(f"{call_log.Call(*current)} on communicator {group.name}", seconds, location())
            for call_queue in list(group.peer_queues.values()):
                if (doing := call_queue.doing) is not None:
                    known, since, _ = self._queues.get(call_queue, (None, now, False))
                    seconds = now - since if known is doing else 0.0
                    return Activity(f"{doing} on communicator {group.name}", seconds, location())
        return Activity("not in a call", 0.0, location())


def _described(circle: Sequence[int]) -> str:
    chain = ", which waits for ".join(f"rank {rank}" for rank in [*circle, circle[0]])
    return f"{chain.replace(', which waits', ' waits', 1)}, in calls on different communicators"


def _activity_in(status: RankStatus | None) -> Activity:
    if status is None:
        return NO_ANSWER
    return Activity(status.problem, 0.0, "") if status.problem else Activity(*status.activity)


def activities_on_host(group: Group, *, patience_seconds: float) -> dict[int, Activity]:
    """Return what the other ranks of a group on this host are doing, by their numbers in the world."""
    board = group.log_board
    if board is None:
        return {}
    others = [index for index in range(group.size) if index != group.rank]
    texts = request_statuses(board, group.rank, others, patience_seconds=patience_seconds)
    found = {}
    for index in others:
        lines = texts.get(index, "").split("\n")
        is_answer = len(lines) > 1 and lines[1].startswith("[")  # a rank that has freed the group describes its calls
        found[group.world_ranks[index]] = Activity(*json.loads(lines[1])) if is_answer else NO_ANSWER
    return found
