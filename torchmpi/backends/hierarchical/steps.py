"""Running the steps of a collective on groups, chunk by chunk.

A plan (:mod:`torchmpi.communicators.splits`) names the steps of a collective: a flat collective and the group on which
it runs. :class:`StepSequence` runs any plan: over the levels of a span (:mod:`.spans`), and over the hosts of a group
(:mod:`.host_collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ...collective_specs import SPECS
from ...communicators import splits
from ...communicators.call_codes import call_code
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

Steps = tuple[splits.Step, ...]

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

    def cached_call(
        self, group: Group, collective: str, tensor: torch.Tensor | None, root: int
    ) -> fast_path.CachedCall | None:
        """Return a step on tensors like this one for the fast path; None if it cannot run the step."""
        cached_call = self._plan(group, collective, tensor, None).cached_call
        return None if cached_call is None else cached_call(root, None)

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


class Part(NamedTuple):
    """The chunk, or a part of it, on which the next steps work."""

    total: Any
    """The values to reduce, and then the partial results."""
    out: Any
    """The memory of the result, which may be that of `total`."""


class StepSequence:
    """A collective whose steps are data: a plan, run for each chunk of the tensor.

    Reductions work on the partial results, and the other steps on results. A reduce-scatter leaves a part of the
    current part to the steps after it, and an allgather goes back to the larger one. After the last reduction, ranks
    that have the total divide an average and round it into the result. Where there are several chunks, the steps
    between groups run in the background, while those within groups work on other chunks.
    """

    def __init__(
        self,
        collective: str,
        rank: int,
        groups: GroupsByLevel,
        plan: Callable[[int, int], Steps],
        runner: StepRunner,
        *,
        partial_results: PartialResults | None = None,
        chunk_numel: int | None = None,
    ) -> None:
        """Prepare a sequence.

        ``plan(root, numel)`` returns the steps, `partial_results` belongs to reductions, `chunk_numel` None is one
        chunk on any device.
        """
        self.spec, self.rank, self.groups, self.plan, self.runner = SPECS[collective], rank, groups, plan, runner
        self.partial_results, self.chunk_numel = partial_results, chunk_numel
        self._memory: dict[tuple[int, torch.dtype], ChunkBuffers] = {}

    def run(self, buffer: torch.Tensor | None, _: Any, root: int) -> torch.Tensor | None:
        """Run the steps on a contiguous tensor."""
        before, between, after, last = phases(self.plan(root, 0 if buffer is None else buffer.numel()))
        chunks = chunks_of(buffer, self.chunk_numel)
        parts: dict[int, list[Part]] = {}

        def run_before(k: int) -> None:
            parts[k] = [self._whole(chunks[k], k, root)]
            self._run(before, last, parts[k], k, self.runner.run)

        def start_between(k: int) -> Handle[Any] | None:
            if not between:
                return None
            task = partial(self._run, between, last, parts[k], k)
            return self.runner.start(self._group(between[0]), task, in_background=len(chunks) > 1)

        def run_after(k: int) -> None:
            self._run(after, last, parts.pop(k), k, self.runner.run)

        run_pipelined(len(chunks), run_before, start_between, run_after)
        return buffer

    def _group(self, step: splits.Step) -> Group:
        group = self.groups[step.level, step.group]
        assert group is not None  # a plan contains only groups of this rank
        return group

    def _run(self, steps: Steps, last: splits.Step | None, parts: list[Part], k: int, run_step: RunStep) -> None:
        """Run steps on the last of the parts of a chunk, each of which is a part of the one before it."""
        for step in steps:
            group, spec, part = self._group(step), SPECS[step.collective], parts[-1]
            if spec.grows < 0:
                _, numel = partition.part_of(part.total.numel(), group.size, group.rank)
                parts.append(self._part(part.total, numel, k, len(parts)))
                run_step(group, step.collective, part.total, parts[-1].total)
            elif spec.grows > 0:
                parts.pop()
                run_step(group, step.collective, part.out, parts[-1].out)
            else:
                run_step(group, step.collective, part.total if spec.reduces else part.out, None, step.root or 0)
            if step is last and (not spec.reduces_to_root or step.root == group.rank):
                assert self.partial_results is not None
                self.partial_results.finish(*parts[-1])

    def _whole(self, chunk: torch.Tensor | None, k: int, root: int) -> Part:
        """Return a chunk and its partial results.

        These are a copy if they are wider than the result, or if the tensor remains as it is, on the other ranks of a
        reduce.
        """
        to_root = self.spec.reduces_to_root
        if chunk is None or self.partial_results is None or not (self.partial_results.is_rounded or to_root):
            return Part(chunk, chunk)
        part = self._part(chunk, chunk.numel(), k, 0)
        part.total.copy_(chunk)
        return part if to_root and self.rank != root else Part(part.total, chunk)

    def _part(self, like: torch.Tensor, numel: int, k: int, depth: int) -> Part:
        """Return memory for a part of a chunk, after `depth` reduce-scatters."""
        assert self.partial_results is not None
        total = self._take(self.partial_results.accumulator, like, numel, k, depth)
        is_rounded = self.partial_results.is_rounded
        return Part(total, self._take(self.partial_results.dtype, like, numel, k, depth) if is_rounded else total)

    def _take(self, dtype: torch.dtype, like: torch.Tensor, numel: int, k: int, depth: int) -> torch.Tensor:
        if self.chunk_numel is None:
            return torch.empty(numel, dtype=dtype, device=like.device)
        return self._memory.setdefault((depth, dtype), ChunkBuffers(dtype)).take(k, numel)


def chunks_of(buffer: torch.Tensor | None, chunk_numel: int | None) -> list[Any]:
    """Cut a tensor into flat chunks; without a tensor (a barrier), return one chunk that is None."""
    if buffer is None:
        return [None]
    flat = buffer.detach().view(-1)
    chunks = partition.chunks(flat.numel(), chunk_numel or max(1, flat.numel()))
    return [flat[begin : begin + numel] for begin, numel in chunks]


class Phases(NamedTuple):
    """The steps of a plan before, among and after those between groups, which may run in the background."""

    before: Steps
    between: Steps
    after: Steps
    last: splits.Step | None
    """The last step that reduces, after which the result is known."""


@cache
def phases(steps: Steps) -> Phases:
    """Split a plan at its steps between groups.

    Without such steps, the first step comes before: the ranks of a group must run their steps for all chunks in the
    same order.

    >>> tree = splits.plan_split("aab", cartesian=False)
    >>> [[step.collective for step in each] for each in phases(splits.steps_for("allreduce", 0, [tree]))[:3]]
    [['reduce'], ['allreduce'], ['broadcast']]
    """
    begin = next((index for index, step in enumerate(steps) if step.group == "inter"), None)
    last = next((step for step in reversed(steps) if SPECS[step.collective].reduces), None)
    if begin is None:
        return Phases(steps[:1], (), steps[1:], last)
    end = begin
    while end < len(steps) and steps[end][:2] == steps[begin][:2]:
        end += 1
    return Phases(steps[:begin], steps[begin:end], steps[end:], last)
