"""Groups of ranks that communicate, and the levels of communicators built from them.

A :class:`Group` is what a collective runs on: an MPI communicator with its lane (order of calls) and ledger (what was
called). A :class:`Communicator` is one level of the hierarchy: the *intra* group of ranks that gave the same key, and
the *inter* group across those groups.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import CommunicatorError, MismatchError, TorchMPIError
from ..log import logger
from ..shared_memory import fast_path
from ..shared_memory.memory_layout import num_slots, slots_begin
from ..shared_memory.segments import Segment
from . import splits
from .call_log import Call, CallLog, StatusBoard, mismatch_message
from .call_queue import CallQueue
from .handle import Handle
from .release import release

_HEADER_DIMS = 12
_SLOTS_BYTES = 16 << 20  # of all ranks of a group together


class Group:
    """Ranks that can call collectives together, as one of them sees it."""

    def __init__(
        self, comm: Any, name: str, world_ranks: tuple[int, ...], context: GroupContext, *, check: str | None = None
    ) -> None:
        self.comm = comm
        self.name = name
        self.world_ranks = world_ranks
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.context = context
        self.hosts = sorted({context.hosts[rank] for rank in world_ranks})
        self.side_comm = comm.Dup()
        """For point-to-point messages, which must not meet those of a collective."""
        self.plans: dict[Any, Any] = {}
        """Prepared calls by everything that selects them; filled by the verbs."""
        self.status_board = _make_status_board(self)
        """Memory shared by the ranks, if they are on one host and there is any."""
        self.checking = _how_to_check(self, context.check if check is None else check)
        self.is_strict = self.checking == "strict"
        self.log_board = self.status_board if self.checking == "board" else None
        self.call_log = CallLog(name, self.rank, self.size, self.log_board)
        self.shared: Any = None
        """What kernels know of this group; made by the backend that runs them."""
        self.binding = threading.Lock()
        """Held while a backend makes what it keeps of this group: a call is prepared by its caller's thread or by the
        lane's, and two that did so at the same time would count the calls for themselves."""
        self.call_queue = CallQueue(name, threaded=context.threaded)
        self.peer_queues: dict[tuple[str, int], CallQueue] = {}
        twins = sum(group.world_ranks == world_ranks and group.name == name for group in context.groups)
        self.key = zlib.crc32(repr((world_ranks, name, twins)).encode())
        """The same number on all its ranks, and on no other group."""
        self.timeout_seconds = 0.0
        """After how long a call raises where its wait can be ended, which is in shared memory; 0 = never."""
        self.attachments: list[Any] = []
        """What others have opened on this group, to be closed before it."""
        self.placement = splits.plan_split([context.hosts[rank] for rank in world_ranks], cartesian=True)
        """Which ranks share a host."""
        self.local, self.across = _split_by_host(self)
        """The ranks on this host, None without another one; and the group that goes from host to host: on a grid the
        ranks that have the same place on each host, otherwise the first of each host, elsewhere None. Both are None
        where there is nothing to gain: all ranks on one host, or each on its own."""
        context.groups.append(self)

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def call(self, plan: Any, tensor: Any, out: Any, root: int) -> Any:
        """Run a prepared call now, in the caller's thread if nothing is queued."""
        call_queue = self.call_queue
        # Positional arguments and no context manager: each is a tenth of a microsecond on every call.
        if call_queue.pending == 0 and call_queue.run_lock.acquire(False):
            try:
                return self.perform(plan, tensor, out, root)
            finally:
                call_queue.run_lock.release()
        self._check_open()
        return call_queue.run(partial(self.perform, plan, tensor, out, root))

    def submit(self, plan: Any, *arguments: Any) -> Handle:
        """Queue a prepared call."""
        self._check_open()
        return self.call_queue.submit(partial(self.perform, plan, *arguments), f"{self.where}: {plan.collective}")

    def _check_open(self) -> None:
        if self.call_queue.closed:
            raise CommunicatorError(f"{self.where}: communicator {self.name} has been closed.")

    def perform(self, plan: Any, tensor: Any, out: Any, root: int) -> Any:
        """Run a prepared call in its turn, under the eyes of the ledger."""
        call_log = self.call_log
        code = plan.code | root << 32 if root else plan.code
        shape = tensor.shape if plan.is_whole else plan.shape_of(tensor)
        call_log.enter(code, shape)
        try:
            if self.is_strict:
                self._compare_headers(code, shape)
            result = plan.run(tensor, out, root)
        except self.context.MPI.Exception as error:
            call_log.compare()  # raises MismatchError if that is the reason
            call_log.abandon()
            raise TorchMPIError(f"{self.where}: {Call(call_log.seq, code, shape)} failed in MPI: {error}.") from error
        except BaseException:
            call_log.abandon()
            raise
        call_log.leave()
        return result

    @property
    def is_grid(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return self.placement.is_cartesian

    @property
    def where(self) -> str:
        """``rank 3``: the rank in the world, with which messages begin."""
        return f"rank {self.world_ranks[self.rank]}"

    def peer_queue(self, direction: str, peer: int) -> CallQueue:
        """The queue of messages to (``send``) or from (``receive``) one rank: messages of a pair keep their order."""
        call_queue = self.peer_queues.get((direction, peer))
        if call_queue is None:
            call_queue = CallQueue(f"{self.name} {direction} {peer}", threaded=self.context.threaded)
            call_queue = self.peer_queues.setdefault((direction, peer), call_queue)
        return call_queue

    def _compare_headers(self, code: int, shape: tuple[int, ...]) -> None:
        """Tell each other what is being called, and raise on all ranks if it is not the same."""
        MPI = self.context.MPI
        header = np.zeros(3 + _HEADER_DIMS, np.int64)
        header[:3] = self.call_log.seq, code, len(shape)
        header[3 : 3 + len(shape)] = shape[:_HEADER_DIMS]
        headers = np.empty((self.size, header.size), np.int64)
        self.comm.Allgather((header, MPI.INT64_T), (headers, MPI.INT64_T))
        if (headers == header).all():
            return
        calls = {
            rank: str(Call(int(seq), int(code), tuple(int(dim) for dim in dims[: int(num_dims)])))
            for rank, (seq, code, num_dims, *dims) in enumerate(headers)
        }
        raise MismatchError(f"{self.where}: {mismatch_message(self.name, calls)}")

    def duplicate(self, name: str) -> Group:
        """The same ranks with a life of their own: calls on it do not mix with calls here. Collective."""
        return Group(self.comm.Dup(), name, self.world_ranks, self.context)

    def forget_plans(self) -> None:
        """Prepare every call anew, because something has changed that was taken into account."""
        self.plans.clear()
        fast_path.invalidate()  # last: doors are opened for plans that are there

    def drain(self) -> None:
        """Finish everything that is queued."""
        for call_queue in (self.call_queue, *self.peer_queues.values()):
            call_queue.drain()

    def free(self) -> None:
        """Give everything back. Collective, since MPI's is."""
        for call_queue in (self.call_queue, *self.peer_queues.values()):
            call_queue.close()
            for error in filter(None, (handle.unseen_error for handle in call_queue.failed)):
                logger.error(f"an asynchronous call failed, and wait() was not called: {error}")
        for attachment in reversed(self.attachments):
            attachment.close()
        self.forget_plans()
        for part in (self.across, self.local):
            if part is not None:
                part.free()
        self.context.groups.remove(self)
        self.call_log.close()
        if self.status_board is not None:
            self.status_board.close()
        release(self.side_comm)
        release(self.comm)


class GroupContext:
    """What all groups of a runtime share."""

    def __init__(self, MPI: Any, hosts: Sequence[int], *, check: str, threaded: bool, slot_bytes: int) -> None:
        self.MPI = MPI
        self.slot_bytes = slot_bytes
        """Most bytes of a slot in shared memory; 0 = do without shared memory."""
        self.is_crowded = False
        """Whether this host has more ranks than cores for them."""
        self.processes: dict[int, int] = {}
        """The process of each world rank on this host, if they can read each other's memory."""
        self.problems: set[str] = set()
        """What could not be had, for start() to report."""
        self.hosts = tuple(hosts)
        """The number of the host of each world rank."""
        self.check = check
        self.threaded = threaded
        """Whether several threads may be in MPI at once."""
        self.groups: list[Group] = []
        """All groups that exist, for the watchdog."""

    def finish_collectives(self) -> None:
        """Return when the collectives queued on any group have ended; a message may wait for what comes after this."""
        for group in list(self.groups):
            group.call_queue.drain()


def _split_by_host(group: Group) -> tuple[Group | None, Group | None]:
    """The groups within and across the hosts of a group, on which its collectives can run in steps. Collective.

    Neither has such groups itself: the ranks of the one are all on one host, those of the other all on different ones.
    """
    split, ranks, undefined = group.placement, group.world_ranks, group.context.MPI.UNDEFINED
    if len(split.groups) in (1, group.size):
        return None, None
    member = split.members[group.rank]
    local = across = None
    comm = group.comm.Split(member.group if len(member.intra) > 1 else undefined, group.rank)
    if len(member.intra) > 1:
        members = tuple(ranks[rank] for rank in member.intra)
        local = Group(comm, f"{group.name} on one host", members, group.context)
    comm = group.comm.Split(undefined if member.inter is None else member.intra_rank, member.group)
    if member.inter is not None:
        members = tuple(ranks[rank] for rank in member.inter)
        # The call of which this is a step has been compared on all ranks: no need to do so again, by message.
        across = Group(comm, f"{group.name} across hosts", members, group.context, check="off")
    return local, across


def _make_status_board(group: Group) -> StatusBoard | None:
    """The shared memory of a group whose ranks are on one host: a row for each, and the slots for their data."""
    context, comm = group.context, group.comm
    if len(group.hosts) > 1 or not context.slot_bytes:
        return None
    slots = group.size * num_slots(group.size) * slot_bytes(group.size, context.slot_bytes)
    num_bytes = slots_begin(group.size) + slots
    segment = share(comm, "group", num_bytes)
    if segment is not None:
        return StatusBoard(segment, group.size)
    reason = "neither anonymous files nor room in /dev/shm, or ranks in containers that cannot open each other's"
    context.problems.add(f"the system gives none ({reason})")
    return None


def share(comm: Any, name: str, num_bytes: int) -> Segment | None:
    """Zeroed memory that all ranks of an MPI communicator have mapped; None if one of them cannot. Collective."""
    own = _try(partial(Segment.create, name, num_bytes)) if comm.rank == 0 else None
    ticket = comm.bcast(None if own is None else own.ticket)
    segment: Segment | None = own if comm.rank == 0 or ticket is None else _try(partial(Segment.open, ticket))
    everybody = all(comm.allgather(segment is not None))  # also: all have it open, so that it can go
    if own is not None:
        own.withdraw()
    if segment is not None and not everybody:
        segment.close()
    return segment if everybody else None


def slot_bytes(size: int, most: int) -> int:
    """Bytes of each slot of a rank: `most`, or less where many ranks share a host.

    Whole pages, and at least a cache line for each rank.

    >>> slot_bytes(2, 1 << 20), slot_bytes(64, 1 << 20), slot_bytes(2, 5000), slot_bytes(512, 1 << 20)
    (1048576, 131072, 4096, 32768)
    """
    least = -(-64 * size // 4096) * 4096
    return max(least, min(most, _SLOTS_BYTES // (num_slots(size) * size)) & -4096)


def _how_to_check(group: Group, check: str) -> str:
    """How the calls of a group are compared."""
    if group.size == 1 or check == "off":
        return "off"
    if check == "strict":
        return "strict"
    if group.status_board is not None:
        return "board"
    return "off" if check == "board" else "strict"


def _try(action: Callable[[], Any]) -> Any:
    """The result, or None where the file system does not allow it: the ranks then agree on what to do instead."""
    try:
        return action()
    except OSError:
        return None
