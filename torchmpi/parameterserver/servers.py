"""Parameter servers: `init`, `send`, `receive`, `free`.

`send` and `receive` pass on what a program repeats to machine code (:mod:`.repeated`). Otherwise they check their
arguments and make a :class:`.server_requests.ServerRequest`, which runs in the calling thread or in a call queue of the
servers. It accesses the shards of this host through memory (:class:`.shards.Actor`) and those of other hosts by
messages (:class:`.remote.RemoteClient`).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..communicators.call_counts import MessageCount, sum_of_messages
from ..communicators.call_queue import CallQueue, RunLock
from ..communicators.group import Group, GroupResource, share
from ..communicators.handle import EndedHandle, Handle
from ..communicators.levels import Comm, communicator_of_block
from ..errors import ArgumentError, CommunicatorError, DtypeError, MismatchError, TorchMPIError, kind_of, rank_prefix
from ..log import logger
from ..session import runtime
from ..shared_memory.memory_layout import LockFields
from ..tensors import buffers, writable
from ..tensors import dtypes as dtype_table
from ..tensors.partition import even_partition
from .kernels.server_rules import state_dtype
from .remote import RemoteClient, ServerThread
from .repeated import Repeater
from .rules import PreparedRule, Rule, RuleBoard, prepare
from .server_requests import RequestQueue, RequestRecord, RequestRecords, ServerRequest, check_open
from .server_rows import Rows, checked_index
from .shards import ACTORS, CLIENT, SERVER, Actor, Shards, Versions, joined_parts, layout, private_segment

__all__ = ["Server", "free", "free_all", "init", "receive", "send"]

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as MPIComm

T = TypeVar("T")
INLINE_BYTES = 1 << 20
"""Requests of up to this size run in the calling thread, if this rank accesses all shards through memory: it would take
as long to have another thread run them."""
_MAX_PREPARED_RULES = 64
_counting = threading.Lock()
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip


class Server:
    """A tensor that is sharded over the ranks of a communicator, as seen by one of its clients.

    Returned by :func:`init`.

    Attributes:
        name: The name given to :func:`init`, or ``server`` and a number.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        parts: First element and number of elements of each shard. Shard i is that of rank i at the beginning.
        local_shards: The numbers of the shards in the memory of this host. `remote_shards` are the others.
        holders: The rank that serves each shard to other hosts, and saves it; -1 after the loss of all that could.
        is_local: Whether this rank accesses all shards through memory.
        is_open: False after :func:`free`.
        problem: Why it has ended without :func:`free`; '' if it has not.
        is_saved: Whether :func:`save` and :func:`load` include this server; may be set to False.
        is_internal: Whether torchmpi uses it for itself, so that :func:`free_all` leaves it.
        is_awaited: Whether it has lived on after a loss, and the next :func:`init` with its name returns it.
        num_sent: Number of completed sends of this client.
        bytes_sent: Bytes that this client has sent, including those to shards of this host.
        bytes_received: Bytes that this client has received.
        sent_version: Number of rules that had been applied to a chunk when the last send of this client reached it;
            mean over the chunks.
        received_version: The same for the last receive.
        sent_staleness: Number of rules of other ranks that the last send of this client did not know of, since its
            last receive, or since the `base` of the send; mean over the chunks; nan if it had received nothing.
        sender: The rank of this client in the communicator of the server, which rules are told.
        num_clients: Number of ranks that send, which rules are told: those of the communicator unless it is changed.
    """

    def __init__(
        self,
        context: ServerContext,
        number: int,
        shape: torch.Size,
        *,
        shards: Shards,
        name: str,
        local_shards: tuple[int, ...] | None = None,
    ) -> None:
        self.number, self.shape, self.shards, self.name = number, shape, shards, name
        self.dtype, self.parts = shards.dtype, shards.all_parts
        self.numel, self.problem = shape.numel(), ""
        self.local_shards = context.local_ranks if local_shards is None else local_shards
        self.remote_shards = [shard for shard in range(len(self.parts)) if shard not in self.local_shards]
        self.holders = list(range(context.group.size))
        self.is_open = self.is_saved = True
        self.is_internal = self.is_awaited = False
        self.num_clients = context.group.size
        self.versions = Versions(shards.first_chunks[-1])
        """What this client knows of the chunks."""
        self._spans = joined_parts(shards.parts)
        self._rules: dict[str | Rule, PreparedRule] = {}
        self.lock = RunLock()
        """Held while a request runs, so that a short one to this server does not wait for long ones to others."""
        self.sends: RequestRecord = context.records.take(number, is_receive=False)
        self.receives: RequestRecord = context.records.take(number, is_receive=True)
        self._holder: tuple[tuple[str, int], int] = ("", 0), 0
        self._described: tuple[object, str] = None, ""
        self.repeater = Repeater(self)
        self._enter(context)

    def _enter(self, context: ServerContext) -> None:
        """Begin to make requests as a client of the context."""
        self.context, group = context, context.group
        self.is_local = context.remote is None
        self.sender, self.world_rank = group.rank, group.world_ranks[group.rank]
        self.label = self.name if group.size == len(group.context.hosts) else f"{self.name} ({group.name})"
        self.actor = self.context.make_client()
        self.actor.on_wait = self._note_wait
        if group.context.raises_lost_ranks:
            self.actor.on_taken_over = self._note_taken_over
        self.repeater.open()

    def suspend(self) -> None:
        """Make no requests until :meth:`resume`, after the loss of a rank; the shards remain mapped."""
        self.repeater.close()
        self.context.records.give_back(self.sends)
        self.context.records.give_back(self.receives)

    def resume(self, context: ServerContext) -> None:
        """Continue on the ranks of another context. The caller has not let requests begin."""
        if self.num_clients == self.group.size:
            self.num_clients = context.group.size
        self.sends = context.records.take(self.number, is_receive=False, before=self.sends)
        self.receives = context.records.take(self.number, is_receive=True, before=self.receives)
        self._enter(context)

    @property
    def num_sent(self) -> int:
        return self.sends.count

    @property
    def bytes_sent(self) -> int:
        return self.sends.num_bytes

    @property
    def bytes_received(self) -> int:
        return self.receives.num_bytes

    @property
    def sent_version(self) -> float:
        return self.sends.version

    @property
    def sent_staleness(self) -> float:
        return self.sends.staleness if self.sends.count else math.nan

    @property
    def received_version(self) -> float:
        return self.receives.version

    @property
    def group(self) -> Group:
        """The ranks that hold the shards."""
        return self.context.group

    @property
    def base(self) -> NDArray[np.float64]:
        """The versions of the values that were received last, by chunk, without own sends: `base` of a later send."""
        return np.array(self.versions.base)

    @property
    def row_numel(self) -> int:
        """Number of elements of a row: of what one index of the first dimension selects."""
        return self.numel // self.shape[0] if self.shape and self.shape[0] else 0

    def __repr__(self) -> str:
        what = f"{list(self.shape)} {dtype_table.short_name(self.dtype)} on {self.group.size} ranks"
        return f"<Server {self.name!r}: {what}{'' if self.is_open else ', freed'}>"

    def prepared(self, rule: str | Rule) -> PreparedRule:
        """Return the rule for the dtype of this server."""
        known = self._rules.get(rule)
        if known is None:
            known = prepare(rule, self.dtype)
            if known.function is None:  # a registered rule may be replaced
                if len(self._rules) >= _MAX_PREPARED_RULES:  # each value of a learning rate makes a rule
                    self._rules.clear()
                self._rules[rule] = known
        return known

    def spans_of(self, rows: Rows) -> list[tuple[int, int]]:
        """Return the positions of rows whose elements are in memory."""
        return [rows.span(*part) for part in self._spans]

    def doing(self) -> str | None:
        """Describe the request that is being made, by the same string as long as it is; None if none is."""
        if not (begun := self.sends.begun or self.receives.begun):
            return None
        call = "send" if self.sends.begun else "receive"
        waiting, rank = self._holder
        holder = f", for a chunk that rank {rank} has locked," if waiting == (call, begun) else ""
        if self._described[0] != (call, begun, holder):
            self._described = (call, begun, holder), f"parameterserver.{call} ({self.name}){holder}"
        return self._described[1]

    def _note_wait(self, rank: int) -> None:
        """Note which rank holds the lock that a request waits for."""
        is_send = self.sends.begun
        self._holder = ("send" if is_send else "receive", is_send or self.receives.begun), rank

    def _note_taken_over(self, rank: int, span: tuple[int, int], is_whole: bool) -> None:
        """Report a chunk whose lock a killed process held."""
        begin = f"{self.name}: a rank was killed while it had locked elements {span[0]} to {span[1] - 1}"
        if is_whole:
            logger.debug(f"{begin}, of which all or none have got what it was sending")
        else:
            logger.warning(
                f"{begin}. If it was sending, some of these elements have got it, and others have not. "
                "Config(server_copies=True) prevents that."
            )

    def refuse(self) -> None:
        """Refuse further requests."""
        self.is_open = False
        self.repeater.close()

    def close(self) -> None:
        """Unmap the shards."""
        self.refuse()
        self.suspend()
        self.shards.close()

    def index_of(self, shard: int) -> int:
        """Return the index of a shard of this host among those in memory."""
        return self.local_shards.index(shard)

    @property
    def own_shards(self) -> list[int]:
        """The numbers of the shards that this rank saves: that of its number, and those of lost ranks."""
        return [shard for shard, rank in enumerate(self.holders) if rank == self.group.rank]


class ServerContext(GroupResource):
    """The state shared by all servers of a group; made by the first `init` on the group and closed with it."""

    repeats = True
    """Whether machine code may make requests."""

    def __init__(self, group: Group) -> None:
        context = group.context
        self.group = group
        self.comm: MPIComm = group.comm.Dup()
        shares_memory = (group.intra_host or group).status_board is not None
        hosts = context.hosts
        host = hosts[group.world_ranks[group.rank]] if shares_memory else len(hosts) + group.rank  # no number of a host
        self.local_comm: MPIComm = self.comm.Split(host, group.rank)
        self.local_ranks: tuple[int, ...] = tuple(self.local_comm.allgather(group.rank))
        """Ranks whose shards this rank accesses through memory; the others are remote."""
        self.local_world_ranks = [group.world_ranks[rank] for rank in self.local_ranks]
        ranks = dict(zip(self.local_comm.allgather(os.getpid()), self.local_world_ranks, strict=True))
        self._make_actor = partial(Actor, index=self.local_comm.rank, ranks=ranks, is_crowded=context.is_crowded)
        self.remote_ranks = tuple(rank for rank in range(group.size) if rank not in self.local_ranks)
        self.servers: dict[int, Server] = {}
        """Servers that have not been freed, by number."""
        self.num_made = 0
        # Without messages, requests may run in a thread even if MPI does not support threads.
        threaded = context.threaded or not self.remote_ranks
        self.call_queue: CallQueue = RequestQueue(f"{group.name} parameter server", self.servers, threaded=threaded)
        # Under the number of this rank: the requests do not wait for a call of another one.
        group.peer_queues["parameter server", group.rank] = self.call_queue
        self.records: RequestRecords = RequestRecords(group)
        context.call_counts.add_requests(self, group.name, self._counted)
        size = self.local_comm.size * RuleBoard.BYTES
        # Without shared memory for it, the first server of the group cannot be allocated either.
        self._board_memory = (share(self.local_comm, "rules", size) if shares_memory else None) or private_segment(size)
        self._board = RuleBoard(np.frombuffer(self._board_memory.memory, np.uint8), self.local_comm.rank)
        self._registered_everywhere: set[str] = set()
        self.remote: RemoteClient | None = None
        self._thread: ServerThread | None = None
        if self.remote_ranks:
            self.remote = RemoteClient(context.MPI, self.comm, group, self.remote_ranks, self.call_queue)
            end_job = runtime.current().failures.end_job
            self._thread = ServerThread(group, self.comm, self._make_actor(SERVER), self.servers, end_job=end_job)
            self._thread.start()
        group.attachments.append(self)

    @staticmethod
    def of(group: Group) -> ServerContext | None:
        """Return the context of a group, if it has one."""
        return next((item for item in group.attachments if isinstance(item, ServerContext)), None)

    def allocate(self, parts: list[tuple[int, int]], dtype: torch.dtype) -> Shards:
        """Allocate and map the shards of the local ranks. Collective."""
        local_parts, states = [parts[rank] for rank in self.local_ranks], state_dtype(dtype)
        may_lose_ranks = self.group.context.raises_lost_ranks
        keeps_images = may_lose_ranks and runtime.current().config.server_copies
        numels = tuple(numel for _, numel in local_parts)
        # Spare ranks of this host may take the numbers of all ranks of other ones.
        plan = layout(numels, dtype.itemsize, states.itemsize, ACTORS * self.group.size * keeps_images)
        local, is_shared = self.local_comm, self.local_comm.size > 1 or may_lose_ranks
        segment = share(local, "shards", plan.num_bytes) if is_shared else private_segment(plan.num_bytes)
        if not all(self.comm.allgather(segment is not None)):
            if segment is not None:
                segment.close()
            raise TorchMPIError(
                f"{self.group.where}: cannot allocate {plan.num_bytes} bytes of shared memory for the shards on some "
                "host. Give the container more (docker --shm-size), or disable shared memory: TORCHMPI_SLOT_BYTES=0."
            )
        assert segment is not None
        return Shards(segment, plan, local_parts, dtypes=(dtype, states), all_parts=parts)

    def require_registered(self, server: Server, rule: PreparedRule) -> None:
        """Raise unless all ranks have registered a rule; the caller holds the run lock."""
        if rule.name in self._registered_everywhere:
            return
        lacking = [self.local_world_ranks[index] for index in self._board.lacking(rule.name)]
        if self.remote is not None:
            lacking = sorted(lacking + self.remote.lacking(server, rule))
        if lacking:
            ranks = f"rank{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
            raise ArgumentError(
                f"{self.group.where}: parameterserver.send: unknown rule {rule.name!r} on {ranks}; nothing has been "
                "applied. Call register_rule on all ranks before one of them sends with the rule."
            )
        self._registered_everywhere.add(rule.name)

    def make_client(self) -> Actor:
        """Return what applies rules for a server."""
        return self._make_actor(CLIENT)

    def call(self, request: ServerRequest, key: object) -> Handle[Any]:
        """Run a short request in the calling thread if none to its server is queued, others in the call queue.

        `key` identifies requests that are alike (:mod:`.repeated`).
        """
        server, fields = request.server, request.server.lock.fields
        is_short = server.is_local and request.tensor.is_cpu and request.tensor.nbytes <= INLINE_BYTES
        if is_short and fields[LockFields.pending] == fields[LockFields.ended]:
            handle = server.lock.run(self._run_here, request, key, blocking=False)
            if handle is not None:
                return handle
        return self._queue(request)

    def _run_here(self, request: ServerRequest, key: object) -> Handle[Any]:
        handle: Handle[Any] = Handle(request.what)
        try:
            result = request.run()
            request.server.repeater.remember(request, key)
        except Exception as error:  # wait() raises the error, as for a queued request
            self.note_failed(handle, error)
        else:
            handle.end(result)
        return handle

    def _queue(self, request: ServerRequest) -> Handle[Any]:
        fields = request.server.lock.fields
        with _counting:
            fields[LockFields.pending] += 1
        try:
            # A thread that waits may run it, unless an interrupt could end it amid messages or code of the program.
            is_plain = request.server.is_local and request.tensor.is_cpu
            in_any_thread = is_plain and (request.rule is None or request.rule.function is None)
            run = partial(self._run_queued, request)
            return self.call_queue.submit(run, request.what, in_any_thread=in_any_thread)
        except BaseException:
            with _counting:
                fields[LockFields.pending] -= 1
            raise

    def _run_queued(self, request: ServerRequest) -> Any:
        lock = request.server.lock
        try:
            return lock.run(request.run)
        finally:
            lock.fields[LockFields.ended] += 1

    def note_failed(self, handle: Handle[Any], error: Exception) -> None:
        """End a request that has failed."""
        queue = self.call_queue
        queue.failed = [*(other for other in queue.failed if other.unseen_error is not None), handle]
        handle.end(error=error)

    def _counted(self) -> dict[str, MessageCount]:
        """Return the counts of the requests to all servers that have not been freed."""
        found: dict[str, MessageCount] = {}
        for server in list(self.servers.values()):
            for kind, record in (("parameterserver.send", server.sends), ("parameterserver.receive", server.receives)):
                found[kind] = sum_of_messages(found.get(kind), record.counted())
        return found

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context manager during which no request of this client runs, after all that it has made."""
        self.call_queue.drain()
        with ExitStack() as locks:
            for lock in (self.call_queue.run_lock, *(server.lock for server in self.servers.values())):
                locks.enter_context(lock)
            yield

    def pause(self, server: Server, seconds: float, is_over: Callable[[torch.Tensor], bool]) -> None:
        """Wait before the values of a server are read again: for a time, or until a condition on them is true."""
        time.sleep(seconds)

    def time(self) -> float:
        """Return the seconds of a clock."""
        return time.monotonic()

    def free(self, server: Server) -> None:
        """Complete all calls and unmap a server. Collective."""
        self.call_queue.drain()
        server.lock.run(server.refuse)  # other threads may be about to call
        self.comm.Barrier()
        self.group.context.call_counts.keep_requests(self, lambda: self.servers.pop(server.number))
        server.close()

    def refuse_work(self) -> None:
        """Leave all requests to Python, which refuses them after a loss."""
        for server in list(self.servers.values()):
            server.repeater.close()

    def close(self) -> None:
        """Close all servers, over hosts after a barrier, since other ranks may send until then. Collective.

        After the loss of a rank, not collective: the servers wait for the next start.
        """
        is_lost = bool(self.group.context.loss)
        for server in self.servers.values():
            server.lock.acquire()  # a thread may be about to make a request
            if not is_lost:
                server.refuse()
        if not is_lost and self.remote_ranks:
            self.comm.Barrier()
        self.group.context.call_counts.keep_requests(self)
        if self._thread is not None:
            self._thread.stop()
        for server in list(self.servers.values()):
            if is_lost:
                server.suspend()
                server.lock.release()  # requests are refused until recover() has returned
            else:
                server.close()
        if is_lost:
            suspended.update(self.servers)
            runtime.continued_by.add(f"{__package__}.server_recovery")
        self.servers.clear()
        self.records.close()
        self._board.close()
        del self._board
        self._board_memory.close()
        if not is_lost:  # the communicators of lost ranks cannot be freed
            self.local_comm.Free()
            self.comm.Free()


