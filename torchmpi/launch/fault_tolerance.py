"""An MPI library whose remaining ranks continue after a loss: Open MPI 5 with its fault tolerance (ULFM) switched on.

``mpirun --with-ft ulfm`` leaves the other ranks alone when one has ended. What they do then, step by step, and which
facts about Open MPI 5.0.11 are behind it: docs/design/recovery.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import RankLostError, StallError
from ..log import logger
from . import launcher
from .abilities import Continuing
from .survivors import Survivors

_IDLE_SECONDS, _FAILING_SECONDS = 0.03, 0.002
"""Between two looks for lost ranks, as long as there is none, and until the remaining ranks have agreed."""
_NUM_STEPS = 8
"""Calls that make progress in a look: Open MPI hears of a loss by several steps, of which each call makes one."""
_REASON_SECONDS, _REVOKED_SECONDS = 0.5, 30.0
"""How long a rank whose call has failed waits for the reason; if another rank knows it, it comes."""
_GRACE_SECONDS, _SHRINKING_SECONDS = 1.0, 10.0
"""The least time to name who is late, and for an agreement for which all are here."""
_SPARE_SECONDS = 600.0
"""How long a spare rank waits for the others to call recover(), which has a limit of its own."""
_LEAVE_SECONDS = 10.0
"""How long ranks wait for each other at their end, after a loss: for an agreement, and for the last messages."""
_NUM_QUESTIONS = 3
_VIEWS_TAG, _RELEASE_TAG, _END_TAG = 1, 2, 3
_MADE_TAG = 32767
"""Of the ranks that make a communicator; the largest number that every MPI library has."""
_TELLING_SECONDS = 0.2
"""How long a rank that ends the job lets its messages leave before, and others wait for its status."""
_SWITCH = "OMPI_MCA_mpi_ft_enable"
_COLLECTIVES = "OMPI_MCA_coll"
_DETECTOR = "OMPI_MCA_mpi_ft_detector"
_UNSAFE, _AGREEMENT = ("han", "adapt"), "ftagree"
SPARES_VARIABLE = "TORCHMPI_SPARES"
"""How many of the ranks that were started are spare; the last ones."""
RUNNING_VARIABLE = "TORCHMPI_RUNNING_FILE"
"""Names a file that ranks make in ``start()`` and remove in ``stop()``: mpirun returns 0 also if all were killed."""
HOW_ELSEWHERE = (
    "Start the ranks without MPI, by `torchmpi run --without-mpi`, or restart the job from a checkpoint: `torchmpi run "
    "--restarts N`"
)
T = TypeVar("T")


class _Process(ctypes.Structure):
    """A ``pmix_proc_t``: a process as the launcher knows it."""

    _fields_ = [("job", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


_OnFence = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)


def _holds_in_time(condition: Callable[[], bool]) -> bool:
    """Wait until a condition of another rank at its end holds, and return whether it does so in time."""
    limit = time.monotonic() + _LEAVE_SECONDS
    while not (holds := condition()) and time.monotonic() < limit:
        time.sleep(_FAILING_SECONDS)
    return holds


def is_switched_on(environment: Mapping[str, str]) -> bool:
    """Return whether ``mpirun --with-ft ulfm`` has started this process.

    >>> is_switched_on({"OMPI_MCA_mpi_ft_enable": "1"}), is_switched_on({"OMPI_MCA_mpi_ft_enable": "false"})
    (True, False)
    """
    return environment.get(_SWITCH, "").lower() in ("1", "true", "t", "yes", "enabled")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Open MPI needs at its start, given those that are set.

    The collectives of `han` and `adapt` return wrong data after a loss, without an error. Open MPI's own detector takes
    a rank that computes for a second for dead; that of its launcher is enough.

    >>> variables({})["OMPI_MCA_coll"], variables({"OMPI_MCA_coll": "^cuda,han"})["OMPI_MCA_coll"]
    ('^han,adapt', '^cuda,han,adapt')
    >>> variables({"OMPI_MCA_coll": "han,tuned,basic"})["OMPI_MCA_coll"]
    'tuned,basic,ftagree'
    """
    given = environment.get(_COLLECTIVES, "")
    names = list(filter(None, given.lstrip("^").split(",")))
    if given and not given.startswith("^"):
        kept = [name for name in names if name not in _UNSAFE]
        chosen = ",".join(dict.fromkeys([*kept, _AGREEMENT]))
    else:
        chosen = "^" + ",".join(dict.fromkeys([*names, *_UNSAFE]))
    return {_COLLECTIVES: chosen, _DETECTOR: "0"}


