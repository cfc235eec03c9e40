"""Bound calls: a plan with a root, and the machine code that repeats its calls, now or in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..collective_specs import SPECS, CollectiveSpec
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.plan import Plan
from ..session import runtime
from ..shared_memory import fast_path
from ..shared_memory.kernels.kernel_sets import COLLECTIVES as KERNELS
from ..tensors import partition
from ..tensors.modes import get_tracing_state
from ..timeline import events

FAST_PATHS = KERNELS.fast_paths


class BoundCall:
    """The calls of a plan with one root on tensors of one dtype; made by any thread whose turn it is in the call queue.

    Machine code runs those that it can, and Python the others, which is slower and has the same results. The address of
    the object is the key by which machine code finds the cached call. Cached calls refer to it, to begin asynchronous
    ones.

    Attributes:
        group: The group of the calls.
        plan: Their plan.
        root: The root.
        entry: Machine code that makes a call, with the arguments of `find`; it returns None if Python must make it.
        find: Machine code that looks at the tensors of a call: it takes them, the bound call, the group and None, and
            returns the bound call if the call can begin without a check of them, else None.
        num_rows: As how many rows machine code takes the tensors that a rank passes and receives, whatever their
            shapes; 0: as they are (see `given_rows` in :class:`~torchmpi.shared_memory.kernels.records`).
    """

    num_rows: tuple[int, int] = (0, 0)

    def __init__(
        self,
        group: Group,
        plan: Plan,
        which: str = "",
        dtype: torch.dtype | None = None,
        root: int = 0,
        *,
        name: str = "",
    ) -> None:
        """Bind a plan to the fast path `which`, '' if Python runs all calls; `name`: the call in messages."""
        self.group, self.plan, self.root = group, plan, root
        self._which, self._dtype = which, dtype
        self._description = f"{group.where}: {name or plan.collective}"
        collective = which.removesuffix(fast_path.MADE)
        self.entry, self.find = fast_path.entry(which), fast_path.finder(which)
        if collective != which:
            self.entry = partial(_with_memory, self.entry, SPECS[collective], group)
        self._has_result = collective in FAST_PATHS and FAST_PATHS[collective].writes

    def run(self, given: Any, out: Any, subject: object = None) -> Any:
        """Run a call in the order of the calls; `subject` is as for the call queue."""
        result = self.run_fast(given, out)
        if result is None:
            runtime.current()  # raises in a forked child
            run, describe = self.run_through_python, self.described_call
            result = self.group.call_queue.run(run, given, out, subject=subject, describe=describe)
        return result

    def run_fast(self, given: Any, out: Any) -> Any:
        """Run a call in this thread by machine code; return None if Python must run it."""
        return self.entry(given, out, self, self.group, None)

    def run_through_python(self, given: Any, out: Any) -> Any:
        """Run a call, and let machine code run the next one, if it can. The caller holds the run lock."""
        self.cache()
        return self.perform(given, out)

    def begin(
        self, given: Any, out: Any, finish: Callable[[Any], Any] | None = None, subject: object = None
    ) -> Handle[Any]:
        """Begin a call with checked tensors; `finish` converts its result, `subject` is as for the call queue."""
        return self.group.call_queue.submit(
            partial(self.run_queued, given, out, finish),
            self._description,
            subject,
            call=partial(self.described_call, given, out),
            in_any_thread=not self.plan.is_on_device,
        )

    def run_queued(self, given: Any, out: Any, finish: Callable[[Any], Any] | None = None) -> Any:
        """Run a call in a thread that holds the run lock; `finish` converts its result."""
        result = self.entry(given, out, self, self.group, None)  # run_fast() without a call
        if result is None:
            result = self.run_through_python(given, out)
        elif not self._has_result:
            result = None
        return result if finish is None else finish(result)

    def cache(self) -> None:
        """Let machine code run the next call, if it can."""
        if self._which:
            fast_path.cache_call(self._which, fast_path.Name(self, self._dtype, self.group), self._cached_call)

    def _cached_call(self) -> fast_path.CachedCall | None:
        cached = None if self.group.call_queue.closed else self.cached_call()
        return None if cached is None else cached._replace(rows=self.num_rows, bound=self)

    # A call of another form differs in these:

    def cached_call(self) -> fast_path.CachedCall | None:
        """Return the call for machine code; None if it cannot run it."""
        find = self.plan.cached_call
        return None if find is None or not self._which else find(self.root, None)

    def perform(self, given: Any, out: Any) -> Any:
        """Run a call in Python; the caller holds the run lock."""
        return self.group.perform(self.plan, given, out, self.root)

    def described_call(self, given: Any, out: Any) -> events.ShownCall:
        """Return what the profiler shows of a call."""
        return self.group.described_call(self.plan, given, out, self.root)


def _with_memory(entry: Callable[..., Any], spec: CollectiveSpec, group: Group, given: Any, _: None, *rest: Any) -> Any:
    """Run a call by machine code into memory that is made for its result."""
    return entry(given, memory_for_result(spec, group, given), *rest)


def memory_for_result(spec: CollectiveSpec, group: Group, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return memory for the rows of this rank, if all ranks pass as many; None in torch.jit.trace, which is refused."""
    if get_tracing_state() is not None:
        return None
    num_rows, *row = tensor.shape or (1,)  # a 0-dim tensor is one row
    if spec.divides:
        num_rows = partition.part_of(num_rows, group.size, group.rank)[1]
    return tensor.new_empty((num_rows * group.size if spec.gathers else num_rows, *row))