suspended: dict[int, Server] = {}
"""By number, servers that wait for the ranks of the next start, after a loss (:mod:`.server_recovery`)."""


def find_awaited(group: Group, name: str | None) -> Server | None:
    """Return the open server of this name that has lived on after a loss, and that no call of `init` has returned."""
    context = ServerContext.of(group)
    servers = [] if context is None or name is None else list(context.servers.values())
    return next((server for server in servers if server.is_awaited and server.name == name), None)


def call_collectively(group: Group, collective: str, subject: str, action: Callable[[], T]) -> T:
    """Run `action` as a call of all ranks of a group if `subject` is the same on all; otherwise raise on all.

    The subjects are compared before the action starts, since a rank inside the action could not be stopped by one that
    finds the difference later.
    """

    def run() -> T:
        calls = group.comm.allgather((group.call_log.seq, subject))
        if calls != [calls[0]] * group.size:
            listing = "; ".join(
                f"rank {rank}: {what}, call #{seq}" for rank, (seq, what) in zip(group.world_ranks, calls, strict=True)
            )
            raise MismatchError(
                f"{group.where}: the ranks called {collective} with different arguments: {listing}. "
                "Pass the same arguments on all ranks."
            )
        return action()

    return group.call_action(collective, run)


# ---- public functions


