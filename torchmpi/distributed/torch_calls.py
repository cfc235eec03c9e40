"""The calls of torch.distributed that are calls of torchmpi: on which rows, by which plan, by which machine code.

A call on plain host tensors is a :class:`TorchCall`, made once for each operation, dtype and root: the plan of the
native call, bound to the fast path that runs it. What is not plain is copied around the same plan
(:mod:`.process_group`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..collective_specs import SPECS
from ..collectives import dispatch, exchange
from ..collectives.bound_calls import BoundCall
from ..communicators.call_queue import LeftToHelper
from ..communicators.communicator import Communicator
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..shared_memory import fast_path
from ..shared_memory.kernels.records import FLAT
from ..tensors import buffers
from ..timeline import events
from .rows import Rows, as_rows, deliver, empty_rows, packed, parts_of


class Form(NamedTuple):
    """A collective of torch, as one of torchmpi."""

    collective: str
    """The row of its plan in :data:`~torchmpi.collective_specs.SPECS`, from which the numbers of rows follow."""
    fast_path: str
    fast_path_of_others: str = ""
    """That of the ranks other than the root, if they have one of their own."""

    def num_rows(self, size: int) -> tuple[int, int]:
        """Return of how many rows the tensors consist that a rank passes and receives; 0 if they are used as they are.

        FLAT is one dimension: the parts of an exchange may differ in length, and so are compared apart from the call.

        >>> FORMS["all_gather"].num_rows(4), FORMS["reduce_scatter"].num_rows(4), FORMS["all_reduce"].num_rows(4)
        ((1, 4), (4, 1), (0, 0))
        """
        spec = SPECS[self.collective]
        if spec.divides and spec.gathers:
            return FLAT, FLAT
        if not (spec.divides or spec.gathers):
            return 0, 0
        return size if spec.divides else 1, size if spec.gathers else 1


FORMS = {
    "all_reduce": Form("allreduce", "allreduce"),
    "reduce": Form("reduce", "reduce"),
    "broadcast": Form("broadcast", "broadcast"),
    "all_gather": Form("allgather", "allgather"),
    "gather": Form("gather", "gather", "give"),
    "scatter": Form("scatter", "scatter", "receive"),
    "reduce_scatter": Form("reduce_scatter", "reduce_scatter"),
    "all_to_all_single": Form("exchange_parts", "alltoall"),
    "barrier": Form("barrier", "barrier"),
}
"""By the name in torch."""


class TorchCall(BoundCall):
    """A call on plain host tensors of one dtype, with one operation and root.

    Attributes:
        num_rows: See :meth:`Form.num_rows`.
        takes_parts: Whether the tensors of lists may differ in length.
        changes: Whether it overwrites the tensor that this rank passes.
        by_messages: Whether a call through Python waits inside MPI, where it cannot be ended.
    """

    def __init__(
        self, communicator: Communicator, name: str, op: str | None, dtype: torch.dtype | None, root: int
    ) -> None:
        form, group = FORMS[name], communicator.intra
        spec = SPECS[form.collective]
        if spec.is_rooted:
            root = dispatch.check_root(group, root, name)
        is_other = spec.is_rooted and root != group.rank and form.fast_path_of_others
        which = form.fast_path_of_others if is_other else form.fast_path
        plan = dispatch.plan_for(communicator, PlanKey(form.collective, op, dtype, PLAIN))
        super().__init__(group, plan, which, dtype, root, name=name)
        self.num_rows = form.num_rows(group.size)
        self.takes_parts = spec.divides and spec.gathers
        self.changes = spec.changes(root == group.rank)
        self._announces = spec.only_root_passes
        self.by_messages = group.size > 1 and group.status_board is None
        keeps_own_row = spec.gathers and not (spec.divides or spec.is_rooted)
        self._takes_own_row = keeps_own_row and group.shared is not None and self.cached_call() is not None

    def can_use(self, given: Rows, received: Rows) -> bool:
        """Return whether a call can use the memory of its tensors: they share none, or the row of this rank.

        In shared memory an allgather writes nothing else to that row of the result.
        """
        if isinstance(given, list) or isinstance(received, list):
            return _are_apart(given, received)
        if given.dtype is not received.dtype:
            return False
        own = received.data_ptr() + self.group.rank * given.nbytes
        return (self._takes_own_row and given.data_ptr() == own) or not buffers.overlap(given, received)

    def perform(self, given: Rows | None, out: Rows | None) -> Any:
        """Run the call in Python; the caller holds the run lock."""
        if self.by_messages and self.group.call_queue.is_run_by_waiter:
            raise LeftToHelper
        if self.takes_parts and given is not None and out is not None:
            exchange.exchange(self.group, parts_of(given, self.group.size), parts_of(out, self.group.size))
            return out
        return self._on_rows(partial(self.group.perform, self._plan_for(out)), given, out)

    def _on_rows(self, perform: Callable[..., Any], given: Rows | None, received: Rows | None) -> Any:
        """Return ``perform(source, target, root)`` with rows; the tensors of lists are copied to and from them."""
        num_given, num_received = self.num_rows
        source, target = given, received
        if isinstance(given, list):
            source = packed(given, num_given)
        elif given is not None and num_given:
            source = as_rows(given, num_given)
        if isinstance(received, list):
            target = empty_rows(received, num_received)
        elif received is not None and num_received:
            target = as_rows(received, num_received)
        result = perform(source, target, self.root)
        if isinstance(received, list):
            assert isinstance(target, torch.Tensor)
            deliver(target, received)
        return result

    def described_call(self, given: Rows | None, out: Rows | None) -> events.ShownCall:
        """Return what the profiler shows of a call."""
        return self.group.described_call(self._plan_for(out), given, out, self.root)

    def _plan_for(self, received: Rows | None) -> Plan:
        """Return the plan; that of a scatter compares what all ranks receive, which native ones need not know."""
        if not self._announces:
            return self.plan
        assert isinstance(received, torch.Tensor)
        return self.plan.announcing(received.dtype, received.numel())

    def cached_call(self) -> fast_path.CachedCall | None:
        """Return the call for machine code; None if it cannot run it."""
        cached = super().cached_call()
        if cached is None:
            return None
        if self._announces and self._dtype is not None:
            announced = self.plan.code ^ self.plan.announcing(self._dtype).code
            # Over hosts the signature is the hash of the shape alone.
            signed_code = cached.signed_code ^ (0 if self.by_messages else announced)
            cached = cached._replace(code=cached.code ^ announced, signed_code=signed_code, first_dim=1)
        return cached._replace(settle=partial(self._settle, cached.settle))

    def _settle(self, settle: Callable[..., Any], status: int, given: Rows, received: Rows | None) -> Any:
        """Continue after a kernel that returned a status, with copies in the place of lists."""
        are_lists = isinstance(given, list), isinstance(received, list)
        if not any(are_lists) or (self.takes_parts and all(are_lists)):
            return settle(status, given, received)
        try:
            result = self._on_rows(lambda source, target, root: settle(status, source, target), given, received)
        except BaseException:
            for item in self.group.attachments:  # machine code has begun messages of the tensors, not of the copies
                item.keep(given, received)
            raise
        return received if isinstance(received, list) else result


def _are_apart(given: Rows, received: Rows) -> bool:
    """Return whether received tensors share memory neither with given ones nor with each other."""
    given, received = (each if isinstance(each, list) else [each] for each in (given, received))
    passed = {id(each): each for each in given}.values()
    return not buffers.overlap_of_any([*received, *passed])
