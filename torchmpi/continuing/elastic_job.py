"""``elastic()``: a loop of the program that continues from its last commit after a rank is lost."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from torch import nn

from .. import collectives
from ..errors import ArgumentError, rank_prefix
from ..log import logger
from ..nn import synchronize_parameters
from ..session import api, recovery
from ..tensors import random_states, streams
from . import attempts
from .numbered_copies import NumberedCopies

__all__ = ["elastic"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_calls = itertools.count(1)


@dataclass(frozen=True)
class _Commit:
    """A copy of the state: what all ranks have in common, and the random states of all of them."""

    values: dict[str, Any]
    random: list[dict[str, Any]]
    ranks: tuple[int | None, ...]
    """Whose random state each present rank takes; None if it keeps its own."""


class ElasticJob:
    """The state of a loop, which :func:`elastic` passes to its function: each value is an attribute."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(_names=frozenset(values), _copies=NumberedCopies[_Commit](), _call=next(_calls), **values)

    def __getattr__(self, name: str) -> Any:
        """Refuse an attribute that does not exist."""
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names:
            self._refuse(name)
        vars(self)[name] = value

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{rank_prefix()}this job has no {name!r}, which a commit would not copy. Pass it to mpi.elastic(); it has "
            f"{', '.join(sorted(vars(self)['_names'])) or 'nothing'}."
        )

    def commit(self) -> None:
        """Copy the state in memory: after a loss, all ranks begin again at the last commit. Collective.

        The copy has the values of the job and the random states of Python, NumPy and torch on all ranks. A good moment
        is after a step of the optimizer, when gradients are not needed any more: they are not copied.

        Raises:
            RankLostError: A rank is lost; for :func:`elastic`, not for the program.
        """
        for module in self._modules():
            for parameter in itertools.islice(module.parameters(), 1):
                # A call on a device that was aborted, because a rank is lost, has left undefined values.
                streams.settle(parameter)
        random = collectives.allgather_object(random_states.capture(api.device()))
        with recovery.copying():
            values = {name: copy.deepcopy(_state(value)) for name, value in self._values().items()}
            self._copies.add(_Commit(values, random, tuple(range(api.size()))))

    # --- for elastic()

    def _begin(self) -> None:
        """Give all ranks the state of the last commit, or at first that of rank 0. Collective."""
        recovery.begin_again()
        calls = collectives.allgather_object(self._call)
        if len(set(calls)) > 1:
            raise ArgumentError(
                f"rank {api.rank()}: the ranks are in different calls of functions of mpi.elastic(): {calls}. A spare "
                "rank begins with the first one, so a program with spare ranks has one such call."
            )
        commit = self._copies.agree(collectives.allgather_object, collectives.broadcast_object, api.rank())
        if commit is None:
            self._take_those_of_rank_0()
        else:
            self._restore(commit)
        recovery.note_state()
        if commit is None:
            self.commit()
        elif api.rank() == 0:
            logger.info("continuing from the last commit")

    def _renumber(self, former: tuple[int, ...]) -> None:
        """Note the new numbers of the ranks, given the result of ``recover()``."""
        self._copies.change(lambda commit: replace(commit, ranks=renumbered(commit.ranks, former)))

    def _take_those_of_rank_0(self) -> None:
        for name, value in self._values().items():
            if isinstance(value, nn.Module):
                synchronize_parameters(value)
            else:
                self._load(name, collectives.broadcast_object(_state(value)))

    def _restore(self, commit: _Commit) -> None:
        for name, value in commit.values.items():
            self._load(name, copy.deepcopy(value))
        for module in self._modules():
            module.zero_grad(set_to_none=True)  # those of the step that has failed
        if (rank := commit.ranks[api.rank()]) is not None:
            random_states.restore(commit.random[rank], api.device())

    def _load(self, name: str, state: Any) -> None:
        value = vars(self)[name]
        if _is_stateful(value):
            value.load_state_dict(state)
        else:
            vars(self)[name] = state

    def _values(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in sorted(self._names)}

    def _modules(self) -> list[nn.Module]:
        return [value for value in self._values().values() if isinstance(value, nn.Module)]


def renumbered(ranks: tuple[int | None, ...], former: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the entries of the present ranks, given those of the former ones; newcomers get those of lost ranks.

    >>> renumbered((0, 1, 2), (0, 2)), renumbered((0, 1, 2), (0, -1, 2)), renumbered((3, 4, 5, 6), (-1, 2))
    ((0, 2), (0, 1, 2), (3, 5))
    >>> renumbered((0, 2), (0, 1, -1))
    (0, 2, None)
    """
    lost = (ranks[rank] for rank in range(len(ranks)) if rank not in former)
    return tuple(next(lost, None) if rank < 0 else ranks[rank] for rank in former)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value


def elastic(
    *, timeout: float = 60.0, **state: Any
) -> Callable[[Callable[Concatenate[ElasticJob, _P], _T]], Callable[_P, _T]]:
    """Decorate a function that trains, so that the remaining ranks call it again when a rank is lost.

    It needs the setting ``on_lost_rank="raise"``. The function gets a job, whose attributes are the values of `state`,
    and calls ``job.commit()`` now and then, for instance after each epoch or every 100 steps: that copies the state.
    The first call begins with the values of rank 0. After a loss, all ranks return to the last commit, also a spare
    rank that has taken the place of the lost one, and the function is called again. What depends on ``mpi.rank()`` and
    ``mpi.size()`` belongs into it: the part of the data, groups, ``DistributedDataParallel``; and so do collectives.

    Args:
        timeout: How many seconds to wait for remaining ranks that do not come.
        **state: The values. Of an object with ``state_dict()`` and ``load_state_dict()``, such as a module, an
            optimizer, a scheduler or a sampler, a commit copies the state dict, and the object remains the same; any
            other value, such as the number of steps, is copied and replaced.

    Returns:
        A decorator. The function that it returns takes the arguments that follow the job, and is collective.

    Raises:
        ArgumentError: A name is that of a method; or, by the decorated function, the job ends when a rank is lost,
            because of the setting or of the MPI library.
        RankLostError: By the decorated function: the other ranks continue without this one, or too few are left.
        StallError: By the decorated function: a remaining rank has not come in time.

    Example:
        ::

            mpi.start()  # torchmpi run --on-lost-rank continue

            @mpi.elastic(model=model, optimizer=optimizer, step=0)
            def train(job):
                while job.step < 1000:
                    optimizer.zero_grad()
                    loss(model, data[job.step][mpi.rank() :: mpi.size()]).backward()
                    mpinn.synchronize_gradients(model)
                    optimizer.step()
                    job.step += 1
                    if job.step % 50 == 0:
                        job.commit()

            train()
    """
    taken = [name for name in state if hasattr(ElasticJob, name) or name.startswith("_")]
    if taken:
        raise ArgumentError(f"{rank_prefix()}elastic({taken[0]}=...): the job has an attribute of this name already.")

    def decorate(function: Callable[Concatenate[ElasticJob, _P], _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*arguments: _P.args, **options: _P.kwargs) -> _T:
            if problem := recovery.why_not():
                raise ArgumentError(f"rank {api.rank()}: elastic(): {problem}")
            job = ElasticJob(state)
            attempt = partial(function, job, *arguments, **options)
            return attempts.repeat(job._begin, attempt, job._renumber, timeout)

        return run

    return decorate