def init(tensor: torch.Tensor, comm: Comm = None, *, name: str | None = None) -> Server:
    """Create a server for tensors of this shape and dtype. Collective.

    The shard of rank i starts with the values of rank i, which are copied. For a server with the values of one
    tensor, broadcast the tensor before, or let one rank ``send`` it with the rule ``"copy"``.

    With ``on_lost_rank="raise"`` servers live on after ``recover()``. Then the first call with the name of one returns
    it with its present values, and is not collective: a spare rank, or a function that begins again, gets it so.

    Args:
        tensor: Initial values; float32, float64, float16, bfloat16, int8, int16, int32, int64 or uint8.
        comm: Communicator, or its level, whose ranks hold the shards. Default: the current communicator.
        name: Name of the server in messages.

    Returns:
        The server. It lives until :func:`free` or :func:`torchmpi.stop`.

    Raises:
        DtypeError: There are no servers for this dtype.
        ArgumentError: A server of this name lives on, with another shape or dtype; or `comm` is given with
            ``on_lost_rank="raise"``.
        MismatchError: Shape, dtype or name differ between the ranks.
        CommunicatorError: The ranks do not share memory, and the MPI library does not support MPI_THREAD_MULTIPLE.

    Example:
        server = ps.init(weights)
        ps.send(server, -0.1 * gradient, "add").wait()
        weights = ps.receive(server).wait()
    """
    group = runtime.communicator(comm).intra
    what = f"{group.where}: parameterserver.init"
    buffers.check(tensor, what)
    if tensor.dtype not in _DTYPES:
        names = ", ".join(dtype_table.short_name(dtype) for dtype in _DTYPES)
        raise DtypeError(f"{what}: there are no servers for {tensor.dtype}, only for {names}.")
    _require_threads(group)
    if group.context.raises_lost_ranks and group is not runtime.current().world:
        raise ArgumentError(
            f"{what}: with on_lost_rank='raise' (torchmpi run --on-lost-rank continue) parameter servers are those of "
            "all ranks, which are known after a loss: leave out comm=. Or leave that setting out, and restart the job "
            "from ps.save() after a loss: torchmpi run --restarts N."
        )
    if (found := find_awaited(group, name)) is not None:
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise ArgumentError(
                f"{what}: {name!r} has lived on after a loss, with shape {list(found.shape)} and {found.dtype}; the "
                f"tensor has shape {list(tensor.shape)} and {tensor.dtype}. Choose another name for another server."
            )
        found.is_awaited = False
        return found
    plain = buffers.plain(tensor, to_host=True)
    subject = f"{dtype_table.short_name(tensor.dtype)} {list(tensor.shape)}{'' if name is None else f' named {name!r}'}"
    return call_collectively(group, "server_init", subject, partial(_make, group, plain, name))


