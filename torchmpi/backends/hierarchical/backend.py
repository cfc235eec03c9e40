"""Collectives of a group over several hosts: steps inside the hosts, and between them.

On a *grid*, with as many ranks on each host, every rank carries a slice of its own between the hosts; on a *tree* the
first rank of each host carries everything. Either way a host sends no more than the hosts alone would have to.

Reductions add in rank order inside each host, and then the hosts in order of their first ranks. So the bits depend on
where the ranks are, but on no size: partial results are not rounded, and all paths and verbs add alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...config import Config
from ..base import Operation
from . import gathering, in_place
from .steps import BindStep, Steps

_REDUCTIONS: dict[str, Callable[..., Operation]] = {
    "allreduce": in_place.Allreduce, "reduce": in_place.Reduce, "reduce_scatter": gathering.ReduceScatter,
}  # fmt: skip
COLLECTIVES = ("barrier", "broadcast", "allgather", *_REDUCTIONS)


class HierarchicalBackend:
    """Verbs in steps, each by the backend that suits the group it runs on."""

    name = "hierarchical"
    announces = False
    enqueues = False

    def __init__(self, config: Config, bind_step: BindStep) -> None:
        self._piece_bytes, self._bind_step = config.pipeline_bytes, bind_step

    def takes(self, device_type: str) -> bool:
        """Host memory; what is on a device is staged."""
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Any = None) -> str | None:
        """Where there is something to gain: several hosts, and several ranks on one of them."""
        if collective not in COLLECTIVES:
            return f"it has no {collective}, only {', '.join(COLLECTIVES)}"
        if group is not None:
            num_hosts = len(group.placement.groups)
            if num_hosts == 1:
                return "all its ranks are on one host"
            if num_hosts == group.size:
                return "each of its ranks is on a host of its own"
        if device_type == "cuda" and not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        return None

    def bind(self, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb on a group."""
        steps = Steps(op, self._bind_step)
        if collective == "barrier":
            return in_place.Barrier(group, steps)
        if collective == "allgather":
            return gathering.Allgather(group, steps)
        assert dtype is not None
        piece_numel = max(1, self._piece_bytes // dtype.itemsize)
        if collective == "broadcast":
            return in_place.Broadcast(group, steps, piece_numel)
        assert op is not None
        return _REDUCTIONS[collective](group, steps, in_place.Totals(dtype, op, group.size), piece_numel)
