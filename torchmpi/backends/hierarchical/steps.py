"""Running the steps of a collective on groups, chunk by chunk.

A plan (:func:`torchmpi.communicators.splits.steps_for`) names the steps of a collective: a flat collective and the
group on which it runs. :class:`StepSequence` runs a plan, in two configurations: the levels of a span
(:mod:`.spans`) and the hosts of a group (:mod:`.host_collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from ...collective_specs import SPECS
from ...communicators import splits
from ...communicators.call_log import call_code
from ...communicators.group import Group
from ...communicators.handle import Handle
from ...communicators.plan import Backends, Plan, Shape, no_shape
from ...shared_memory import fast_path
from ...tensors import dtypes, partition
from ...tensors.operation_specs import OPERATIONS
from ..base import Operation
from ..pipeline import ChunkBuffers, run_pipelined
from ..rank_order import PartialResults

BindStep = Callable[[Group, str, torch.dtype | None, str | None, str], tuple[Operation, Backends]]
"""``bind_step(group, collective, dtype, op, device_type)``: a flat collective by the backends of the group."""

RunStep = Callable[..., Any]
"""``run_step(group, collective, source, destination=None, root=0)``: :meth:`StepRunner.run` or `perform`."""

Phases = tuple[tuple[splits.Step, ...], splits.Step | None, tuple[splits.Step, ...]]

GroupsByLevel = Mapping[tuple[int, str], Group | None]
"""The groups of a plan by level and kind (``intra`` or ``inter``); None where this rank is in no such group."""


class StepRunner:
    """Runs flat collectives on groups as the steps of one collective."""

    def __init__(
        self,
        op: str | None,
        bind_step: BindStep,
        *,
        variant: Hashable = None,
        shape_of: Callable[[Any], Shape] | None = None,
    ) -> None:
        """Create a runner.

        `variant` distinguishes runners whose `bind_step` selects different backends, or with a `shape_of`, which
        replaces the shape that the ranks of a step compare.
        """
        self._op = op and OPERATIONS[op].partial  # an average is divided once, at the end
        self._bind_step, self._variant, self._shape_of = bind_step, variant, shape_of

    def run(self, group: Group, collective: str, source: Any, destination: Any = None, root: int = 0) -> Any:
        """Run a step in the order of the group's call queue."""
        tensor = destination if source is None else source
        plan = self._plan(group, collective, source, destination)
        return group.call_queue.run(group.perform, plan, source, destination, root, subject=tensor)

    def perform(self, group: Group, collective: str, source: Any, destination: Any = None, root: int = 0) -> Any:
        """Run a step within a task of the group's call queue."""
        return group.perform(self._plan(group, collective, source, destination), source, destination, root)

    def start(self, group: Group, task: Callable[[RunStep], Any], *, in_background: bool) -> Handle[Any] | None:
        """Run a task of several steps on one group, now or in its call queue."""
        if in_background:
            return group.call_queue.submit(partial(task, self.perform), f"{group.where}: {group.name}")
        task(self.run)
        return None

    def cached_call(self, group: Group, collective: str, tensor: torch.Tensor) -> fast_path.CachedCall | None:
        """Return a step with root 0 on tensors like this one for the fast path; None if it cannot run the step."""
        cached_call = self._plan(group, collective, tensor, None).cached_call
        return None if cached_call is None else cached_call(0, None)

    def _plan(self, group: Group, collective: str, source: Any, destination: Any) -> Plan:
        tensor = destination if source is None else source
        dtype, device_type = (None, "cpu") if tensor is None else (tensor.dtype, tensor.device.type)
        op = self._op if SPECS[collective].reduces else None
        key = ("step", collective, op, dtype, device_type, self._variant)
        plan: Plan | None = group.plans.get(key)
        if plan is None:
            # Steps over hosts need no shape: the ranks have compared the whole call. Over a span that message may be
            # switched off, and the groups within a host compare without one.
            whole_shape = self._variant is not None and SPECS[collective].compared == "shape"
            shape_of = self._shape_of or (None if whole_shape else no_shape)
            code = call_code(collective, op, dtypes.info(dtype).code if dtype is not None else 0)
            operation, backends = self._bind_step(group, collective, dtype, op, device_type)
            plan = group.plans[key] = Plan(collective, code, operation.run, shape_of)
            plan.backends, plan.cached_call = backends, operation.cached_call
        return plan


