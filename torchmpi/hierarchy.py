"""Collectives composed over nested levels: inside the groups of a level, and across them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from . import dtypes, topology
from .communicator import Communicator, CommunicatorStack, Group

COMPOSED = ("barrier", "allreduce", "reduce", "broadcast")
"""Verbs that know how to run over a span; the others run flat."""

Runner = Callable[[Group, str, torch.Tensor | None, int], Any]
"""Runs a flat verb on one group: ``run(group, verb, tensor, root)``."""


def is_composed(stack: CommunicatorStack, communicator: Communicator, verb: str) -> bool:
    """Whether a verb on this communicator runs over the levels of the span."""
    begin, end = stack.span
    return end > begin and communicator.level == begin and verb in COMPOSED


class Composition:
    """One verb over one span, ready to run."""

    def __init__(self, stack: CommunicatorStack, verb: str, op: str | None, *, cartesian: bool, run: Runner) -> None:
        begin, end = stack.span
        self.begin, self.verb, self.op, self.run_step = begin, verb, op, run
        self.levels = stack.levels
        self.rank, self.size = stack.levels[begin].rank, stack.levels[begin].size
        splits = [level.split if cartesian else level.tree_split for level in stack.levels[begin + 1 : end + 1]]
        self.steps = lru_cache(maxsize=None)(
            lambda root: topology.steps_for(verb, self.rank, splits, root=root, begin=begin)  # type: ignore[arg-type]
        )

    def __call__(self, buffer: torch.Tensor | None, _: Any, root: int) -> torch.Tensor | None:
        """Run the steps on a plain tensor, in place."""
        work = self._working_copy(buffer)
        for step in self.steps(root):
            level = self.levels[step.level]
            group = level.intra if step.group == "intra" else level.inter
            assert group is not None  # the plan names an inter group only to its members
            self.run_step(group, step.verb, work, step.root or 0)
        if buffer is None or work is None or work is buffer:
            return buffer
        if self.op == "avg":
            work.div_(self.size)
        if self.verb != "reduce" or self.rank == root:
            buffer.copy_(work)
        return buffer

    def _working_copy(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        """Where partial results go: elsewhere if they are wider than the result, or not everybody may see them."""
        if buffer is None or self.op is None:
            return buffer
        accumulator = dtypes.info(buffer.dtype).accumulator
        if self.verb == "reduce" or self.op == "avg" or accumulator is not buffer.dtype:
            return buffer.to(accumulator, copy=True)
        return buffer