def why_not(name: str, version: tuple[int, ...]) -> str:
    """Return why a library, of a name and a version as of ``MPI.get_vendor()``, has no fault tolerance; '' if it may.

    >>> why_not("MPICH", (5, 0, 2)), why_not("Open MPI", (4, 1, 6)), why_not("Open MPI", (5, 0, 11))
    ('MPICH cannot continue without a lost rank', 'Open MPI can do so from version 5.0 on', '')
    """
    if name != "Open MPI":
        return f"{name} cannot continue without a lost rank"
    return "" if version >= (5,) else "Open MPI can do so from version 5.0 on"


def why_not_built(MPI: Any) -> str:
    """Return why the loaded library has no fault tolerance; '' if it has."""
    if problem := why_not(*MPI.get_vendor()):
        return problem
    return "" if hasattr(ctypes.CDLL(MPI.__file__), "MPIX_Comm_revoke") else "it was built without ULFM"


def why_switched_off(MPI: Any) -> str:
    """Return why the job has no fault tolerance, and what to do instead."""
    if problem := why_not_here(MPI):
        return f"{problem}. {HOW_ELSEWHERE}"
    return "fault tolerance is off. Start with `torchmpi run --on-lost-rank continue`, or `mpirun --with-ft ulfm`"


def why_not_here(MPI: Any) -> str:
    """Return why the loaded library has no fault tolerance, or was started without it; '' if it can be used."""
    if problem := why_not_built(MPI):
        return problem
    if launcher.detect().name != launcher.OPEN_MPI:
        return "only its own mpirun tells the ranks which of them have ended"
    return ""


def _filled(places: tuple[int, ...], members: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first rank of each number: lost ones are replaced by spare ranks, and left out if there is none.

    >>> _filled((0, 1, 2), (0, 2, 3, 4)), _filled((0, 3, 2), (2, 3))
    ((0, 3, 2), (3, 2))
    """
    spare = iter(rank for rank in members if rank not in places)
    filled = (rank if rank in members else next(spare, None) for rank in places)
    return tuple(rank for rank in filled if rank is not None)


class _Communicators:
    """The communicators whose calls a loss must end. All ranks have made them; Open MPI crashes where one does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, Any] = {}

    def add(self, comm: Any) -> Any:
        with self._lock:
            self._made[id(comm)] = comm
        return comm

    def discard(self, comm: Any) -> None:
        """Forget one that is about to be freed."""
        with self._lock:
            self._made.pop(id(comm), None)

    def clear(self) -> None:
        with self._lock:
            self._made.clear()

    def revoke(self, error: type[Exception]) -> None:
        """End the calls on them, on all ranks."""
        with self._lock:
            for comm in self._made.values():
                with contextlib.suppress(error):
                    if not comm.Is_revoked():
                        comm.Revoke()


