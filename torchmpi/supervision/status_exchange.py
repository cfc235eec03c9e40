"""What this rank tells other ranks of itself, and the question by which it gets the same from them.

The status is one structure (:mod:`torchmpi.communicators.rank_status`). Two carriers bring it: the status board between
ranks that share one, the heartbeat between all ranks of several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from ..communicators import call_log
from ..communicators.call_queue import CallQueue
from ..communicators.group import Group, GroupContext
from ..communicators.rank_status import NO_ANSWER, LastCall, Question, RankStatus, await_answers
from ..communicators.status_board import BoardQuestion
from ..shared_memory.memory_layout import Block
from .deadlock import WaitingRanks
from .heartbeat import Heartbeat
from .program_lines import location

NO_CALL = "not in a call"


class CallTimes:
    """Since when calls and messages wait, as the watchdog has seen them."""

    def __init__(self) -> None:
        # Weak, as a program may make and free any number of groups.
        self._since: WeakKeyDictionary[Group | CallQueue, tuple[int | str, float]] = WeakKeyDictionary()

    def begin(self, of: Group | CallQueue, call: int | str) -> bool:
        """Note the current call of a group, by its number, or of a queue, by its text; return whether it is new."""
        known = self._since.get(of)
        # Each message has a text of its own, which may be equal to that of the last one.
        if known is not None and (known[0] is call or (isinstance(call, int) and known[0] == call)):
            return False
        self._since[of] = call, time.monotonic()
        return True

    def end(self, of: Group | CallQueue) -> None:
        """Note that a group or a queue has no call."""
        self._since.pop(of, None)

    def seconds(self, of: Group | CallQueue, call: int | str) -> float:
        """Return how long a call has waited; 0 if it has not been noted yet."""
        known, since = self._since.get(of, ("", 0.0))
        return time.monotonic() - since if known is call or (isinstance(call, int) and known == call) else 0.0

    def longest(self, groups: Iterable[Group]) -> float:
        """Return how long a call on these groups has waited at most; 0 without one."""
        since = [self._since[group][1] for group in groups if group in self._since]
        return time.monotonic() - min(since) if since else 0.0


class StatusExchange:
    """The status of this rank, and of those that it asks."""

    def __init__(self, context: GroupContext, world: Group) -> None:
        self.context, self.world = context, world
        self.host: Group | None = world if len(set(context.hosts)) == 1 else world.intra_host
        """The ranks of this host; None if this rank is alone there."""
        self.heartbeat: Heartbeat | None = None
        """The connections to the ranks of other hosts."""
        self.times = CallTimes()
        self.waiting_ranks = WaitingRanks(context)
        self._answered: WeakKeyDictionary[Group, int] = WeakKeyDictionary()

    # --- what this rank tells

    def own(self) -> RankStatus:
        blocked = self.waiting_ranks.blocked  # before the calls: a rank does not wait for one that has entered since
        groups = list(self.context.groups)
        calls = {
            group.key: LastCall(group.call_log.seq, group.call_log.current is not None)
            for group in groups
            if _may_be_behind(group)
        }
        if self.context.failure:
            return RankStatus(self.context.failure, calls=calls)
        doing, seconds = self.doing()
        return RankStatus(doing, seconds, location(), calls=calls, blocked=blocked)

    def doing(self) -> tuple[str, float]:
        """Return the call of the program and how long it has waited, not a step of it on a part of its group."""
        groups = list(self.context.groups)
        parts = {part for group in groups for part in (group.intra_host, group.inter_host)}
        for group in groups:
            if group in parts:
                continue
            if (current := group.call_log.current) is not None:
                call = f"{call_log.Call(*current)} on communicator {group.name}"
                return call, self.times.seconds(group, current[0])
            for call_queue in list(group.peer_queues.values()):
                if (doing := call_queue.doing) is not None:
                    return f"{doing} on communicator {group.name}", self.times.seconds(call_queue, doing)
        return NO_CALL, 0.0

    def answer(self, group: Group) -> None:
        """Write the status of this rank to the status board of a group, if another rank has asked for it."""
        board = group.log_board
        if board is None:
            return
        asked = sum(board.get(index, Block.asked) for index in range(group.size) if index != group.rank)
        if asked != self._answered.get(group, 0):
            self._answered[group] = asked
            board.write_status(group.rank, self.own()._replace(recent=group.call_log.recent_in_words()))
            board.set(group.rank, Block.answered, board.get(group.rank, Block.answered) + 1)

    def answer_all(self) -> None:
        """Write the status to the boards of all groups on which another rank has asked for it."""
        for group in list(self.context.groups):
            self.answer(group)

    # --- what it asks

    @property
    def _can_ask_other_hosts(self) -> bool:
        """Whether there are connections to ranks of other hosts, and this thread is not the one that reads them."""
        return self.heartbeat is not None and not self.heartbeat.is_this_thread

    def ask(self, group: Group, ranks: Iterable[int], patience_seconds: float) -> dict[int, RankStatus]:
        """Return the status of ranks of a group that answer in time, by their numbers in the world.

        The ranks of a group with a status board are asked there, others over the connections between the hosts.
        The caller is the watchdog, which answers questions of other ranks meanwhile.
        """
        near, far = ([], list(ranks)) if group.log_board is None else (list(ranks), [])
        return self._ask(group, near, far, patience_seconds, self.answer_all)

    def ask_everyone(self, patience_seconds: float) -> dict[int, RankStatus]:
        """Return the status of all other ranks: of those that do not answer in time, that.

        Ranks that cannot be asked are left out. From any thread, also while the job ends.
        """
        hosts, own = self.context.hosts, self.world.rank
        near: list[int] = []
        far: list[int] = []
        if self.host is not None and self.host.log_board is not None:
            near = [rank for rank in self.host.world_ranks if rank != own]
        if self._can_ask_other_hosts:
            far = [rank for rank, host in enumerate(hosts) if host != hosts[own]]
        answers = self._ask(self.host, near, far, patience_seconds, lambda: None)
        # A rank without a call or the absence of one has freed the group: it has called stop().
        known = {rank: status for rank, status in answers.items() if status.doing or status.problem}
        return {rank: known.get(rank, NO_ANSWER) for rank in (*near, *far)}

    def _ask(
        self,
        group: Group | None,
        near: Sequence[int],
        far: Sequence[int],
        patience_seconds: float,
        meanwhile: Callable[[], object],
    ) -> dict[int, RankStatus]:
        """Ask `near` on the board of a group and `far` over the connections, at the same time."""
        limit = time.monotonic() + patience_seconds
        questions: list[tuple[Question, Sequence[int]]] = []
        if far and self.heartbeat is not None and self._can_ask_other_hosts:
            questions.append((self.heartbeat.ask(far), range(self.world.size)))
        if near and group is not None and group.log_board is not None:
            indices = [group.world_ranks.index(rank) for rank in near]
            questions.append((BoardQuestion(group.log_board, group.rank, indices), group.world_ranks))
        answers: dict[int, RankStatus] = {}
        for question, ranks in questions:
            found = await_answers(question, limit - time.monotonic(), meanwhile)
            answers.update({ranks[index]: status for index, status in found.items()})
        return answers


def _may_be_behind(group: Group) -> bool:
    """Return whether another rank may have entered a later call on a group."""
    board, seq = group.log_board, group.call_log.seq
    try:
        return board is None or any(board.last_call(index).seq > seq for index in range(group.size))
    except ValueError:  # it was freed meanwhile, and its board is unmapped
        return False
