"""What torchmpi asks of a message library, beyond the names that it has in common with the module ``mpi4py.MPI``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from .survivors import Survivors

JOINS = "a new rank is ready to join"
"""Why all calls fail when no rank is lost."""


class Abilities:
    """The answers of a plain MPI library; each object that takes the place of ``mpi4py.MPI`` has its own."""

    problem_of_collectives = ""
    """Why there are no collectives on tensors; '' if there are."""
    calls_library = True
    """Whether there is a library, which may take device pointers, and whose world is that of the launcher."""
    notices_ended_ranks = False
    """Whether calls fail when a rank ends, so that nobody need look for ranks that end in ``start()``."""
    can_continue = False
    """Whether the remaining ranks can continue; see :class:`Continuing`."""
    is_ending = False
    """Whether another rank has ended the job, so that this process is about to end; an MPI library does not tell."""

    def watch_ranks(self, end_job: Callable[[str, int], None]) -> Callable[[], None]:
        """End the job when another rank is lost; return a function that ends the watch. MPI launchers do it."""
        return lambda: None

    is_newcomer = False
    """Whether this rank was a spare, or was started in place of a lost one, and has not got the state of the others."""
    joining_seconds = 600.0
    """How long such a rank waits in ``start()`` for the others to call recover(), which has a limit of its own."""

    def prepare(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to set before MPI is initialized, given those that are set."""
        return {}

    def confirm(self) -> bool:
        """Return False: the loss of a rank ends the job, and no rank joins it."""
        return False

    def join(self) -> str:
        """Let all calls fail, so that the ranks meet and the new rank joins them; return the reason.

        All ranks call it, after :meth:`confirm` has returned True.
        """
        raise NotImplementedError

    def take_place(self, prepare: Callable[[], object]) -> None:
        """Return when this rank has its number in `COMM_WORLD`; a spare rank waits until it takes that of a lost one.

        It calls `prepare` before, and so does a rank that was started in place of a lost one, which waits until the
        others let it join. Collective over all ranks that were started.
        """

    def before_groups(self) -> None:
        """Do what must come before the first communicator is made, if the job is to continue. Collective."""

    def note_stop(self) -> None:
        """Note that all ranks have called ``stop()``, so that the job is a success whatever happens to them later."""

    def before_finalize(self) -> bool:
        """Do what must come before MPI_Finalize, and return whether to call it. Collective."""
        return True

    def why_no_recovery(self) -> str:
        """Return why the job cannot continue without a lost rank, although it `can_continue`; '' if it can."""
        return ""

    def loss_behind_error(self) -> str:
        """Return why all calls fail, after one has failed; '' if no rank is lost."""
        return ""


class Continuing(Abilities):
    """A library with which the remaining ranks continue: the states of a job that may lose ranks.

    ============ ============================================ ==============================================
    state        calls                                        left when
    ============ ============================================ ==============================================
    running      work                                         a rank is lost, or joins: `loss` has the reason
    failing      fail, all of them on all ranks               a rank calls :meth:`recover`
    agreeing     none: the rank waits in :meth:`recover`      all remaining ranks are here and know who is left
    ============ ============================================ ==============================================

    The numbers of `survivors` are the first ranks; `COMM_WORLD` has those that have agreed last, without spare ranks.
    """

    COMM_WORLD: Any
    survivors: Survivors | None = None
    notices_ended_ranks = can_continue = True
    problem = ""
    """Why calls fail for ever; '' otherwise."""

    @property
    def places(self) -> tuple[int, ...]:
        """The first rank of each rank of `COMM_WORLD`."""
        assert self.survivors is not None
        return self.survivors.members

    @property
    def loss(self) -> str:
        """Why all calls fail, if a rank has been lost and the ranks have not agreed since; '' otherwise."""
        raise NotImplementedError

    def begin(self) -> Survivors:
        """Begin to let all calls fail when a rank is lost, instead of ending the job. Collective, the first time."""
        raise NotImplementedError

    def agree(self, timeout_seconds: float) -> None:
        """Make `COMM_WORLD` that of the remaining ranks, and of one that joins; `loss` is '' then. Collective."""
        raise NotImplementedError

    def confirm(self) -> bool:
        """Return if all ranks are here and none is lost, and raise an error of the library otherwise. Collective.

        The result, the same on all ranks, is whether a new rank waits to :meth:`join` them.
        """
        raise NotImplementedError

    def loss_behind_error(self) -> str:
        """Return `loss`."""
        return self.loss

    def continue_without_lost_ranks(self, on_loss: Callable[[str], None]) -> Callable[[], None]:
        """Let all calls fail when a rank is lost, and call `on_loss`; return a function that ends the latter.

        Later losses fail all calls too. :meth:`recover` continues with the remaining ranks.
        """
        survivors = self.begin()
        survivors.on_loss = on_loss
        if reason := self.loss or self.problem:  # meanwhile
            on_loss(reason)

        def stop() -> None:
            survivors.on_loss = lambda reason: None

        return stop

    def note_numbers(self) -> None:
        """Write the numbers of a rank that has taken a place to those variables of a launcher that are set."""
        for name, number in (("RANK", self.COMM_WORLD.rank), ("WORLD_SIZE", self.COMM_WORLD.size)):
            if name in os.environ:
                os.environ[name] = str(number)

    def recover(self, timeout_seconds: float) -> tuple[int, ...]:
        """Make ``COMM_WORLD`` the communicator of the remaining ranks. Collective over these.

        Returns:
            The former ranks in ``COMM_WORLD`` of its present ranks; -1 for one that was a spare, or is new.

        Raises:
            RankLostError: The other ranks continue without this one, or the remaining ones are too few to be sure that
                the others have not gone on too.
            StallError: A remaining rank has not called this in time.
        """
        before = self.places
        self.agree(timeout_seconds)
        return tuple(before.index(rank) if rank in before else -1 for rank in self.places)
