"""Stall detection: a thread that reports calls which wait too long, with the ranks that have not arrived.

The thread never communicates on the groups of the program, but reads the call logs, and the status boards that ranks of
one host share. It also answers when other ranks ask for the status of this one (:mod:`.status_exchange`), so that a
report can contain the current line of a missing rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

from ..communicators import call_log
from ..communicators.call_codes import ON_DEVICE
from ..communicators.call_queue import CallQueue
from ..communicators.group import Group, GroupContext
from ..communicators.rank_status import NO_ANSWER, LastCall, RankStatus
from ..config import Config
from ..launch import mpi_library
from ..launch.stacks import StackRequests, stacks
from ..log import logger
from ..shared_memory.memory_layout import Block
from . import program_lines
from .deadlock import ORDER, described, find_circle, waits_of
from .report import about_others
from .status_exchange import StatusExchange

# A rank that rejects a call raises, and its traceback ends the job. Other ranks report only if it continues instead.
_REFUSAL_GRACE_SECONDS = 2.0
_STATUS_TIMEOUT_SECONDS = 2.0
_REMOTE_TIMEOUT_SECONDS = 3.0
# The lowest waiting rank ends the job for all; the others do so only if that has not happened after this time.
_ABORT_GRACE_SECONDS = 10.0
_NO_REPLY = "does not reply: it is stopped, or busy outside Python"
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

    def __init__(self, context: GroupContext, config: Config, exchange: StatusExchange, end_job: EndJob) -> None:
        super().__init__(name="torchmpi watchdog", daemon=True)
        self.context, self.config, self.end_job = context, config, end_job
        self._exchange, self._times, self._world = exchange, exchange.times, exchange.world
        self._stopped = threading.Event()
        self._stack_requests = StackRequests()
        # Weak, as a program may make and free any number of groups.
        self._reported: WeakKeyDictionary[Group | CallQueue, int | str] = WeakKeyDictionary()
        """The last call, or message, of which a stall has been reported."""
        self._refused: WeakKeyDictionary[Group, tuple[int, float]] = WeakKeyDictionary()
        self._steps: set[Group] = set()
        """Groups on which calls are steps of a call of the program, which is reported instead of the step."""
        self._ask_at: WeakKeyDictionary[CallQueue, float] = WeakKeyDictionary()
        """After how many seconds the rank of another host for which a message waits is asked."""
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

    # --- checks

    def _check_launcher(self) -> None:
        if self._launcher not in (0, os.getppid()):  # only MPICH's ends the ranks when it is killed
            message = f"the launcher (process {self._launcher}) has ended. That ends the job."
            self.end_job(f"{self._world.where}: {message}", 1)

    def _take_requests(self) -> None:
        """Do what other processes have asked for: save the last calls, tell where the rank is, print the stacks."""
        if (record := self.context.flight_record) is not None:
            record.note_ticks()
            if (request := record.take_request()) and self._exchange.heartbeat is not None:
                self._exchange.heartbeat.ask_for_records(request)
            if record.is_looked_at():
                record.tell(program_lines.activity())
        if self._stack_requests.take():
            logger.warning(self._state_and_stacks())

    def _check_groups(self) -> None:
        groups = list(self.context.groups)
        # two checks before deadlocks are searched
        is_late = self._times.longest(groups) >= _REFUSAL_GRACE_SECONDS / 2
        waiting_ranks = self._exchange.waiting_ranks
        waiting_ranks.observe(is_late=is_late)
        if is_late and self.context.flight_record is not None and any(waiting_ranks.blocked):
            self.context.flight_record.note_blocked(waiting_ranks.blocked)
        calling = [group for group in groups if group.call_log.current is not None]
        self._steps = {part for group in calling for part in (group.intra_host, group.inter_host) if part is not None}
        for group in groups:
            try:
                self._exchange.answer(group)
                self._check_group(group)
                for (_, peer), call_queue in list(group.peer_queues.items()):
                    self._check_queue(group, call_queue, group.world_ranks[peer])
            except (ValueError, KeyError):
                continue  # the group was freed meanwhile, and its status board is unmapped

    def _check_hosts(self) -> None:
        heartbeat = self._exchange.heartbeat
        if heartbeat is not None and heartbeat.is_stalled and time.monotonic() >= self._search_from:
            heartbeat.is_stalled = False
            self._search_on_all_hosts()

    def _check_group(self, group: Group) -> None:
        """Report, expire or abort the current call of a group if it waits too long."""
        current = group.call_log.current
        if current is None or self.context.loss:  # a call that waits for a lost rank is ended, and the program goes on
            self._times.end(group)
            return
        seq = current[0]
        if self._times.begin(group, seq):
            group.call_log.report_when_late = ""
            return
        waited = self._times.seconds(group, seq)
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
        exchange, world = self._exchange, self._world
        if (seq == current[0] and waited < at) or exchange.waiting_ranks.blocking_call() != (group, current[0]):
            return
        self._circle_at[group], begin = (current[0], 2 * waited), time.monotonic() - waited
        if exchange.heartbeat is not None:
            exchange.heartbeat.announce_stall()
        if world.log_board is None or not _is_any_missing(group, current[0]):
            return
        circle, _ = self._find_circle(_STATUS_TIMEOUT_SECONDS, world.rank)
        if not circle:
            return
        reason = f"{described(circle)} {ORDER}"
        if group.can_expire and not group.call_log.report_when_late:
            self._expire(group, current, waited, reason)
            # The answers of the other ranks may have taken seconds: the call needs as long again to raise its error.
            self._circle_at[group] = (current[0], 2 * (time.monotonic() - begin))
        elif world.rank == min(circle):
            report = self._report(group, current, waited, unconditional=True)
            self.end_job(f"{report}\n{reason}", 1)

    def _search_on_all_hosts(self) -> None:
        """End the job if there is a deadlock. Only rank 0 does this, for all."""
        begin = time.monotonic()
        circle, states = self._find_circle(_REMOTE_TIMEOUT_SECONDS)
        self._search_from = time.monotonic() + _PAUSE_PER_SEARCH * (time.monotonic() - begin)
        if circle:
            lines = about_others({rank: states[rank] for rank in circle})
            self.end_job("\n".join([described(circle), *lines, ORDER]), 1)

    def _find_circle(
        self, patience_seconds: float, through: int | None = None
    ) -> tuple[list[int], dict[int, RankStatus]]:
        """Ask all ranks for their status; return a circle of ranks that wait for each other, and the status of all."""
        world = self._world
        others = [rank for rank in range(world.size) if rank != world.rank]
        states = self._exchange.ask(world, others, patience_seconds)
        states[world.rank] = self._exchange.own()
        return find_circle(waits_of(states), through), states

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
            self._times.end(call_queue)
            return
        if self._times.begin(call_queue, doing):
            self._ask_at[call_queue] = _REFUSAL_GRACE_SECONDS
            return
        waited = self._times.seconds(call_queue, doing)
        message = f"{group.where} has waited {waited:.0f} s in {doing} on communicator {group.name}."
        if waited >= _REFUSAL_GRACE_SECONDS and (how := self._how_it_stops(peer)):
            reason = f"  rank {peer} {how}, and does not make the other call: {self._place(peer)}"
            self.end_job(f"{message}\n{reason}", 1)
        if waited >= self._ask_at[call_queue] and self._world.log_board is None:
            self._ask_at[call_queue] = 2 * waited
            there = self._status_of(peer)
            if there.doing.startswith(_STOP):
                reason = f"  rank {peer} is in stop(), and does not make the other call: {there.line}"
                self.end_job(f"{message}\n{reason}", 1)
        if waited >= self.config.stall_abort_seconds > 0:
            self.end_job(f"{message}\n{_ENDED} {self._where_calls_remain()}", 1)
        elif waited >= self.config.stall_warning_seconds and self._reported.get(call_queue) is not doing:
            self._reported[call_queue] = doing
            self.context.num_stalls += 1
            self.context.call_counts.add_message_stall(group.name, doing.partition("(")[0].rstrip())
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

    def _status_of(self, rank: int) -> RankStatus:
        if rank == self._world.rank:  # which sends to itself
            return NO_ANSWER
        return self._exchange.ask(self._world, [rank], _STATUS_TIMEOUT_SECONDS).get(rank, NO_ANSWER)

    def _place(self, rank: int) -> str:
        """Return the location of another rank; '' if it is not known."""
        return self._status_of(rank).line

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
        states = self._states(group, call.seq)
        if states is None:
            is_local = len(group.hosts) == 1
            reason = f"check={self.config.check!r}" if is_local else "no connections between the hosts"
            return f"{text} The status of the other ranks is not available ({reason})."
        own_rank, none = group.world_ranks[group.rank], LastCall()
        last = {rank: none if status is None else status.calls.get(group.key, none) for rank, status in states.items()}
        if not unconditional and any(rank < own_rank and each.is_inside for rank, each in last.items()):
            return None
        lines = [
            f"  rank {rank} {_NO_REPLY if status is None else status.problem}"
            if status is None or status.problem
            else f"  rank {rank}, after {last[rank].seq} calls: {_where(status, group)}"
            for rank, status in states.items()
            if last[rank].seq < call.seq
        ]
        if not lines:
            missing = "the device or the MPI library" if call.code & ON_DEVICE else "the MPI library"
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
        lines = [f"{self._world.where}, process {os.getpid()}, after SIGUSR1: {self._exchange.own()}"]
        for group in list(self.context.groups):
            if last := group.call_log.recent_in_words()[:_LAST_CALLS]:
                lines.append(f"last calls on communicator {group.name}: {'; '.join(last)}")
        record = self.context.flight_record
        if record is not None and record.path is not None:
            lines.append(f"flight record: {record.path}")
        return "\n".join([*lines, stacks()])

    def _states(self, group: Group, seq: int) -> dict[int, RankStatus | None] | None:
        """Return the status of the other ranks of a group, on a host only the last call of those that have arrived.

        None is the status of a rank that does not answer, and the result if no rank can be asked.
        """
        board, ranks = group.log_board, group.world_ranks
        others = [(index, rank) for index, rank in enumerate(ranks) if index != group.rank]
        if board is None:
            if self._exchange.heartbeat is None:
                return None
            replies = self._exchange.ask(group, [rank for _, rank in others], _REMOTE_TIMEOUT_SECONDS)
            return {rank: replies.get(rank) for _, rank in others}
        last = {rank: board.last_call(index) for index, rank in others}
        missing = [rank for rank, call in last.items() if call.seq < seq]
        replies = self._exchange.ask(group, missing, _STATUS_TIMEOUT_SECONDS) if missing else {}
        return {
            rank: None
            if rank in missing and rank not in replies
            else replies.get(rank, RankStatus())._replace(calls={group.key: call})
            for rank, call in last.items()
        }


def _is_any_missing(group: Group, seq: int) -> bool:
    """Return whether a rank has not entered a call of this rank, according to the status board of the group."""
    board = group.log_board
    return board is not None and any(board.last_call(index).seq < seq for index in range(group.size))


def _where(status: RankStatus, group: Group) -> str:
    """Describe where a rank is that has not entered a call of a group."""
    where = status.line or status.doing
    return where if group.key in status.calls else f"this communicator does not exist there; {where}"