def _make(group: Group, tensor: torch.Tensor, name: str | None) -> Server:
    context = ServerContext.of(group) or ServerContext(group)
    number = context.num_made
    parts = even_partition(tensor.numel(), group.size)
    shards = context.allocate(parts, tensor.dtype)
    server = Server(context, number, tensor.shape, shards=shards, name=name or f"server {number}")
    begin, numel = parts[group.rank]
    shards.array(context.local_ranks.index(group.rank)).copy_(tensor.view(-1)[begin : begin + numel])
    context.num_made += 1
    context.servers[number] = server
    context.comm.Barrier()  # other ranks may send from now on
    return server


def refuse_continuing(what: str, why: str) -> None:
    """Raise an ArgumentError that begins with `what` if the job continues after the loss of a rank."""
    if runtime.current().context.raises_lost_ranks:
        raise ArgumentError(f"{rank_prefix()}{what}: with on_lost_rank='raise' {why}.")


def _require_threads(group: Group) -> None:
    context = group.context
    if not context.threaded and (len(group.hosts) > 1 or group.status_board is None) and group.size > 1:
        raise CommunicatorError(
            f"{group.where}: parameter servers for ranks that share no memory need MPI_THREAD_MULTIPLE, which this MPI "
            "library does not support. Use servers within the hosts (comm=1, the level of hosts that start() makes), "
            "or another MPI library."
        )