class StepSequence:
    """Barrier, broadcast, reduce or allreduce in place: a plan of steps, run for each chunk of the tensor.

    One step of a plan, the last reduction or the first step between groups, may run in the background while the other
    steps work on other chunks.
    """

    def __init__(
        self,
        collective: str,
        rank: int,
        groups: GroupsByLevel,
        plan: Callable[[int], tuple[splits.Step, ...]],
        runner: StepRunner,
        *,
        partial_results: PartialResults | None = None,
        chunk_numel: int | None = None,
        sum_across: Callable[[RunStep, Group, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Prepare a sequence.

        `plan` returns the steps for a root, `partial_results` belongs to reductions, `chunk_numel` None is one chunk
        on any device. `sum_across` replaces the last step of an allreduce: ``sum_across(run_step, group, total, out)``.
        """
        self.collective, self.rank, self.groups, self.runner = collective, rank, groups, runner
        self.spec = SPECS[collective]
        self.partial_results, self.chunk_numel = partial_results, chunk_numel
        self.sum_across = sum_across or self._sum_across
        self.work: ChunkBuffers | None = None
        if partial_results is not None and chunk_numel is not None:
            self.work = ChunkBuffers(partial_results.accumulator)
        self.phases = lru_cache(maxsize=None)(lambda root: _phases(collective, plan(root)))

    def run(self, buffer: torch.Tensor | None, _: Any, root: int) -> torch.Tensor | None:
        """Run the steps on a contiguous tensor."""
        before, middle, after = self.phases(root)
        chunks = chunks_of(buffer, self.chunk_numel)
        works: dict[int, torch.Tensor | None] = {}

        def run_before(k: int) -> None:
            works[k] = self._work_for(chunks[k], k)
            self._run(before, works[k])

        def start_middle(k: int) -> Handle[Any] | None:
            if middle is None:
                return None
            in_background = len(chunks) > 1 and middle.group == "inter"
            task = partial(self._run_middle, middle, works[k], chunks[k])
            return self.runner.start(self._group(middle), task, in_background=in_background)

        def run_after(k: int) -> None:
            work, chunk = works.pop(k), chunks[k]
            self._run(after, chunk if self.spec.reduces_to_all else work)
            if self.spec.reduces_to_root and self.rank == root:
                assert self.partial_results is not None and work is not None and chunk is not None
                self.partial_results.finish(work, chunk)

        run_pipelined(len(chunks), run_before, start_middle, run_after)
        return buffer

    def _group(self, step: splits.Step) -> Group:
        group = self.groups[step.level, step.group]
        assert group is not None  # a plan contains only groups of this rank
        return group

    def _run(self, steps: tuple[splits.Step, ...], tensor: torch.Tensor | None) -> None:
        for step in steps:
            self.runner.run(self._group(step), step.collective, tensor, None, step.root or 0)

    def _run_middle(
        self, step: splits.Step, work: torch.Tensor | None, chunk: torch.Tensor | None, run_step: RunStep
    ) -> None:
        if SPECS[step.collective].reduces_to_all:
            assert work is not None and chunk is not None
            self.sum_across(run_step, self._group(step), work, chunk)
        else:
            run_step(self._group(step), step.collective, work, None, step.root or 0)

    def _sum_across(self, run_step: RunStep, group: Group, total: torch.Tensor, out: torch.Tensor) -> None:
        assert self.partial_results is not None
        run_step(group, "allreduce", total)
        self.partial_results.finish(total, out)

    def _work_for(self, chunk: torch.Tensor | None, k: int) -> torch.Tensor | None:
        """Return the memory of partial results: a copy if they are wider than the result, or not for other ranks."""
        partial_results = self.partial_results
        if chunk is None or partial_results is None or not (partial_results.is_rounded or self.spec.reduces_to_root):
            return chunk
        if self.work is None:
            return chunk.to(partial_results.accumulator, copy=True)
        return self.work.take(k, chunk.numel()).copy_(chunk)


def chunks_of(buffer: torch.Tensor | None, chunk_numel: int | None) -> list[Any]:
    """Cut a tensor into flat chunks; without a tensor (a barrier), return one chunk that is None."""
    if buffer is None:
        return [None]
    flat = buffer.detach().view(-1)
    chunks = partition.chunks(flat.numel(), chunk_numel or max(1, flat.numel()))
    return [flat[begin : begin + numel] for begin, numel in chunks]


def _phases(collective: str, steps: tuple[splits.Step, ...]) -> Phases:
    """Split a plan at the step that may run in the background.

    In an allreduce this is the last reduction, after which the result is rounded. Without such a step, the first step
    comes before and the others after: the ranks of a group must run their steps for all chunks in the same order.
    """
    if SPECS[collective].reduces_to_all:
        middles = [index for index, step in enumerate(steps) if SPECS[step.collective].reduces][-1:]
    else:
        middles = [index for index, step in enumerate(steps) if step.group == "inter"][:1]
    if not middles:
        return steps[:1], None, steps[1:]
    index = middles[0]
    return steps[:index], steps[index], steps[index + 1 :]
