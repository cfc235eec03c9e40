"""Collectives composed over the nested levels of a span: inside the groups of a level, and across them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...communicators import splits
from ...communicators.communicator import Communicator
from ...communicators.group import Group
from ...communicators.levels import CommunicatorStack
from .steps import carried_in, divide

COMPOSED = ("barrier", "allreduce", "reduce", "broadcast")
"""Verbs that know how to run over a span; the others run flat."""

_KINDS = ("intra", "inter")

Runner = Callable[[Group, str, torch.Tensor | None, int], Any]
"""Runs a flat verb on one group: ``run(group, verb, tensor, root)``."""


def is_composed(stack: CommunicatorStack, communicator: Communicator, collective: str) -> bool:
    """Whether a verb on this communicator runs over the levels of the span."""
    levels = stack.span.levels
    return len(levels) > 1 and communicator is levels[0] and collective in COMPOSED


class Composition:
    """One verb over one span, ready to run."""

    def __init__(
        self, stack: CommunicatorStack, collective: str, op: str | None, *, cartesian: bool, run: Runner
    ) -> None:
        self.collective, self.op, self.run_step = collective, op, run
        levels, groups = stack.span
        self.rank, self.size = levels[0].rank, levels[0].size
        level_splits = [level.split if cartesian else level.tree_split for level in levels[1:]]
        # The plan counts levels from 0, the outermost of the span.
        self.groups = {
            (depth, kind): groups.get((level.level, kind)) for depth, level in enumerate(levels) for kind in _KINDS
        }
        self.steps = lru_cache(maxsize=None)(
            lambda root: splits.steps_for(collective, self.rank, level_splits, root=root)  # type: ignore[arg-type]
        )

    def __call__(self, buffer: torch.Tensor | None, _: Any, root: int) -> torch.Tensor | None:
        """Run the steps on a plain tensor, in place."""
        work = self._working_copy(buffer)
        for step in self.steps(root):
            group = self.groups[step.level, step.group]
            assert group is not None  # the plan names an inter group only to its members
            self.run_step(group, step.collective, work, step.root or 0)
        if buffer is None or work is None or work is buffer:
            return buffer
        if self.op == "avg":
            divide(work, self.size)
        if self.collective != "reduce" or self.rank == root:
            buffer.copy_(work)
        return buffer

    def _working_copy(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        """Where partial results go: elsewhere if they are wider than the result, or not everybody may see them."""
        if buffer is None or self.op is None:
            return buffer
        carrier = carried_in(buffer.dtype, self.op)
        if self.collective == "reduce" or self.op == "avg" or carrier is not buffer.dtype:
            return buffer.to(carrier, copy=True)
        return buffer