def send(
    server: Server,
    tensor: torch.Tensor | None,
    rule: str | Rule = "add",
    *,
    rows: torch.Tensor | Sequence[int] | None = None,
    base: NDArray[np.float64] | None = None,
) -> Handle[None]:
    """Apply a rule to the values of a server, or to some of its rows, asynchronously.

    Sends of one rank to one server are applied in the order of the calls.

    Args:
        server: The server, as returned by :func:`init`.
        tensor: The sent values: of the dtype of the server, with its number of elements, or that of the rows, in any
            shape. It must not be changed before ``wait()`` returns. None is possible with the rule ``"zero"``.
        rule: ``"zero"``, ``"copy"``, ``"add"``, ``"max"``, ``"min"``, the result of a function such as
            :func:`scaled_add` or :func:`sgd`, or a rule of :func:`register_rule`.
        rows: Numbers of rows, each once, in any order: the rule is applied to these rows only, `tensor` has their
            values in the same order, and only they are transferred. States are kept for each row; steps are counted
            for the whole server, as by ``torch.optim.SparseAdam``. A registered rule gets the rows of a chunk without
            gaps.
        base: `server.base` after an earlier :func:`receive`, from whose values `tensor` was computed. Default: the
            last one. Rules with a context and damped rules count the staleness from it.

    Returns:
        A handle; ``wait()`` returns None when the rule has been applied to all chunks. If a registered rule raises,
        ``wait()`` raises a TorchMPIError that names the chunks to which the rule has been applied.

    Raises:
        ArgumentError: The rule is unknown, or the tensor has another number of elements or another layout, or there is
            no such row, or a row is given twice.
        DtypeError: The dtype is not that of the server, or the rule is not defined for that dtype.
        CommunicatorError: The server has been freed.

    Example:
        handle = ps.send(server, gradient, ps.sgd(lr=0.1, momentum=0.9))
        compute()
        handle.wait()
        ps.send(table, values, ps.adagrad(0.1), rows=[3, 17]).wait()
    """
    is_whole = rows is None and base is None
    made = server.repeater.send(tensor, rule) if is_whole and isinstance(server, Server) else None
    if made is None:
        what = _check_server(server, "send")
        prepared = prepared_for(server, rule, what)
        made = server.repeater.send(tensor, prepared) if is_whole else None
    if made is not None:
        return EndedHandle(None) if made is tensor else made
    selected, order = (None, None) if rows is None else _selected(server, rows, what, unique=True)
    if tensor is None:
        if prepared.name != "zero":
            raise ArgumentError(f"{what}: rule {prepared.name!r} needs a tensor; only 'zero' needs none.")
        shape = server.shape if selected is None else (selected.numel,)
        tensor = torch.empty(shape, dtype=server.dtype, device="cpu")
    elif not buffers.is_plain(tensor):
        buffers.check(tensor, what)
    _check_fits(server, tensor, what, selected)
    if base is not None and not server.versions.fit(base):
        raise ArgumentError(f"{what}: base= is no value of `base` of this server. Pass an earlier one, or omit it.")
    request = ServerRequest(server, tensor, prepared, what, rows=selected, order=order, base=base)
    return server.context.call(request, rule)


