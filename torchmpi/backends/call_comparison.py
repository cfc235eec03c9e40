"""Comparison of the calls of a group over several hosts: within each host in shared memory, then between the hosts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..communicators import splits
from ..communicators.call_log import CallNumber
from ..communicators.group import Group
from ..communicators.plan import Backends
from ..errors import MismatchError
from .base import Backend, Operation, bind, refusal
from .hierarchical.steps import StepRunner
from .number_exchange import NumberExchange, most_carried, most_together

_DIFFERENT = 0
"""Passed on instead of the number of the call by a rank that has heard of a difference."""


class CallComparison:
    """Three steps: within each host, between the first ranks of the hosts, and within each host again.

    The calls of a step within a host are compared by its kernels, with the number of the call of the whole group in
    place of a shape. A rank that finds a difference takes part in the remaining steps with another number, so that all
    other ranks find it too and none waits. Where each rank is on its own host, or the ranks of a host share no memory,
    all ranks take part in the step between.

    Attributes:
        in_steps: Whether there are steps within the hosts.
        intra: The group of these steps; None if this rank takes no part in them.
        exchange: The messages between the hosts; None if this rank sends none.
        split: The hosts that send messages, each of one rank if there are no steps within hosts.
        most_carried: The size of the longest vectors that are sent between the hosts in the messages of a comparison,
            to be combined.
        most_together: The size of all blocks of rows together that are sent in them.
        scratch: Memory of this rank for such blocks.
    """

    def __init__(self, group: Group, shared: Backend, network: Backend) -> None:
        """Prepare the comparison for a group.

        Args:
            group: The group.
            shared: The backend for ranks that share memory.
            network: The backend for the ranks of a host that do not.
        """
        self._shared, self._network = shared, network
        num_hosts = len(group.placement.groups)
        self.in_steps = num_hosts not in (1, group.size) and refusal(shared, "barrier", "cpu") is None
        self.intra = group.intra_host if self.in_steps else None
        sends = not self.in_steps or group.placement.members[group.rank].intra_rank == 0
        between = group.inter_host if self.in_steps else group
        self.exchange = NumberExchange(group.context.MPI, between.comm) if sends and between is not None else None
        self.split = group.placement if self.in_steps else splits.plan_split(range(group.size), cartesian=False)
        size = len(self.split.groups)
        self.most_carried = most_carried(size, in_steps=self.in_steps)
        self.most_together = most_together(size)
        self.scratch = np.empty(max(self.most_carried, self.most_together), np.uint8)
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

    def agree(self, number: int) -> bool:
        """Return whether all ranks pass the same number. Collective."""
        return self.run(number, self._wait, lambda exchange, number: exchange.agree(number), self._wait)

    def run(
        self,
        number: int,
        before: Callable[[], object],
        between: Callable[[NumberExchange, int | None], bool],
        after: Callable[[], object],
    ) -> bool:
        """Compare a number in the steps of a call, and return whether it is the same on all ranks. Collective.

        `before` and `after` run a step within the host, if this rank has one. ``between(exchange, number)`` exchanges the number between the
        hosts, in which None differs from all others, and returns whether it is equal.
        """
        is_equal = self._step(number, before)
        if self.exchange is not None:
            is_equal = between(self.exchange, number if is_equal else None)
        if is_equal:
            is_equal = self._step(number, after)
        else:
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
        if self.intra is not None:
            self._waiting.run(self.intra, "barrier", None)
