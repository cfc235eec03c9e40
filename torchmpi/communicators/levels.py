"""The communicator levels of this process, the current level, and the span of hierarchical collectives."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..errors import ArgumentError, CommunicatorError, MismatchError
from ..shared_memory import fast_path
from ..tensors import streams
from ..timeline import events
from . import splits
from .communicator import NO_LEVEL, Communicator, NullCommunicator
from .group import Group, GroupContext


class CallsForbidden:
    """Takes the place of the communicator of `use()` while a function runs that must not communicate."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call the function, in a context of its own: an interrupt before a reset would leave calls forbidden."""
        context = contextvars.copy_context()
        context.run(used.set, self)
        context.run(function, *arguments)


used: contextvars.ContextVar[Communicator | CallsForbidden | None]
used = contextvars.ContextVar("torchmpi communicator", default=None)


def communicator_of_block() -> Communicator | None:
    """Return the communicator of the innermost ``use()``, if any; raise in a function that must not communicate."""
    chosen = used.get()
    if isinstance(chosen, CallsForbidden):
        raise CommunicatorError(chosen.reason)
    return chosen


Comm = int | Communicator | Group | NullCommunicator | None
"""The type of ``comm=``: a level, a communicator, a group of a communicator, or None for the current communicator."""


class LevelSpan(NamedTuple):
    """Nested levels over which collectives on the first level are composed, and the groups of their steps."""

    levels: list[Communicator]
    groups: dict[tuple[int, str], Group]
    """By level number and ``intra`` or ``inter``."""