def _tracked(
    MPI: Any, known: _Communicators, end: Callable[[int], None], loss: Callable[[], str]
) -> Callable[[Any], Any]:
    """Return a class of communicators that are `known`, as are those that are made of them.

    `end` ends the job; `loss` returns which loss is behind an error, if there is one.
    """

    class Tracked(MPI.Intracomm):  # type: ignore[misc]
        """A communicator whose calls a loss ends."""

        def Dup(self, *arguments: Any) -> Any:
            return self._made(super().Dup(*arguments), range(self.size))

        def Split(self, *arguments: Any) -> Any:
            return self._made(super().Split(*arguments), range(self.size))

        def Split_type(self, *arguments: Any) -> Any:
            return self._made(super().Split_type(*arguments), range(self.size))

        def Create_group(self, group: Any, *arguments: Any) -> Any:
            made, everyone = super().Create_group(group, *arguments), self.Get_group()
            ranks = group.Translate_ranks(None, everyone)
            everyone.Free()
            return self._made(made, ranks)

        def Abort(self, errorcode: int = 0) -> None:
            """End all ranks, also spare ones. Does not return."""
            end(errorcode)

        def Free(self) -> None:
            known.discard(self)
            super().Free()

        def allgather(self, *arguments: Any) -> Any:
            return self._objects(super().allgather, *arguments)

        def bcast(self, *arguments: Any) -> Any:
            return self._objects(super().bcast, *arguments)

        def _objects(self, call: Callable[..., T], *arguments: Any) -> T:
            """Make a call whose result is of objects: after a loss, bytes that are no object come without an error."""
            try:
                return call(*arguments)
            except MPI.Exception:
                raise
            except Exception as error:
                if loss():
                    raise MPI.Exception(MPI.ERR_PROC_FAILED) from error
                raise

        def _made(self, comm: Any, ranks: Sequence[int]) -> Any:
            """Return a communicator once all `ranks` of this one have made theirs, so that each may be revoked.

            Each rank hears of all others in log2 of them rounds. A lost rank ends this: the communicator is revoked.
            """
            distance, own = 1, ranks.index(self.rank)
            while distance < len(ranks):
                to, source = ranks[(own + distance) % len(ranks)], ranks[own - distance]
                self.Sendrecv([None, 0, MPI.BYTE], to, _MADE_TAG, [None, 0, MPI.BYTE], source, _MADE_TAG)
                distance *= 2
            return known.add(Tracked(comm)) if comm != MPI.COMM_NULL else comm

    return Tracked


