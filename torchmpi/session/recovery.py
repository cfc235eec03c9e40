"""``recover()``: continue in the same processes without lost ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ..communicators import release
from ..errors import ArgumentError, RankLostError, TorchMPIError
from ..launch import mpi_library, respawning
from ..launch.abilities import JOINS
from ..log import logger
from . import runtime

__all__ = ["recover"]

_recovered_seconds = 0.0
"""When the last ``recover()`` ended, on the clock of ``time.monotonic()``."""
when_abandoned: list[Callable[[], object]] = []
"""Called by ``recover()`` when everything of the former ranks is closed, and torchmpi has not started again."""


def recover(timeout: float = 60.0) -> tuple[int, ...]:
    """Start torchmpi again on the remaining ranks, after a ``RankLostError``. Collective over these ranks.

    Each remaining rank gets such an error from its next call, so all of them come here. They agree on the lost ranks
    and get new numbers, in the old order: ``rank()``, ``size()`` and the levels are those of a new ``start()`` with the
    same arguments. Everything made before is closed, as by ``stop()``: communicators, handles, registrations of
    networks, process groups of ``torch.distributed`` with the backend ``torchmpi``. Tensors remain, also shared ones,
    but those in which a failed call was receiving have undefined values. Parameter servers live on, with their values.
    The ranks may have failed in different steps of the program, by at most one, so they must agree on the step and on
    its state.

    Args:
        timeout: How many seconds to wait for remaining ranks that do not come.

    Returns:
        The former ranks of the present ones, in the order of their new ranks; -1 for a spare rank, which has taken
        the place of a lost one, and for a rank that was started in place of one (``torchmpi run --respawns``). If the
        error that is being handled is of a call that had failed before an earlier ``recover()``, nothing is done: these
        are the present ranks.

    Raises:
        ArgumentError: No rank is lost.
        NotStartedError: torchmpi is not started.
        RankLostError: The other ranks continue without this one, or too few are left, so that those which cannot be
            reached may continue too.
        StallError: A remaining rank has not called this function in time.

    Example:
        ::

            mpi.start()  # torchmpi run --on-lost-rank continue
            step, is_lost = 0, False
            while step < 1000:
                try:
                    if is_lost:  # here, since another rank may be lost meanwhile
                        states = model.state_dict(), optimizer.state_dict()
                        step, (weights, moments) = mpi.broadcast_object((step, states))
                        model.load_state_dict(weights)
                        optimizer.load_state_dict(moments)
                        is_lost = False
                    train(model, optimizer, data[step][mpi.rank() :: mpi.size()])
                    step += 1
                except mpi.RankLostError:
                    mpi.recover()
                    is_lost = True
    """
    global _recovered_seconds
    old = runtime.current()
    if not old.context.loss:
        handled = sys.exc_info()[1]
        if isinstance(handled, RankLostError) and handled.seconds < _recovered_seconds:
            return tuple(range(old.world.size))
    if not is_rank_lost():
        raise ArgumentError(
            f"rank {old.world.rank}: recover() without a lost rank. It is for the program to call after a "
            "RankLostError, which calls raise with the setting on_lost_rank='raise'."
        )
    for group in list(old.context.groups):
        group.drain()  # queued calls fail; none may begin when messages are possible again
    former = tuple(range(old.world.size))
    while True:
        former = tuple(former[rank] if rank >= 0 else -1 for rank in old.MPI.recover(timeout))
        runtime.abandon()
        release.forget()
        for close in when_abandoned:
            close()
        try:
            runtime.start(**old.arguments)
        except RankLostError as error:  # another one, meanwhile
            logger.warning(f"lost another rank while recovering: {error}")
            continue
        if former[runtime.current().world.rank] == min(rank for rank in former if rank >= 0):
            lost, joins = sorted({*range(old.world.size)} - {*former}), old.context.loss == JOINS
            who = f"; lost {'are ranks' if len(lost) > 1 else 'is rank'} {', '.join(map(str, lost))}"
            several = who if len(lost) > (0 if joins else 1) else ""  # the reason is of one, or of none
            kind = "new" if respawning.limit() else "spare"
            fresh = f"; a {kind} rank is now rank {former.index(-1)}" if -1 in former else ""
            of = "" if joins else f" of {old.world.size}"
            logger.warning(f"continuing on {len(former)}{of} ranks: {old.context.loss}{several}{fresh}")
        _recovered_seconds = time.monotonic()
        return former


def why_not() -> str:
    """Return why the present job ends when a rank is lost, and what to do instead; '' if it may continue."""
    running = runtime.current()
    if running.context.raises_lost_ranks:
        return ""
    problem = mpi_library.why_no_recovery(running.MPI)
    return problem or (
        "it needs start(config=Config(on_lost_rank='raise')), or TORCHMPI_ON_LOST_RANK=raise: without it, the job ends "
        "when a rank is lost."
    )


def has_recovered() -> bool:
    """Return whether this rank has got its number after a loss, so that variables of the launcher have another one."""
    return _recovered_seconds > 0 or respawning.is_newcomer()


def is_rank_lost() -> bool:
    """Return whether a rank is lost, after a call has failed; the library may learn of it a moment later."""
    if not runtime.is_running():
        return False
    context = runtime.current().context
    if context.raises_lost_ranks and not context.loss and mpi_library.loss_behind_error():
        context.await_loss()
    return context.raises_lost_ranks and bool(context.loss)


def confirm() -> bool:
    """Return if all ranks are here and none is lost, so that all results of this rank are right; raise otherwise.

    An MPI library may have returned from a call without an error although a rank had been lost. Collective. The result
    is whether a new rank waits to join.
    """
    running = runtime.current()
    if loss := running.context.loss:
        raise RankLostError(f"{loss}, before a copy of the state.")
    return running.world.call_action("confirm", mpi_library.abilities(running.MPI).confirm)


@contextmanager
def copying() -> Iterator[None]:
    """Confirm that no rank is lost, let the caller copy the state, and let a new rank join if one waits. Collective.

    Raises:
        RankLostError: A rank is lost; or, after the copy, one joins, which ends all calls as a loss does.
    """
    waits = confirm()
    yield
    if waits:
        raise RankLostError(f"{mpi_library.abilities(runtime.current().MPI).join()}. Continue with recover().")


def begin_again() -> None:
    """Begin a loop together, by a call that only loops make: a spare rank that calls anything else is refused.

    Collective.

    Raises:
        TorchMPIError: All ranks that had a state are lost.
    """
    world = runtime.current().world
    have_state = world.call_action("begin_again", partial(world.comm.allgather, not is_newcomer()))
    if not any(have_state):
        raise TorchMPIError(
            f"rank {world.rank}: all ranks that had a state are lost; those in their places have got none. Start again "
            "from a checkpoint."
        )


def is_newcomer() -> bool:
    """Return whether this rank has just taken the place of a lost rank, as a spare or a new one, and has no state."""
    return mpi_library.abilities(runtime.current().MPI).is_newcomer


def note_state() -> None:
    """Note that this rank has got the state of the others."""
    mpi_library.abilities(runtime.current().MPI).is_newcomer = False
