"""The calls of torch.distributed that are calls of torchmpi: on which rows, by which plan, by which machine code.

A call on plain host tensors is a :class:`BoundCall`, made once for each operation, dtype and root: the plan of the
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
from ..communicators.call_queue import LeftToHelper
from ..communicators.communicator import Communicator
from ..communicators.handle import Handle
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..session import runtime
from ..shared_memory import fast_path
from ..shared_memory.kernels.records import FLAT
from ..tensors import buffers
from ..timeline import events
from .rows import Rows, deliver, empty_rows, packed


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
    "all_to_all": Form("exchange_parts", "exchange"),
    "all_to_all_single": Form("exchange_parts", "alltoall"),
    "barrier": Form("barrier", "barrier"),
}
"""By the name in torch."""


class BoundCall:
    """A call on plain host tensors of one dtype, with one operation and root.

    Attributes:
        code: Its machine code.
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
        self._communicator, self._group, self._dtype, self._root = communicator, group, dtype, root
        self._description = f"{group.where}: {name}"
        self.num_rows = form.num_rows(group.size)
        self.takes_parts = spec.divides and spec.gathers
        if self.takes_parts:
            assert dtype is not None
            self._plan = exchange.rows_plan(group, dtype)
        else:
            self._plan = dispatch.plan_for(communicator, PlanKey(form.collective, op, dtype, PLAIN))
        self.changes = spec.changes(root == group.rank)
        self._announces = spec.only_root_passes
        is_other = spec.is_rooted and root != group.rank and form.fast_path_of_others
        which = form.fast_path_of_others if is_other else form.fast_path
        self.code = dispatch.BoundCode(group, which, dtype, self._cached_call)
        self.by_messages = group.size > 1 and group.status_board is None
        has_code = self._cached_call() is not None
        keeps_own_row = spec.gathers and not (spec.divides or spec.is_rooted)
        self._takes_own_row = has_code and keeps_own_row and group.shared is not None

    def can_use(self, given: Rows, received: Rows) -> bool:
        """Return whether a call can use the memory of its tensors: they share none, or the row of this rank.

        In shared memory an allgather writes nothing else to that row of the result.
        """
        if isinstance(given, list) or isinstance(received, list):
            return _are_apart(given, received)
        if given.dtype is not received.dtype:
            return False
        own = received.data_ptr() + self._group.rank * given.nbytes
        return (self._takes_own_row and given.data_ptr() == own) or not buffers.overlap(given, received)

    def run(self, given: Rows | None, received: Rows | None) -> None:
        if self.code.run(given, received) is None:
            runtime.current()  # raises in a forked child
            self.code.cache()
            self._group.call_queue.run(self._perform, given, received, describe=self._describe)

    def run_fast(self, given: Rows | None, received: Rows | None) -> bool:
        """Run the call in this thread if machine code can do it; return whether it has."""
        if self.code.run(given, received) is not None:
            return True
        self.code.cache()
        return False

    def submit(self, given: Rows | None, received: Rows | None) -> Handle[Any]:
        """Run the call in the background."""
        runtime.current()  # raises in a forked child
        in_any_thread = not self.by_messages or fast_path.takes_calls()
        return self._group.call_queue.submit(
            partial(self.run_queued, given, received),
            self._description,
            call=partial(self._describe, given, received),
            in_any_thread=in_any_thread,
        )

    def run_queued(self, given: Rows | None, received: Rows | None) -> Any:
        """Run the call in a thread that holds the run lock."""
        result = self.code.run(given, received)
        if result is None:
            self.code.cache()
            if self.by_messages and self._group.call_queue.is_run_by_waiter:
                raise LeftToHelper
            result = self._perform(given, received)
        return result

    def _perform(self, given: Rows | None, received: Rows | None) -> Any:
        """Run the call in Python; the caller holds the run lock."""
        plan = self._plan_for(received)
        return self._on_rows(partial(self._group.perform, plan), given, received)

    def _on_rows(self, perform: Callable[..., Any], given: Rows | None, received: Rows | None) -> Any:
        """Return ``perform(source, target, root)``, with the tensors of lists copied to rows and from there."""
        if self.takes_parts and isinstance(given, list) and isinstance(received, list):
            return perform(given, received, self._root)
        source = packed(given, self.num_rows[0]) if isinstance(given, list) else given
        target = empty_rows(received, self.num_rows[1]) if isinstance(received, list) else received
        result = perform(source, target, self._root)
        if isinstance(received, list):
            assert target is not None
            deliver(target, received)
        return result

    def _describe(self, given: Rows | None, received: Rows | None) -> events.ShownCall:
        return self._group.described_call(self._plan_for(received), given, received, self._root)

    def _plan_for(self, received: Rows | None) -> Plan:
        """Return the plan; that of a scatter compares what all ranks receive, which native ones need not know."""
        runtime.current()  # raises in a forked child
        if not self._announces:
            return self._plan
        assert isinstance(received, torch.Tensor)
        return self._plan.announcing(received.dtype, received.numel())

    def _cached_call(self) -> fast_path.CachedCall | None:
        plan = self._plan
        if plan.cached_call is None:
            return None
        cached: fast_path.CachedCall | None = plan.cached_call(self._root, None)
        if cached is None:
            return None
        if self._announces and self._dtype is not None:
            # Over hosts the code has the dtype.
            announced = 0 if self.by_messages else plan.code ^ plan.announcing(self._dtype).code
            cached = cached._replace(
                code=cached.code ^ announced, signed_code=cached.signed_code ^ announced, first_dim=1
            )
        settle = partial(self._settle, cached.settle)
        return cached._replace(rows=self.num_rows, settle=settle)

    def _settle(self, settle: Callable[..., Any], status: int, given: Rows, received: Rows | None) -> Any:
        """Continue after a kernel that returned a status, with copies in the place of lists."""
        if not (isinstance(given, list) or isinstance(received, list)):
            return settle(status, given, received)
        result = self._on_rows(lambda source, target, root: settle(status, source, target), given, received)
        return received if isinstance(received, list) else result


def _are_apart(given: Rows, received: Rows) -> bool:
    """Return whether received tensors share memory neither with given ones nor with each other."""
    given, received = (each if isinstance(each, list) else [each] for each in (given, received))
    passed = {id(each): each for each in given}.values()
    return not buffers.overlap_of_any([*received, *passed])
