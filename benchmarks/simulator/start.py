"""`start()` on simulated ranks: the code of `torchmpi.session` with all its messages, and the calls of MPI it makes."""

from __future__ import annotations

import gc
import pickle
import socket
import threading
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from torchmpi.backends.call_comparison import CallComparison
from torchmpi.backends.plan_cost import HEADER_BYTES, PlanCost, cost_of
from torchmpi.communicators.group import Group
from torchmpi.config import Config
from torchmpi.launch import meeting, mpi_library, network
from torchmpi.launch.abilities import Abilities
from torchmpi.launch.meeting import Met
from torchmpi.parameterserver.simulation.meeting_backend import MeetingBackend
from torchmpi.session import runtime
from torchmpi.tensors import schedule

from .messages import LIBRARY_SHORT_BYTES, LIBRARY_TAG, Comm, SimulatedMPI, World
from .network import Network

_COUNT_BYTES = 8
# A rank of the simulation has no cores, signals and files of its own.
_CONFIG = Config(
    bind="none", threads=1, abort_on_exception=False, fast_path=False, tuning_file="none", verbose=False,
    stall_warning_seconds=1e6, stall_abort_seconds=0,
)  # fmt: skip


class LibraryCall(NamedTuple):
    """A collective of the MPI library that a rank has called."""

    name: str
    """``reduction`` (of a number, or a comparison of calls), ``allgather`` or ``broadcast``."""
    num_bytes: int
    """What this rank contributes, or the root sends."""
    ranks: str
    """``all``, ``host`` (those of a host) or ``hosts`` (one of each)."""

    def cost(self, size: int, ranks_of_host: int) -> PlanCost:
        """Return what the first rank of a job does in this call, with the algorithms of the simulated library."""
        size = {"all": size, "host": ranks_of_host, "hosts": size // ranks_of_host}[self.ranks]
        if self.name == "broadcast":
            return cost_of(schedule.tree(0, size, 0), self.num_bytes)
        doubling = cost_of(schedule.doubling(0, size), self.num_bytes)
        if self.name == "reduction":
            return doubling._replace(num_bytes=doubling.rounds * self.num_bytes)
        if self.num_bytes * size <= LIBRARY_SHORT_BYTES:
            return doubling
        return PlanCost(size - 1, size - 1, (size - 1) * self.num_bytes)


class StartComm(Comm):
    """A communicator with what `start()` calls: objects, agreements, and communicators made by messages."""

    has_unique_context = False
    calls: Sequence[LibraryCall] = ()

    def Allreduce(self, sent: Any, received: Any, op: Any) -> None:
        """Return the least of a number of each rank on all; `torchmpi.communicators.conditions` calls nothing else."""
        if not isinstance(received, np.ndarray):
            super().Allreduce(sent, received, op)
            return
        self.note("reduction", received.nbytes)
        other = np.empty_like(received)
        for (to,), (origin,) in schedule.doubling(self.rank, self.size):
            own = received.copy()
            self.Sendrecv((own, None), to.peer, LIBRARY_TAG, (other, None), origin.peer, LIBRARY_TAG)
            np.minimum(received, other, out=received)

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks: their lengths are gathered first, as mpi4py does."""
        own = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.note("allgather", _COUNT_BYTES)
        self.Allgather((np.array([own.nbytes]), None), (lengths, None))
        self.note("allgather", own.nbytes)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        everything = np.empty(int(ends[-1]), np.uint8)
        self.Allgatherv((own, None), ((everything, None), lengths.tolist(), begins.tolist(), None))
        return [pickle.loads(everything[begin:end].tobytes()) for begin, end in zip(begins, ends, strict=True)]

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Return the object of the root on all ranks, after its length."""
        data = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        length = np.array([data.nbytes])
        self.Bcast((length, None), root)
        if self.rank != root:
            data = np.empty(int(length[0]), np.uint8)
        self.Bcast((data, None), root)
        return pickle.loads(data.tobytes())

    def Bcast(self, message: Any, root: int) -> None:
        """Copy the root's memory to all ranks."""
        self.note("broadcast", len(message) if isinstance(message, bytearray) else message[0].nbytes)
        super().Bcast(message, root)

    def Split_type(self, kind: int, key: int) -> Comm | None:
        """Return the communicator of the ranks of this host."""
        return self.Split(self.world.hosts[self.world_rank], key)

    def Dup(self) -> Comm:
        """Return a communicator of the same ranks, after an agreement on its number."""
        self.Allreduce(None, np.zeros(1, np.int64), "MIN")
        return super().Dup()

    def Free(self) -> None:
        """Do nothing."""

    def _gathered_colors(self, color: int, key: int) -> list[tuple[int, int]]:
        own, gathered = np.array([color, key], np.int32), np.empty((self.size, 2), np.int32)
        self.note("allgather", own.nbytes)
        self.Allgather((own, None), (gathered, None))
        self.Allreduce(None, np.zeros(1, np.int64), "MIN")
        return [(int(found), int(order)) for found, order in gathered]

    def note(self, name: str, num_bytes: int) -> None:
        """Note a call that rank 0 makes with other ranks."""
        if self.world_rank == 0 and self.size > 1:
            hosts = [self.world.hosts[member] for member in self.members]
            ranks = "host" if len(set(hosts)) == 1 else "hosts" if len(set(hosts)) == len(hosts) else "all"
            self.world.library_calls.append(LibraryCall(name, num_bytes, ranks))


class _StartMPI(Abilities, SimulatedMPI):
    """What `start()` uses of the module `mpi4py.MPI`; each simulated rank has its own `COMM_WORLD`."""

    COMM_TYPE_SHARED = 1
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    calls_library, notices_ended_ranks = False, True
    problem_of_collectives = "no MPI launcher has started these processes"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.own = threading.local()

    @property
    def COMM_WORLD(self) -> Comm:
        """The communicator of all ranks."""
        comm: Comm = self.own.comm
        return comm

    @staticmethod
    def Is_finalized() -> bool:
        """Return False."""
        return False

    @classmethod
    def Query_thread(cls) -> int:
        """Return that one thread calls MPI at a time, so that no thread is started for its progress."""
        return cls.THREAD_SERIALIZED


def _comparison(each: runtime.Runtime, group: Group) -> CallComparison:
    """Return the comparison of the calls of a group; within a host the ranks meet, as kernels wait in real time."""
    comparison = CallComparison(group, MeetingBackend(), each.selector.network)
    exchange = comparison.exchange
    if exchange is not None:
        agree = exchange.agree

        def noted(number: int | None, *moved: Any) -> bool:
            exchange.comm.note("reduction", HEADER_BYTES)
            return agree(number, *moved)

        exchange.agree = noted  # type: ignore[method-assign, assignment]
    return comparison


class _Meeting:
    """In place of the handshakes over sockets, in which all ranks have to run at the same time."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], socket.socket] = {}

    def meet(
        self, rank: int, key: bytes, listeners: object, targets: Iterable[int], awaited: Iterable[int], **_: object
    ) -> Met:
        """Return the ends of this rank; the first rank of a pair makes both."""
        met = Met({}, {}, set())
        for peer in (*targets, *awaited):
            if (rank, peer) not in self._ends:
                with network.listen(network.loopback(), 1) as listener:  # not a pair of Unix sockets: they have options
                    self._ends[rank, peer] = socket.create_connection(listener.getsockname()[:2])
                    self._ends[peer, rank], _ = listener.accept()
            met.sockets[peer] = self._ends.pop((rank, peer))
        return met


class Started(NamedTuple):
    """A start of simulated ranks."""

    world: World
    runtimes: list[runtime.Runtime]
    seconds: float
    """Until the last rank has started, in virtual time."""


@contextmanager
def started(hosts: Sequence[int], links: Network | None = None) -> Iterator[Started]:
    """Start ranks on these hosts."""
    import mpi4py

    mpi4py.rc.initialize = False  # the code imports its constants
    world = World(hosts, network=links, comm_type=StartComm)
    module = _StartMPI(world)

    def work(comm: Comm) -> tuple[runtime.Runtime, float]:
        module.own.comm, module.own.host = comm, f"host{hosts[comm.world_rank]}"
        each = runtime.Runtime(_CONFIG, with_cuda=False)
        each.make_levels(None, None)
        return each, world.turns.clock

    mpi_library.adopt(module)
    found: list[tuple[runtime.Runtime, float]] = []
    try:
        with (
            patch.object(socket, "gethostname", lambda: module.own.host),
            patch.object(runtime.Runtime, "_comparison", _comparison),
            patch.object(meeting, "meet", _Meeting().meet),
        ):
            found = world.run(work)
        yield Started(world, [each for each, _ in found], max(end for _, end in found))
    finally:
        for each, _ in found:
            for group in each.context.groups:
                for comm in (group.comm, group.side_comm):
                    comm.has_unique_context = True  # freed at once
            each.resources.close()
        mpi_library.adopt(None)


def kept_bytes(sizes: tuple[int, int] = (24, 48)) -> float:
    """Return how many bytes a started rank keeps for each rank of the job, from starts of two sizes."""
    by_size = []
    for size in (sizes[0], *sizes):  # the first start also fills caches
        tracemalloc.start()
        with started([rank // 8 for rank in range(size)]):
            gc.collect()
            by_size.append(tracemalloc.get_traced_memory()[0] / size)
        tracemalloc.stop()
    return (by_size[2] - by_size[1]) / (sizes[1] - sizes[0])
