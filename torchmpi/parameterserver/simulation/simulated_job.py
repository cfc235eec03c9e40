"""Simulated workers: the ranks of a job as threads of one process, of which one runs at a time, in simulated time.

Each worker has a :class:`SimulatedRuntime`, with which the functions of torchmpi that ask for the running job find its
communicators. It is made the running one whenever the worker runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch

from ...backends.base import refusal
from ...backends.selector import Choice
from ...communicators.group import Group, GroupContext
from ...communicators.levels import CommunicatorStack
from ...config import Config
from ...errors import AlreadyStartedError, ArgumentError, BackendUnavailableError, TorchMPIError, set_rank
from ...session import runtime
from .coroutines import DeadlockError, Event, Turns
from .meeting_backend import MeetingBackend

_CONFIG = Config(
    bind="none", abort_on_exception=False, fast_path=False, verbose=False, check="off",
    stall_warning_seconds=1e12, stall_abort_seconds=0,
)  # fmt: skip
"""Without limits of time, which is simulated: workers that wait for each other for ever are noticed at once."""
_STACK_BYTES = 16 << 20


class WorkerFailure(BaseException):
    """Ends a simulated worker at the time of its failure. No error, so that a program does not take it for its own."""


class MessageLibrary:
    """What groups ask of the module ``mpi4py.MPI``."""

    UNDEFINED = -1

    class Exception(TorchMPIError):
        """Never raised."""


class WorkerComm:
    """The communicator of a simulated worker: objects are exchanged when all its workers have come."""

    has_unique_context = True

    def __init__(self, world: WorkerTurns, members: Sequence[int], rank: int, name: str) -> None:
        self.world, self.members, self.rank, self.size, self.name = world, members, rank, len(members), name
        self._num_made = 0

    def Dup(self) -> WorkerComm:
        """Return a communicator of the same workers."""
        self._num_made += 1
        return WorkerComm(self.world, self.members, self.rank, f"{self.name}/{self._num_made}")

    def Split(self, color: int, key: int) -> WorkerComm | None:
        """Return the communicator of the workers with the same color. Collective."""
        pairs = self.allgather((color, key))
        self._num_made += 1
        ranks = [rank for rank in range(self.size) if pairs[rank][0] == color]
        ranks.sort(key=lambda rank: pairs[rank][1])
        if color == MessageLibrary.UNDEFINED:
            return None
        members = [self.members[rank] for rank in ranks]
        return WorkerComm(self.world, members, ranks.index(self.rank), f"{self.name}/{self._num_made}:{color}")

    def Free(self) -> None:
        """Do nothing."""

    def allgather(self, value: Any) -> list[Any]:
        found: list[Any] = self.world.meet(f"a call of communicator {self.name}", self, value, list)
        return found

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def Barrier(self) -> None:
        self.allgather(None)


class WorkerSelector:
    """Selects the only backend."""

    def __init__(self) -> None:
        self.backends = {"shm": MeetingBackend()}
        self.tuned: dict[Any, Any] = {}

    def select(self, collective: str, device_type: str, group: Group, **_: object) -> list[Choice]:
        backend = self.backends["shm"]
        reason = refusal(backend, collective, device_type, group)
        if reason is not None:
            raise BackendUnavailableError(f"{group.where}: {collective} between simulated workers: {reason}.")
        return [Choice(None, backend)]


class SimulatedRuntime:
    """What the functions of torchmpi use of the running job, for one worker."""

    cartesian = False
    host_name, num_hosts, local_rank, local_size = "simulated", 1, 0, 1
    device = torch.device("cpu")
    config = _CONFIG

    def __init__(self, turns: WorkerTurns, rank: int, size: int, generators: Generators) -> None:
        self.generators = generators
        self.rank, self.MPI, self.resources = rank, MessageLibrary, ExitStack()
        self.context = GroupContext(MessageLibrary, [0] * size, check="off", threaded=True, slot_bytes=0)
        self.communicators = CommunicatorStack(WorkerComm(turns, range(size), rank, "world"), self.context)
        self.world = self.communicators.levels[0].intra
        self.selector = WorkerSelector()
        self.num_threads = 1


class Generators:
    """The global generators of random numbers of torch, Python and numpy, of which each process has its own."""

    def __init__(self, of_torch: torch.Tensor, of_python: Any, of_numpy: Any) -> None:
        self._of_torch, self._of_python, self._of_numpy = of_torch, of_python, of_numpy

    @classmethod
    def seeded(cls, seed: int, rank: int) -> Generators:
        """Return those of a worker: that of torch as in each process, the others by seed and rank."""
        of_python = random.Random(f"{seed} {rank}").getstate()
        return cls(torch.Generator().get_state(), of_python, np.random.MT19937([seed, rank]))

    @classmethod
    def current(cls) -> Generators:
        """Return those of this process as they are."""
        of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return cls(torch.get_rng_state(), random.getstate(), of_numpy)

    def save(self) -> None:
        """Keep the states."""
        self._of_torch, self._of_python = torch.get_rng_state(), random.getstate()

    def restore(self) -> None:
        """Make them the global ones."""
        torch.set_rng_state(self._of_torch)
        random.setstate(self._of_python)
        # The object, as its state takes a quarter of a millisecond.
        np.random.set_bit_generator(self._of_numpy)  # type: ignore[attr-defined]


class WorkerTurns(Turns):
    """Runs workers, one at a time, in the order of simulated time."""

    stack_bytes = _STACK_BYTES

    def __init__(self, num_threads: int) -> None:
        super().__init__(timed=True)
        self._num_threads = num_threads
        self._meetings: dict[str, tuple[Event, dict[int, Any], list[Any]]] = {}

    def enter(self, worker: SimulatedRuntime) -> None:
        """Make a worker the running job of its thread, which has begun."""
        torch.set_num_threads(self._num_threads)
        self._resume(worker)

    def _resume(self, worker: SimulatedRuntime) -> None:
        runtime.running = cast(runtime.Runtime, worker)
        set_rank(worker.rank)
        worker.generators.restore()

    def _let_others_run(self, turn: Any) -> None:
        worker = cast(SimulatedRuntime, runtime.running)
        worker.generators.save()
        super()._let_others_run(turn)
        self._resume(worker)

    def meet(
        self, name: str, comm: WorkerComm, value: Any, combine: Callable[[list[Any]], Any], num_bytes: int = 0
    ) -> Any:
        """Return what `combine` returns for the values of all workers of a communicator. Collective."""
        event, values, results = self._meetings.setdefault(name, (Event(name), {}, []))
        values[comm.rank] = value
        if len(values) < comm.size:
            self.wait([event])
        else:
            del self._meetings[name]
            results.append(combine([values[rank] for rank in range(comm.size)]))
            self.finish(event, self.clock)
        return results[0]


@contextmanager
def no_job() -> Iterator[None]:
    """Let simulated workers take the place of the running job in a block."""
    if runtime.running is not None:
        raise AlreadyStartedError(
            "simulate() runs workers in this process, which is a rank of a job now. Call mpi.stop() before, or "
            "simulate in a program of its own."
        )
    generators = Generators.current()
    try:
        yield
    finally:
        runtime.running = None
        set_rank(None)
        generators.restore()


def run_workers(
    turns: WorkerTurns, functions: Sequence[Callable[[], Any]], missing: Callable[[], str], failed: Sequence[int]
) -> list[Any]:
    """Run the functions of all workers, and return their results; raise the first error.

    `missing` says which call of a recorded run has not been made, if the workers wait for each other; '' if none.
    `failed` gets the workers that have failed.
    """
    try:
        return turns.run(functions)
    except DeadlockError as error:
        if problem := missing():
            raise ArgumentError(f"simulate: {problem}") from None
        remedy = (
            "Each worker has to make the collective calls that the others wait for; one that has not joined yet makes "
            "none."
        )
        if failed:
            remedy = (
                f"Workers that have failed make no call: {', '.join(map(str, sorted(failed)))}. With failures=, let "
                "the program make its collective calls, such as mpi.barrier(), before the first failure."
            )
        raise TorchMPIError(f"simulate: {error}. {remedy}") from None