def _selected(server: Server, index: object, what: str, *, unique: bool) -> tuple[Rows, torch.Tensor | None]:
    """Return the rows that a caller has given, and where it has the values of each; None if in increasing order.

    With `unique` the second is, for each of the rows, the place in the list of the caller; without, for each place in
    that list, the place among the rows.
    """
    if not server.row_numel:
        raise ArgumentError(
            f"{what}: rows= selects along the first dimension, and {server.name} has the shape {list(server.shape)}."
        )
    numbers, increase = checked_index(index, server.shape[0], what, server.name, unique=unique)
    if increase:
        return Rows(numbers, server.row_numel), None
    found, places, order = np.unique(numbers, return_index=True, return_inverse=True)
    return Rows(found, server.row_numel), torch.from_numpy(places if unique else order.reshape(-1))


def prepared_for(server: Server, rule: str | Rule, what: str) -> PreparedRule:
    """Return the rule for this server, or raise an error that begins with `what`."""
    try:
        return server.prepared(rule)
    except (ArgumentError, TypeError) as error:  # TypeError: an object that cannot be hashed
        kind = type(error) if isinstance(error, ArgumentError) else ArgumentError
        raise kind(f"{what}: {error}") from None


def receive(
    server: Server, tensor: torch.Tensor | None = None, *, rows: torch.Tensor | Sequence[int] | None = None
) -> Handle[torch.Tensor]:
    """Fetch the values of a server, or some of its rows, asynchronously.

    The values include everything that this rank has sent before.

    Args:
        server: The server, as returned by :func:`init`.
        tensor: The destination, of the dtype of the server, with its number of elements, or that of the rows, in any
            shape. It must not be used before ``wait()`` returns. Default: a new tensor on the CPU.
        rows: Numbers of rows, in any order, also repeated: only they are transferred.

    Returns:
        A handle; ``wait()`` returns the tensor.

    Raises:
        ArgumentError: The tensor has another number of elements, or its elements share memory, or there is no such row.
        DtypeError: The dtype is not that of the server.
        CommunicatorError: The server has been freed.

    Example:
        weights = ps.receive(server).wait()
        few = ps.receive(table, rows=[3, 17]).wait()
    """
    key = tensor
    if rows is None and isinstance(server, Server):
        target = torch.empty(server.shape, dtype=server.dtype, device="cpu") if tensor is None else tensor
        made = server.repeater.receive(target, key)
        if made is not None:
            return EndedHandle(target) if made is target else made
    what = _check_server(server, "receive")
    selected, order = (None, None) if rows is None else _selected(server, rows, what, unique=False)
    if tensor is None:
        shape = server.shape
        if selected is not None:
            shape = torch.Size([len(selected.numbers) if order is None else len(order), *server.shape[1:]])
        tensor = torch.empty(shape, dtype=server.dtype, device="cpu")
    elif not buffers.is_plain(tensor):
        buffers.check(tensor, what, written=True)
    writable.refuse_read_only(server.group.where, "parameterserver.receive", tensor)
    _check_fits(server, tensor, what, selected, None if order is None else len(order))
    return server.context.call(ServerRequest(server, tensor, None, what, rows=selected, order=order), key)


