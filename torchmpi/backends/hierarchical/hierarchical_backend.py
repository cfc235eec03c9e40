"""The backend for groups over several hosts: steps within the hosts, and between them.

On a *grid*, where every host has the same number of ranks, each rank exchanges a slice of the data between the hosts;
on a *tree* the first rank of each host exchanges all data. A host never sends more than one rank per host would.

Reductions combine in rank order within each host, and then the hosts in order of their first ranks. The bits depend on
the placement of the ranks, but not on the size: partial results are not rounded, and all algorithms combine in the same
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...communicators.group import Group
from ...config import Config
from ..base import Backend, Operation
from ..job_facts import JobFacts

if TYPE_CHECKING:
    from .steps import BindStep


class HierarchicalBackend(Backend):
    """Collectives in steps; the backend of each step is selected for its group."""

    name = "hierarchical"
    device_types = ("cpu", "cuda")
    collectives = ("barrier", "broadcast", "allgather", "allreduce", "reduce", "reduce_scatter")
    announces = False
    enqueues = False

    def __init__(self, config: Config, bind_step: BindStep) -> None:
        self._config, self._bind_step = config, bind_step

    @classmethod
    def make(cls, job: JobFacts) -> HierarchicalBackend:
        """Make the backend of a job."""
        return cls(job.config, job.bind_step)

    def takes(self, device_type: str, collective: str) -> bool:
        """Accept host memory; CUDA tensors are staged."""
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept groups over several hosts of which one has several ranks."""
        if group is not None:
            num_hosts = len(group.placement.groups)
            if num_hosts == 1:
                return "all its ranks are on one host"
            if num_hosts == group.size:
                return "each of its ranks is on a host of its own"
        return None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        from .host_collectives import prepare

        return prepare(group, collective, dtype, op, self._bind_step, self._config)
