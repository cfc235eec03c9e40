"""Comparison of the calls of a group over several hosts: within each host in shared memory, then between the hosts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...communicators.call_log import CallNumber
from ...communicators.group import Group
from ...communicators.plan import Backends
from ...errors import MismatchError
from ..base import Backend, Operation, bind, refusal
from ..number_exchange import NumberExchange, can_carry
from .steps import StepRunner

_DIFFERENT = 0
"""Passed on instead of the number of the call by a rank that has heard of a difference."""


def comparison_for(group: Group, shared: Backend, network: Backend) -> HostComparison | NumberExchange:
    """Return the comparison for a group.

    Args:
        group: The group.
        shared: The backend for ranks that share memory.
        network: The backend for the ranks of a host that do not.
    """
    num_hosts = len(group.placement.groups)
    if num_hosts in (1, group.size) or refusal(shared, "barrier", "cpu") is not None:
        return NumberExchange(group.context.MPI, group.comm)
    return HostComparison(group, shared, network)


class HostComparison:
    """Three steps: within each host, between the first ranks of the hosts, and within each host again.

    The calls of a step within a host are compared by its kernels, with the number of the call of the whole group in
    place of a shape. A rank that finds a difference takes part in the remaining steps with another number, so that all
    other ranks find it too and none waits.
    """

    def __init__(self, group: Group, shared: Backend, network: Backend) -> None:
        self._shared, self._network = shared, network
        self.local, self.num_hosts = group.local, len(group.placement.groups)
        is_first = group.placement.members[group.rank].intra_rank == 0
        self.exchange: NumberExchange | None = None
        if is_first:
            assert group.across is not None
            self.exchange = NumberExchange(group.context.MPI, group.across.comm)
        self._number = CallNumber()
        self._waiting = self.runner(None)

    def runner(self, op: str | None) -> StepRunner:
        """Return a runner of steps within the host that belong to the current call."""
        return StepRunner(op, self._bind, variant="compared", shape_of=lambda _: self._number)

    def _bind(
        self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None, device_type: str
    ) -> tuple[Operation, Backends]:
        # Not by the selector: among kernels, any two calls that differ end with an error.
        has_memory = refusal(self._shared, collective, device_type, group) is None
        backend = self._shared if has_memory else self._network
        return bind(backend, group, collective, dtype, op), ((None, backend.name),)

    def can_carry(self, num_bytes: int) -> bool:
        """Return whether vectors of this size are sent between the hosts in the messages of a comparison."""
        return can_carry(num_bytes, self.num_hosts, in_steps=True)

    def agree(self, number: int) -> bool:
        """Return whether all ranks pass the same number. Collective."""
        return self.run(number, self._wait, self._exchange, self._wait)

    def run(
        self,
        number: int,
        before: Callable[[], object],
        between: Callable[[NumberExchange, int | None], bool],
        after: Callable[[], object],
    ) -> bool:
        """Compare a number in the steps of a call, and return whether it is the same on all ranks. Collective.

        `before` and `after` run a step within the host. ``between(exchange, number)`` exchanges the number between the
        hosts, in which None differs from all others, and returns whether it is equal.
        """
        is_equal = self.local is None or self._step(number, before)
        if self.exchange is not None:
            is_equal = between(self.exchange, number if is_equal else None)
        if self.local is not None and is_equal:
            is_equal = self._step(number, after)
        elif self.local is not None:
            self._step(_DIFFERENT, self._wait)
        return is_equal

    def _step(self, number: int, step: Callable[[], object]) -> bool:
        self._number = CallNumber((number,))
        try:
            step()
        except MismatchError:
            return False
        return True

    def _wait(self) -> None:
        assert self.local is not None
        self._waiting.run(self.local, "barrier", None)

    @staticmethod
    def _exchange(exchange: NumberExchange, number: int | None) -> bool:
        return exchange.agree(number)