def _check_server(server: object, call: str) -> str:
    """Raise unless `server` is an open server; return the rank and the name of the call, for messages."""
    if not isinstance(server, Server):
        raise ArgumentError(
            f"parameterserver.{call}: {kind_of(server)} is not a server. Pass the result of parameterserver.init."
        )
    what = f"{server.group.where}: parameterserver.{call}"
    check_open(server, what)
    buffers.refuse_tracing(what)
    runtime.current()  # raises in a forked child, whose locks would be attributed to its parent
    communicator_of_block()  # raises in a rule
    return what


def _check_fits(
    server: Server, tensor: torch.Tensor, what: str, rows: Rows | None = None, num_rows: int | None = None
) -> None:
    """Raise unless a tensor has the elements of a server, or of rows, which the caller has given `num_rows` times."""
    expected = server.numel
    if rows is not None:
        num_rows = len(rows.numbers) if num_rows is None else num_rows
        expected = num_rows * rows.row_numel
    if tensor.numel() != expected:
        its = f"{server.name} has {server.numel} {list(server.shape)}"
        if rows is not None:
            its = f"{num_rows} rows of {server.name} {list(server.shape)} have {expected}"
        raise ArgumentError(
            f"{what}: the tensor has {tensor.numel()} elements {list(tensor.shape)}, {its}. The shape may differ, the "
            "number of elements may not."
        )
    if tensor.dtype is not server.dtype:
        raise DtypeError(
            f"{what}: the tensor is {tensor.dtype}, {server.name} is {server.dtype}. Convert it: "
            f"tensor.to({server.dtype})."
        )


def free(server: Server) -> None:
    """Free the memory of a server after all calls of all ranks have completed. Collective.

    Args:
        server: The server, as returned by :func:`init`.

    Raises:
        CommunicatorError: The server has been freed already.
        MismatchError: The ranks passed different servers.

    Example:
        ps.free(server)
    """
    _check_server(server, "free")
    call_collectively(server.group, "server_free", f"server {server.number}", partial(server.context.free, server))


def free_all() -> None:
    """Free the servers of all communicators, the last one first. Collective.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ps.free_all()
    """
    for group in reversed(list(runtime.current().context.groups)):
        context = ServerContext.of(group)
        for server in reversed(list(context.servers.values()) if context is not None else []):
            if not server.is_internal:
                free(server)
