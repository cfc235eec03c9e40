"""Communicators of a job that may lose ranks: no rank has one that another rank still makes, so each may be revoked.

Open MPI crashes in a rank that makes a communicator which another one revokes. Garbage in place of objects, which it
has returned after a loss, is an error of MPI. Losses: tests/jobs/test_recovery.py.
"""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest

from torchmpi.launch import fault_tolerance, mpi_library

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.any_mpi, pytest.mark.usefixtures("world")]

END = lambda status: None  # noqa: E731
MAKERS = {
    "Dup": lambda comm: comm.Dup(),
    "Split": lambda comm: comm.Split(0, -comm.rank),
    "Split into one": lambda comm: comm.Split(comm.rank),
    "Split without some": lambda comm: comm.Split(0 if comm.rank else mpi_library.load().UNDEFINED),
    "Create_group": lambda comm: comm.Create_group(comm.Get_group().Incl(range(comm.size)[::-1]), 7),
}


@pytest.mark.parametrize("how", MAKERS)
def test_a_communicator_is_known_once_all_ranks_have_made_it(how, tmp_path):
    MPI = mpi_library.load()
    world, known = MPI.COMM_WORLD, fault_tolerance._Communicators()
    path = world.bcast(tmp_path / "made")

    class Slow(MPI.Intracomm):
        """Of the last rank, which needs time after the others can have made theirs."""

    def delayed(name):
        def make(self, *arguments):
            made = getattr(super(Slow, self), name)(*arguments)
            if world.rank == world.size - 1:
                time.sleep(0.2)
                path.touch()
            return made

        return make

    for name in ("Dup", "Split", "Create_group"):
        setattr(Slow, name, delayed(name))
    Tracked = fault_tolerance._tracked(SimpleNamespace(**(vars(MPI) | {"Intracomm": Slow})), known, END, lambda: "")
    parent = world.Dup()
    made = MAKERS[how](Tracked(parent))
    assert path.exists()
    assert (made == MPI.COMM_NULL) == (how == "Split without some" and world.rank == 0)
    if made != MPI.COMM_NULL:
        assert len(known._made) == 1
        made.Free()
    assert known._made == {}
    parent.Free()


@pytest.mark.parametrize("call", ["allgather", "bcast"])
def test_garbage_in_place_of_objects_is_an_error_of_mpi_if_a_rank_is_lost(call):
    """Regression: it was an error of pickle, which ends a program that expects the loss of a rank."""
    MPI, losses = mpi_library.load(), [""]

    class Garbage(MPI.Intracomm):
        def allgather(self, value):
            return pickle.loads(b"\xed" + pickle.dumps(value))

        bcast = allgather

    library = SimpleNamespace(**(vars(MPI) | {"Intracomm": Garbage}))
    Tracked = fault_tolerance._tracked(library, fault_tolerance._Communicators(), END, lambda: losses[0])
    with pytest.raises(pickle.UnpicklingError):
        getattr(Tracked(MPI.COMM_WORLD), call)(7)
    losses[0] = "rank 1 is gone"
    with pytest.raises(MPI.Exception) as found:
        getattr(Tracked(MPI.COMM_WORLD), call)(7)
    assert found.value.Get_error_class() == MPI.ERR_PROC_FAILED
