"""Process sets: communicators with the ranks, numbers and life cycle that Horovod gives them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from .. import collectives
from ..communicators.communicator import Communicator, NullCommunicator
from ..session import api, runtime
from .exceptions import internal_errors


class ProcessSet:
    """Ranks that call collectives together.

    Args:
        ranks_or_comm: The ranks in any order, or a communicator of mpi4py.

    Raises:
        ValueError: It is neither of the two.

    Example:
        even = hvd.add_process_set(hvd.ProcessSet(range(0, hvd.size(), 2)))
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.communicator: Communicator | NullCommunicator | None = None
        self.barrier_communicator: Communicator | NullCommunicator | None = None
        """The same ranks with a call queue of their own, since a barrier does not wait for other calls."""
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            self.ranks = sorted(map(operator.index, ranks_or_comm))
        except TypeError:
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): pass the ranks, or a communicator of mpi4py.") from None

    def size(self) -> int | None:
        """Return the number of ranks; None if the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the number of this rank in the set; None if the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return member_of(self).rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if its ranks are not known yet."""
        return None if self.ranks is None else world().rank in self.ranks

    def position(self, rank: int, call: str) -> int:
        """Return the number in the set of a rank of all ranks."""
        assert self.ranks is not None
        if rank not in self.ranks:
            raise ValueError(f"{call}: root_rank={rank} is not one of the ranks {self.ranks} of the process set.")
        return self.ranks.index(rank)

    def _invalidate(self) -> None:
        self.process_set_id = self.communicator = self.barrier_communicator = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.ranks = None
_registered: dict[int, ProcessSet] = {}
_settings = {"dynamic": False}


def world() -> Communicator:
    """Return the communicator of all ranks; raise ValueError before ``init()``."""
    found = global_process_set.communicator
    if not isinstance(found, Communicator) or found.intra.call_queue.closed:
        raise ValueError("Horovod's functions need hvd.init() first.")
    return found


def member_of(process_set: ProcessSet) -> Communicator:
    """Return the communicator of a registered set that has this rank."""
    found = process_set.communicator
    if type(found) is Communicator and not found.intra.call_queue.closed:
        return found
    world()
    if process_set.process_set_id is None or found is None:
        raise ValueError(f"{process_set} is not registered. Use hvd.add_process_set(), or the argument of hvd.init().")
    if not isinstance(found, Communicator):
        raise ValueError(f"Rank {world().rank} is not in {process_set}. Make the call on its ranks only.")
    return found


_released: list[ProcessSet] = []


def private_set(process_set: ProcessSet) -> ProcessSet:
    """Return the same ranks with a communicator of their own. Collective over the set."""
    while _released:
        released = _released.pop().communicator
        if isinstance(released, Communicator) and not released.intra.call_queue.closed:
            released.intra.free()
    comm, private = member_of(process_set), ProcessSet(process_set.ranks)
    private.process_set_id = process_set.process_set_id
    with internal_errors():
        private.communicator = api.group(range(comm.size), comm=comm, name=f"private part of {comm.name}")
    return private


def release_private(private: ProcessSet, in_flight: Sequence[object]) -> None:
    """Have the next :func:`private_set` free the communicator, unless calls are in flight, which others may not make.

    The garbage collector may call this at any moment, also while this thread holds a lock that freeing needs.
    """
    if not in_flight:
        _released.append(private)


def register_all(everyone: Communicator, process_sets: Sequence[ProcessSet], *, dynamic: bool) -> None:
    """Make the global set and the sets given to ``init()``. Collective."""
    for earlier in list(_registered.values()):
        earlier._invalidate()
    _registered.clear()
    ranks_of_sets = [_ranks_of(each, everyone) for each in process_sets]
    everywhere = list(range(everyone.size))
    # Communicators of mpi4py may have other ranks on other ranks, which all raise, or none.
    of_all: list[list[list[int]]] = []
    for answer in collectives.allgather_object(ranks_of_sets, comm=everyone):
        known = [ranks for ranks in answer if ranks is not None]
        if len(known) < len(answer):
            raise ValueError("init(): a process set has ranks that init(comm=...) does not have.")
        of_all.append(known)
    for given in of_all:
        for index, ranks in enumerate(given):
            if ranks == everywhere or ranks in given[:index]:
                raise ValueError(f"init(): the process set of the ranks {ranks} exists twice.")
    if any(len(given) != len(process_sets) for given in of_all):
        raise ValueError("init(): the ranks passed different numbers of process sets.")
    global_process_set.ranks = everywhere
    global_process_set.communicator = everyone
    _settings["dynamic"] = dynamic
    _register(global_process_set, make_communicator=False)
    for index, process_set in enumerate(process_sets):
        process_set.ranks = of_all[everyone.rank][index]
        _register(process_set, [given[index] for given in of_all])


