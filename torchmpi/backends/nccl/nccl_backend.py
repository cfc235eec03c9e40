"""The backend for ranks with a GPU each, and which calls it accepts; :mod:`.nccl_group` has its collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ...communicators.group import Group
from ...config import Config
from ..base import Backend, Operation
from ..gpus import Devices
from ..job_facts import JobFacts

if TYPE_CHECKING:
    from .nccl_group import NcclGroup

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable that allows, from 2.30 on, several ranks on one GPU. NCCL calls it experimental."""
_SHARES_SINCE = (2, 30)


def problem() -> str:
    """Return why this process cannot use NCCL; '' if it can."""
    if not torch.cuda.is_available():
        return "this torch or this host has no CUDA"
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return "" if has_nccl else "this torch was built without NCCL"


def version() -> tuple[int, ...]:
    """Return the version of NCCL that torch uses."""
    return tuple(torch.cuda.nccl.version())


class NcclBackend(Backend):
    """Collectives of NCCL, on CUDA tensors."""

    name = "nccl"
    device_types = ("cuda",)
    # A barrier synchronizes processes, which wait for no GPU.
    collectives = (
        "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
        "exchange_parts",
    )  # fmt: skip
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices) -> None:
        self.devices = devices
        self.problem = ""
        self._problems, self._may_share = [""] * len(devices), [False] * len(devices)
        self._torch_groups: WeakKeyDictionary[Group, NcclGroup] = WeakKeyDictionary()

    @classmethod
    def make(cls, job: JobFacts) -> NcclBackend:
        return cls(job.config, job.devices)

    def is_tested(self, group: Group) -> bool:
        """Return whether such groups have been tested on GPUs: only single ranks."""
        return group.size == 1

    def offer(self) -> tuple[str, bool]:
        """Return the problem of this rank, '' if there is none, and whether it may share its GPU with other ranks."""
        reason = problem()
        may_share = not reason and os.environ.get(SHARING) == "1" and version() >= _SHARES_SINCE
        return reason, may_share

    def agree(self, offers: Sequence[tuple[str, bool]]) -> None:
        """Store the offers of all ranks of the world, so that all give the same answers."""
        self._problems = [
            problem or ("" if device.uuid else "its device is the CPU (start(with_cuda=False), or no visible GPU)")
            for (problem, _), device in zip(offers, self.devices, strict=True)
        ]
        self._may_share = [may_share for _, may_share in offers]
        self.problem = self._problems[0] if all(self._problems) else ""

    def takes(self, device_type: str, collective: str) -> bool:
        """Accept device memory."""
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept collectives on the device, among ranks that have a GPU each."""
        if self.problem:
            return self.problem
        return None if group is None else self._why_not_among(group.world_ranks)

    def _why_not_among(self, ranks: Sequence[int]) -> str | None:
        for rank in ranks:
            if self._problems[rank]:
                return f"rank {rank} cannot: {self._problems[rank]}"
        shared = self.devices.first_sharing(ranks)
        if shared is not None and not all(self._may_share[rank] for rank in ranks):
            return f"ranks {shared[0]} and {shared[1]} share a GPU, which NCCL refuses"
        return None

    def lacks(self, collective: str, dtype: torch.dtype | None, op: str | None) -> str | None:
        """Return why NCCL cannot compute a reduction, or None; it moves every dtype."""
        from .recipes import lacks

        return lacks(dtype, op) if dtype is not None and op is not None else None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        from .nccl_group import NcclGroup, prepare

        # Atomic: threads that bind at the same time must not create two groups.
        torch_group = self._torch_groups.setdefault(group, NcclGroup(group, self.devices))
        return prepare(torch_group, group, collective, dtype, op)