class CommunicatorStack:
    """The levels of this process, outermost first, and the current one."""

    def __init__(self, world: Any, context: GroupContext) -> None:
        self.context = context
        everyone = tuple(range(world.size))
        split = splits.plan_split(["world"] * world.size, cartesian=True)
        intra = Group(world.Dup(), "world", everyone, context)
        self.levels = [Communicator(0, "world", intra, None, split=split, parent=None)]
        self.default = self.levels[0]
        self.span = LevelSpan(self.levels[:1], {})

    @property
    def current(self) -> Communicator:
        """The communicator of the innermost ``use()`` of this thread or task, else of ``set_communicator()``."""
        return self._open(self._chosen())

    def _chosen(self) -> Communicator:
        chosen = communicator_of_block()
        # The block of a `use()` may last longer than the runtime in which it began.
        return self.default if chosen is None or chosen.intra.context is not self.context else chosen

    def _open(self, communicator: Communicator) -> Communicator:
        """Return a communicator, or raise if it has been closed."""
        if communicator.intra.call_queue.closed:
            reason = (
                "freed. Make another one with mpi.group()"
                if communicator.intra.context is self.context
                else "closed; it belongs to an earlier start()"
            )
            raise CommunicatorError(f"rank {self.levels[0].rank}: communicator {communicator.name} has been {reason}.")
        return communicator

    def find(self, communicator: Comm) -> Communicator:
        """Return the communicator of a ``comm=`` argument."""
        communicator_of_block()
        if communicator is None:
            return self.current
        if isinstance(communicator, Communicator):
            return self._open(communicator)
        if isinstance(communicator, Group):
            return self._open(Communicator.of(communicator))
        if isinstance(communicator, NullCommunicator):
            communicator.refuse()
        if type(communicator) is int and 0 <= communicator < len(self.levels):
            return self.levels[communicator]
        raise CommunicatorError(
            f"rank {self.levels[0].rank}: comm={communicator!r} is no communicator. Use None, a Communicator "
            "(mpi.group(ranks) makes one from the ranks of mpi4py's), one of its groups, or a level from 0 to "
            f"{len(self.levels) - 1}:\n{self.names()}"
        )

    def push(self, key: str, name: str | None = None, keys: Sequence[str] | None = None) -> int:
        """Split the current intra group by key; the new level becomes current.

        `keys` are the keys of all ranks of the world, if they are known; otherwise those of the group are gathered.
        """
        if not isinstance(key, (str, int)):
            raise ArgumentError(
                f"rank {self.levels[0].rank}: push_communicator(key={key!r}): the key must be a string or an integer."
            )
        parent = self.current
        if parent.level == NO_LEVEL:
            raise CommunicatorError(
                f"{parent.intra.where}: push_communicator() splits levels, and the current communicator {parent.name} "
                "is none. Use mpi.group() for a part of it."
            )
        return parent.intra.call_action("split", partial(self._split, parent, str(key), name or str(key), keys))

    def _split(self, parent: Communicator, key: str, name: str, known: Sequence[str] | None) -> int:
        comm = parent.intra.comm
        keys = comm.allgather(key) if known is None else [known[rank] for rank in parent.intra.world_ranks]
        split = splits.plan_split(keys, cartesian=True)
        member = split.members[parent.rank]
        level = len(self.levels)
        world_ranks, is_whole = parent.intra.world_ranks, len(split.groups) == 1
        # MPI needs more messages to split a communicator than to duplicate it, and none for those of one rank.
        intra_comm = comm.Dup() if is_whole else comm.Split(member.group, parent.rank)
        intra = Group(intra_comm, name, tuple(world_ranks[rank] for rank in member.intra), self.context)
        if is_whole and hasattr(self.context.MPI, "COMM_SELF"):
            inter_comm = None if member.inter is None else self.context.MPI.COMM_SELF.Dup()
        else:  # ranks without an inter group take part too: the split is collective over the parent
            color = member.intra_rank if member.inter is not None else self.context.MPI.UNDEFINED
            inter_comm = comm.Split(color, member.group)  # ordered as the plan numbers the groups
        inter: Group | NullCommunicator
        if member.inter is not None:
            inter = Group(inter_comm, f"{name} inter", tuple(world_ranks[rank] for rank in member.inter), self.context)
        else:
            inter = NullCommunicator(f"{name} inter", tuple(world_ranks[rank] for rank in split.roots), intra.where)
        self.levels.append(Communicator(level, name, intra, inter, split=split, parent=parent))
        self._make_default(self.levels[level])
        return level

    def set_current(self, level: int) -> None:
        """Make a level the default of this process."""
        found = self.find(level)
        if found.level == NO_LEVEL:
            raise CommunicatorError(
                f"{found.intra.where}: set_communicator() takes a level, and communicator {found.name} is none. Use "
                "`with mpi.use(communicator):`."
            )
        self._make_default(found)

    def _make_default(self, communicator: Communicator) -> None:
        self.default = communicator
        fast_path.invalidate()

    @contextmanager
    def use(self, communicator: Comm) -> Iterator[Communicator]:
        """Make a communicator current within a block, for this thread or task only."""
        found = self.find(communicator)
        token = used.set(found)
        try:
            yield found
        finally:
            used.reset(token)

    def set_span(self, begin: int, end: int) -> None:
        """Compose collectives on level `begin` of steps over the levels down to `end`. Collective."""
        last = len(self.levels) - 1
        where = f"rank {self.levels[0].rank}: set_collective_span({begin}, {end})"
        if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end <= last):
            raise CommunicatorError(f"{where}: need 0 <= begin <= end <= {last}; the levels are:\n{self.names()}")
        nested = [self.levels[end]]
        while nested[0].level > begin and nested[0].parent is not None:
            nested.insert(0, nested[0].parent)
        if nested[0].level != begin:
            raise CommunicatorError(f"{where}: level {end} was not split from level {begin}, so they do not nest.")
        world = self.levels[0].intra
        spans = world.call_action("split", partial(world.comm.allgather, (begin, end)))
        if any(span != (begin, end) for span in spans):
            raise MismatchError(f"{where}: the ranks asked for different spans: {spans}. Pass one span on all ranks.")
        # Queued calls may use the groups of the old span; the groups of the new one are duplicated below.
        for level in (*self.span.levels, *nested):
            for group in level.groups.values():
                group.call_queue.drain()
        for group in self.span.groups.values():
            group.free()
        for level in (self.span.levels[0], nested[0]):
            level.intra.forget_plans()  # made for the old span
        # Separate groups: a step may run in a helper thread while the user makes a call on the same level.
        pairs = [(level, kind, group) for level in nested[1:] for kind, group in level.groups.items()]
        groups = {(level.level, kind): group.duplicate(f"{group.name} in span") for level, kind, group in pairs}
        self.span = LevelSpan(nested, groups)

    def names(self) -> str:
        """Describe all levels, one per line, with a mark at the current one."""
        lines = []
        current = self._chosen()
        for communicator in self.levels:
            mark = "*" if communicator is current else " "
            lines.append(
                f"{mark} {communicator!r}"[:-1].replace("<Communicator ", "")
                + f", ranks {communicator.intra.world_ranks}"
            )
        return "\n".join(lines)

    def free(self) -> None:
        """Free all groups in reverse order of their creation."""
        while self.context.groups:
            self.context.groups[-1].free()  # with its parts
        self.context.freed.close()
        streams.release()


def _follow_readers() -> None:
    """Pause the fast path while there are readers, to which calls through Python are reported."""
    fast_path.pause(events.recorder is not None)


events.when_changed.append(_follow_readers)