def unregister_all() -> None:
    """Forget all sets; their communicators end with torchmpi."""
    for known in _registered.values():
        known._invalidate()
    _registered.clear()
    global_process_set.ranks = None


def _ranks_of(process_set: ProcessSet, everyone: Communicator) -> list[int] | None:
    """Return the ranks of a set as numbers in a communicator; None if it does not have them all."""
    if process_set.mpi_comm is None:
        return process_set.ranks
    numbers = everyone.intra.world_ranks
    ranks = ranks_of_mpi_comm(process_set.mpi_comm)
    return sorted(map(numbers.index, ranks)) if set(ranks) <= set(numbers) else None


def ranks_of_mpi_comm(comm: Any) -> list[int]:
    """Return the ranks of a communicator of mpi4py as numbers in the world, in ascending order."""
    return sorted(comm.Get_group().Translate_ranks(None, runtime.current().context.MPI.COMM_WORLD.Get_group()))


def _register(
    process_set: ProcessSet, ranks_on_ranks: Sequence[list[int]] = (), *, make_communicator: bool = True
) -> None:
    """Give a set its number and communicators. Collective.

    Args:
        process_set: The set.
        ranks_on_ranks: The ranks of the set on each rank, if they differ.
        make_communicator: Whether it has none yet.
    """
    number = min(set(range(len(_registered) + 1)) - set(_registered))
    assert process_set.ranks is not None
    disjoint = sorted(map(list, set(map(tuple, ranks_on_ranks or [process_set.ranks]))))

    def make(name: str) -> Communicator | NullCommunicator:
        made = {tuple(ranks): api.group(ranks, comm=world(), name=name) for ranks in disjoint}
        return made[tuple(process_set.ranks or ())]

    if make_communicator:
        process_set.communicator = make(f"process set {number}")
    process_set.barrier_communicator = make(f"barriers of process set {number}")
    process_set.process_set_id = number
    _registered[number] = process_set


def _check_dynamic(call: str) -> None:
    world()
    if not _settings["dynamic"]:
        raise ValueError(f"{call}() needs hvd.init(process_sets='dynamic'), or HOROVOD_DYNAMIC_PROCESS_SETS=1.")


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set after ``init()``. Collective over all ranks, also those that are not in the set.

    Args:
        process_set: A ProcessSet, or its ranks.

    Returns:
        The registered set.

    Raises:
        ValueError: Dynamic process sets are off, or a set with these ranks exists.
        NotImplementedError: The set is given by a communicator of mpi4py.
        HorovodInternalError: The ranks passed different sets.

    Example:
        even = hvd.add_process_set(range(0, hvd.size(), 2))
    """
    _check_dynamic("add_process_set")
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.ranks is None:
        raise NotImplementedError("add_process_set() takes ranks. Pass communicators of mpi4py to hvd.init().")
    if any(known.ranks == added.ranks for known in _registered.values()):
        raise ValueError(f"add_process_set(): a process set of the ranks {added.ranks} exists.")
    with internal_errors():
        _register(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks.

    Args:
        process_set: A registered set.

    Returns:
        False for the set of all ranks and for one that is not registered.

    Raises:
        ValueError: Dynamic process sets are off.
        HorovodInternalError: Other ranks make a different call.

    Example:
        hvd.remove_process_set(even)
    """
    _check_dynamic("remove_process_set")
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    with internal_errors():
        collectives.barrier(comm=world())
        for communicator in (process_set.communicator, process_set.barrier_communicator):
            assert communicator is not None
            communicator.free()
    del _registered[number]
    process_set._invalidate()
    return True


def ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each registered set, by its number."""
    return {number: list(known.ranks or ()) for number, known in sorted(_registered.items())}
