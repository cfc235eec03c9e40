"""Collectives over the nested levels of a span, as set with ``set_collective_span()``."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch

from ...communicators import splits
from ...communicators.communicator import Communicator
from ...communicators.levels import CommunicatorStack
from ..rank_order import PartialResults
from .steps import GroupsByLevel, StepRunner, StepSequence

COMPOSED = ("barrier", "allreduce", "reduce", "broadcast")
"""Collectives that run over a span; the others run on the whole group."""


def span_collective(
    stack: CommunicatorStack,
    communicator: Communicator,
    collective: str,
    dtype: torch.dtype | None,
    op: str | None,
    runner: StepRunner,
    *,
    cartesian: bool,
) -> StepSequence | None:
    """Return a collective over the levels of the current span, on tensors of any device, as one chunk.

    None if it does not run over these levels on this communicator.
    """
    levels, groups = stack.span
    if len(levels) < 2 or communicator is not levels[0] or collective not in COMPOSED:
        return None
    outermost, name = levels[0], cast(splits.CollectiveName, collective)
    level_splits = [level.split if cartesian else level.tree_split for level in levels[1:]]
    # A plan counts levels from 0, the outermost of the span.
    by_depth: GroupsByLevel = {
        (depth, kind): groups.get((level.level, kind))
        for depth, level in enumerate(levels)
        for kind in ("intra", "inter")
    }
    steps_to = lru_cache(maxsize=None)(lambda root: splits.steps_for(name, outermost.rank, level_splits, root=root))
    partial_results = None if op is None or dtype is None else PartialResults(dtype, op, outermost.size)
    return StepSequence(
        collective, outermost.rank, by_depth, lambda root, _: steps_to(root), runner, partial_results=partial_results
    )