class FaultTolerantMPI(Continuing):
    """Takes the place of the module ``mpi4py.MPI``; its `COMM_WORLD` changes when a rank has been lost.

    The other names are those of the module.
    """

    problem_of_collectives = "after the loss of a rank, collectives of Open MPI have returned wrong data"

    def __init__(self, MPI: Any, exit_process: Callable[[int], object]) -> None:
        """`exit_process` ends this process at once."""
        self.__dict__.update({name: value for name, value in vars(MPI).items() if not name.startswith("_")})
        self._library = MPI
        self._exit = exit_process
        self._known = _Communicators()
        self._tracked = _tracked(MPI, self._known, self._end, self.loss_behind_error)
        self._is_prepared = False
        self._lock = threading.RLock()
        """Held by the thread that looks for lost ranks."""
        self._reason = ""
        self._places: tuple[int, ...] = ()
        self._has_refused = False
        """Whether this rank has taken part in an agreement that a rank is lost, since the last recovery."""
        self._sent: list[Any] = []
        self._is_whole = True
        """Of a spare rank that is released: whether no rank has been lost."""
        self._is_released = False
        """Whether the job has ended, so that this spare rank leaves."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    # --- start and end

    def prepare(self, environment: Mapping[str, str]) -> dict[str, str]:
        self._is_prepared = True
        return variables(environment)

    def why_no_recovery(self) -> str:
        if self._library.Query_thread() != self._library.THREAD_MULTIPLE:
            return "it was initialized without MPI_THREAD_MULTIPLE, and a thread must look for lost ranks"
        if not self._is_prepared:
            return (
                "it was initialized before mpi.start(), which must choose the collectives of Open MPI. Import "
                "mpi4py.MPI after mpi.start()"
            )
        return ""

    @property
    def notices_ended_ranks(self) -> bool:  # type: ignore[override]
        """Whether a thread looks for ranks that end, and communicators may be smaller than the launcher says."""
        return self.survivors is not None

    def begin(self) -> Survivors:
        if self.survivors is None:
            world = self._library.COMM_WORLD
            spares = int(os.environ.get(SPARES_VARIABLE) or 0)
            self._first = world.Dup()  # of all ranks, never revoked: messages between the remaining ones arrive
            self._ending = world.Dup()  # revoked by a rank that ends the job, since that is seen at little cost
            self._hosts = self._first.allgather(socket.gethostname())
            self._everyone = self._first.Get_group()
            self.survivors = Survivors(self._first.rank, self._hosts, self._numbered)
            self._places = tuple(range(world.size - spares))
            # Of Open MPI's own world only Shrink() makes communicators: see _shrunk().
            try:
                world = self._of_places(self._first, self._places)
            finally:
                with contextlib.suppress(self._library.Exception):  # a rank is lost already
                    self._first.Agree(1)  # all have made it, so that it may be revoked
            self._enter(world)
            self._thread = threading.Thread(target=self._run, name="torchmpi lost ranks", daemon=True)
            self._thread.start()
        return self.survivors

    @property
    def places(self) -> tuple[int, ...]:
        return self._places

    def take_place(self, prepare: Callable[[], object]) -> None:
        """Return when this rank has its number in `COMM_WORLD`; a spare rank waits until it takes that of a lost one.

        It calls `prepare` before. A spare that is not needed ends its process. Collective over all ranks that were
        started, the first time.
        """
        if not os.environ.get(SPARES_VARIABLE):
            return
        self.begin()
        if self._first.rank not in self._places:
            prepare()
        while self._first.rank not in self._places:
            self.is_newcomer = True
            try:
                if self._reason and not self._is_released:
                    self.agree(_SPARE_SECONDS)
            except RankLostError:
                if not self._is_released:
                    raise
            if self._is_released:
                sys.exit(0)
            time.sleep(_IDLE_SECONDS)
        self.note_numbers()

    def before_groups(self) -> None:
        """Let communicators be known, so that a loss ends their calls: those of `COMM_WORLD` from now on."""
        self.begin()

    def _look_for_release(self) -> None:
        """Let this spare rank leave if the job has ended, also while it waits for the remaining ranks."""
        assert self.survivors is not None
        for rank in self._places:
            with contextlib.suppress(self._library.Exception):  # it is lost
                if not self._is_released and self._first.Iprobe(rank, _RELEASE_TAG):
                    self._is_whole = self._first.recv(None, rank, _RELEASE_TAG)
                    self._is_released = True
                    self.survivors.exclude("the job has ended")

    def _enter(self, world: Any) -> None:
        """Take a communicator as `COMM_WORLD`; COMM_NULL if this rank is spare."""
        self.COMM_WORLD = self._tracked(world)
        if world != self._library.COMM_NULL:
            self._known.add(self.COMM_WORLD)

    def _of_places(self, whole: Any, places: tuple[int, ...]) -> Any:
        """Return the communicator of the ranks that have a number. Collective over `whole`."""
        own = self._first.rank
        return whole.Split(*((0, places.index(own)) if own in places else (self._library.UNDEFINED, 0)))

    def before_finalize(self) -> bool:
        """End the thread and agree whether a rank has been lost; if so, leave without MPI_Finalize. Collective.

        Neither its barrier among the remaining ranks nor the launcher's wait for all ranks is sure to end then. So a
        rank that knows of a loss waits for nothing longer than `_LEAVE_SECONDS`.
        """
        self._closed.set()
        if self.survivors is None or self._thread is None:
            return True
        is_whole = len(self.survivors.remaining) == len(self._hosts)
        self._thread.join(None if is_whole else _LEAVE_SECONDS)  # its calls after MPI_Finalize would end the process
        if self.COMM_WORLD != self._library.COMM_NULL:
            self._is_whole = self._agrees_to_finalize(is_whole=is_whole)
            if self.COMM_WORLD.rank == 0 or not self._is_whole:  # rank 0 may be lost
                for rank in set(self.survivors.remaining) - set(self._places):
                    with contextlib.suppress(self._library.Exception):
                        self._first.send(self._is_whole, rank, _RELEASE_TAG)
        if not self._is_whole:
            self._leave(self.survivors.remaining)
        return self._is_whole

    def _agrees_to_finalize(self, *, is_whole: bool) -> bool:
        """Return whether no rank has been lost, as far as any rank knows; `is_whole`: as far as this one knows."""
        with contextlib.suppress(self._library.Exception):  # a rank is lost: all get this error
            if is_whole:
                answer = array("i", [1])
                request = self.COMM_WORLD.Iagree(answer)
                while not request.Test():
                    self._end_if_told()  # the thread has ended
                    time.sleep(_FAILING_SECONDS)
                return bool(answer[0])
            request = self.COMM_WORLD.Iagree(array("i", [0]))
            if not _holds_in_time(request.Test):
                logger.warning(
                    f"rank {self.COMM_WORLD.rank} ends alone: {_LEAVE_SECONDS:g} s after it, another rank has not come "
                    "to the end of the program."
                )
        return False

    def _leave(self, ranks: tuple[int, ...]) -> None:
        """Wait in the launcher until all these ranks have what they wait for in MPI, and end the connection to it.

        MPI makes progress meanwhile. The launcher takes the end of the process as that after MPI_Finalize then.
        """
        library, job = ctypes.CDLL(self._library.__file__), os.environ["PMIX_NAMESPACE"].encode()
        processes = (_Process * len(ranks))(*(_Process(job, rank) for rank in ranks))
        arguments = processes, ctypes.c_size_t(len(ranks)), None, ctypes.c_size_t(0)
        ended = threading.Event()
        # Not by a thread: from Python 3.12 on none can be started so late.
        self._on_fence = _OnFence(lambda status, data: ended.set())
        if library.PMIx_Fence_nb(*arguments, self._on_fence, None) != 0:
            ended.set()

        def is_over() -> bool:
            with contextlib.suppress(self._library.Exception):
                self._library.COMM_SELF.Iprobe(0)
            return ended.is_set()

        _holds_in_time(is_over)  # if another rank is lost now, it may not
        library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def continue_without_lost_ranks(self, on_loss: Callable[[str], None]) -> Callable[[], None]:
        """Let all calls fail when a rank is lost; see the base class."""
        if running := os.environ.get(RUNNING_VARIABLE):
            Path(running).touch()
        return super().continue_without_lost_ranks(on_loss)

    def note_stop(self) -> None:
        if running := os.environ.get(RUNNING_VARIABLE):
            Path(running).unlink(missing_ok=True)

    # --- running: look for lost ranks, and for one that ends the job

    def _end(self, status: int) -> None:
        """End all ranks with this status. Does not return.

        The launcher ends at most two others after MPI_Abort, so ranks are told, and exit. If several call MPI_Abort at
        the same moment on two hosts, it may return 0: only the first of them does.
        """
        with contextlib.suppress(self._library.Exception):
            self._sent += [self._first.Isend(array("i", [status]), peer, _END_TAG) for peer in self._others()]
            self._ending.Revoke()
            limit = time.monotonic() + _TELLING_SECONDS
            while time.monotonic() < limit:
                self._library.COMM_SELF.Iprobe(0)
                time.sleep(_FAILING_SECONDS)
            if any(self._first.Iprobe(peer, _END_TAG) for peer in self._others() if peer < self._first.rank):
                self._exit(status)
        self._library.COMM_WORLD.Abort(status)

    def _end_if_told(self) -> None:
        """End this rank if another one ends the job, with its status."""
        if not self._ending.Is_revoked():
            return
        limit, status = time.monotonic() + 2 * _TELLING_SECONDS, array("i", [1])
        while time.monotonic() < limit:
            for peer in self._others():
                with contextlib.suppress(self._library.Exception):  # lost
                    if self._first.Iprobe(peer, _END_TAG):
                        self._first.Recv(status, peer, _END_TAG)
                        self._exit(status[0])
            time.sleep(_FAILING_SECONDS)
        self._exit(status[0])

    def _is_revoked(self) -> bool:
        """Return whether a rank has ended the calls of all, because it knows of a loss."""
        return bool(self.COMM_WORLD != self._library.COMM_NULL and self.COMM_WORLD.Is_revoked())

    @property
    def loss(self) -> str:
        return self._reason

    def loss_behind_error(self) -> str:
        """Return why all calls fail, after one has failed; '' if no rank is lost. The launcher may still be silent."""
        begin = time.monotonic()
        while self.survivors is not None and not self._reason:
            if time.monotonic() > begin + (_REVOKED_SECONDS if self._is_revoked() else _REASON_SECONDS):
                break
            self._look()
            time.sleep(_FAILING_SECONDS)
        return self._reason

    def _run(self) -> None:
        period = _IDLE_SECONDS
        while not self._closed.wait(period):
            with contextlib.suppress(self._library.Exception):
                self._look()
            period = _FAILING_SECONDS if self._reason else _IDLE_SECONDS

    def _look(self) -> None:
        """Note lost ranks, and end the calls of this and of all other ranks if there are any."""
        assert self.survivors is not None
        with self._lock:
            for _ in range(_NUM_STEPS):
                self._library.COMM_SELF.Iprobe(0)  # progress, without which Get_failed() learns nothing
            self._end_if_told()
            if self._first.rank not in self._places:
                self._look_for_release()
            for rank in self._failed():
                self.survivors.note(rank, f"{self._named(rank)} is gone: its process has ended")
            if self._reason or self._is_revoked():
                self._hear()
            if not (self._reason or self.survivors.is_agreed):
                self._reason = self.survivors.last_reason
                self.survivors.on_loss(self._reason)
            if self._reason:
                self._known.revoke(self._library.Exception)

    def _failed(self) -> list[int]:
        group = self._first.Get_failed()
        ranks: list[int] = list(group.Translate_ranks(None, self._everyone)) if group.size else []
        group.Free()
        return ranks

    def _numbered(self, rank: int) -> str:
        """Return a rank as the program numbers it at present."""
        return f"rank {self._places.index(rank)}" if rank in self._places else f"spare rank {rank}"

    def _named(self, rank: int) -> str:
        return f"{self._numbered(rank)} on host {self._hosts[rank]}"

    # --- failing and agreeing

    def confirm(self) -> bool:
        """Return False if all ranks are here and none is lost, and raise an error of MPI otherwise. Collective.

        All ranks get the same answer. Those whose calls have failed take part in :meth:`agree`.
        """
        if not self._has_agreed(is_well=True):
            raise self._library.Exception(self._library.ERR_PROC_FAILED)
        return False

    def _has_agreed(self, *, is_well: bool) -> bool:
        """Return whether all ranks are well; the same on all of them.

        Once all ranks got the answer that they were not, although none was lost: so all of them ask again.
        """
        self._has_refused = True
        for _ in range(_NUM_QUESTIONS):
            with contextlib.suppress(self._library.Exception):  # a rank is lost: all get this error
                if self.COMM_WORLD.Agree(int(is_well and not self._reason)):
                    self._has_refused = False
                    return True
            time.sleep(_FAILING_SECONDS)
        return False

    def agree(self, timeout_seconds: float) -> None:
        assert self.survivors is not None
        limit = time.monotonic() + timeout_seconds
        is_spare = self.COMM_WORLD == self._library.COMM_NULL
        if not (is_spare or self._has_refused):  # others may be in confirm(), and wait for this rank
            with contextlib.suppress(StallError):  # the next step knows who is late
                self._within(limit, partial(self._has_agreed, is_well=False))
        self.survivors.meet(self._tell, timeout_seconds, max(limit, time.monotonic() + _GRACE_SECONDS))
        self._known.revoke(self._library.Exception)  # no rank makes communicators now
        members, places, world = self._within(max(limit, time.monotonic() + _SHRINKING_SECONDS), self._shrunk)
        if not set(places) & set(self._places):
            raise RankLostError(f"{self._reason}, and with it all ranks that have a state; spare ranks have none.")
        with self._lock:
            self.survivors.settle(members)
            self._places = places
            # Not freed: with a lost rank that may hang, and ranks hold different numbers of them.
            self._known.clear()
            self._enter(world)
            # A rank that was lost after the agreement ends the calls of the new world.
            self._reason = "" if self.survivors.is_agreed else self.survivors.last_reason
            self._has_refused = False

    def _shrunk(self) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
        """Return the remaining ranks, those with a number, and a communicator that they have agreed works.

        A communicator that was being made when the rank was lost still holds its turn for a number, before all
        that are made of later ones. No other one has been made of the first communicator.
        """
        while True:
            whole = self._library.COMM_WORLD.Shrink()
            whole.Set_errhandler(self._library.ERRORS_RETURN)
            members = tuple(whole.Get_group().Translate_ranks(None, self._everyone))
            places = _filled(self._places, members)
            world = self._working(whole, members, places)
            if world is not None:
                return members, places, world

    def _working(self, whole: Any, members: tuple[int, ...], places: tuple[int, ...]) -> Any:
        """Return the communicator of the ranks with a number, if it and `whole` work: None on all ranks otherwise.

        The first exchange on a new communicator has returned garbage. Before the first agreement none may revoke what
        others still make.
        """
        MPI, is_right, world = self._library, False, whole
        try:
            whole.Agree(1)
        except MPI.Exception:
            return None
        try:
            is_right = tuple(whole.allgather(self._first.rank)) == members
            if places != members:
                world = self._of_places(whole, places)
        except Exception:  # also of unpickling
            is_right = False
            with contextlib.suppress(MPI.Exception):
                whole.Revoke()
        try:
            return world if whole.Agree(int(is_right)) else None
        except MPI.Exception:
            return None

    def _within(self, limit: float, call: Callable[[], T]) -> T:
        """Return the result of a call that has no time limit of its own, or raise StallError.

        RankLostError if it fails: the other ranks cannot go on with this one.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="torchmpi agreement", daemon=True)
        thread.start()
        thread.join(max(limit - time.monotonic(), 0.0))
        if errors:
            raise RankLostError(f"{self._named(self._first.rank)} cannot go on: {errors[0]}.") from errors[0]
        if not results:
            raise StallError(
                f"{self._named(self._first.rank)}: the remaining ranks do not agree: one of them hangs. The loss: "
                f"{self._reason}."
            )
        return results[0]

    # --- messages between ranks in agree()

    def _others(self) -> Iterator[int]:
        assert self.survivors is not None
        return (rank for rank in self.survivors.remaining if rank != self._first.rank)

    def _tell(self) -> None:
        """Send the view of this rank to all others."""
        assert self.survivors is not None
        view = self.survivors.own_view()
        for peer in self._others():
            with contextlib.suppress(self._library.Exception):  # lost meanwhile
                self._sent.append(self._first.Isend([view, self._library.BYTE], peer, _VIEWS_TAG))

    def _hear(self) -> None:
        """Take over the views of the others."""
        assert self.survivors is not None
        status = self._library.Status()
        for peer in self._others():
            with contextlib.suppress(self._library.Exception):
                while self._first.Iprobe(peer, _VIEWS_TAG, status):
                    view = bytearray(status.Get_count(self._library.BYTE))
                    self._first.Recv([view, self._library.BYTE], peer, _VIEWS_TAG)
                    self.survivors.hear(peer, bytes(view))
        with contextlib.suppress(self._library.Exception):
            self._sent = [request for request in self._sent if not request.Test()]
