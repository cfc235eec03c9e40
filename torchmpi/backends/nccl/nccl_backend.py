"""The backend for ranks with a GPU each: NVIDIA's NCCL, whose ranks find each other through MPI.

Every operation enqueues on the current stream of its tensor's device and returns. Hosts meet in the first call on a
group, which makes NCCL's communicator, and where ranks must first tell each other how many rows they have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...communicators.group import Group
from ...config import Config
from ...errors import TransportError
from ..base import Operation
from ..gpus import Devices
from . import nccl_library
from .nccl_collectives import NcclMovement, NcclReduction
from .nccl_group import NcclGroup
from .recipes import lacks

_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable that allows, from 2.30 on, several ranks on one GPU. They call it experimental."""
_SHARES_SINCE = (2, 30)


class NcclBackend:
    """Collectives of NCCL, on CUDA tensors."""

    name = "nccl"
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices) -> None:
        self.devices = devices
        self.problem = ""
        self._problems, self._may_share = [""] * len(devices), [False] * len(devices)
        self._ends: WeakKeyDictionary[Any, NcclGroup] = WeakKeyDictionary()

    def offer(self) -> tuple[str, bool]:
        """What is against NCCL on this rank, '' if nothing is, and whether it may have a GPU in common with others."""
        if not torch.cuda.is_available():
            return "this torch or this host has no CUDA", False
        try:
            library = nccl_library.load()
        except TransportError as error:
            return str(error), False
        return "", library.version >= _SHARES_SINCE and os.environ.get(SHARING) == "1"

    def agree(self, offers: Sequence[tuple[str, bool]]) -> None:
        """Take note of what all ranks of the world have to offer, so that all give the same answers."""
        self._problems = [
            problem or ("" if device.uuid else "its device is the CPU (start(with_cuda=False), or no GPU in sight)")
            for (problem, _), device in zip(offers, self.devices, strict=True)
        ]
        self._may_share = [may_share for _, may_share in offers]
        self.problem = self._problems[0] if all(self._problems) else ""

    def takes(self, device_type: str, collective: str) -> bool:
        """Device memory."""
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """It has what is done on the device, among ranks that have a GPU each."""
        if device_type != "cuda":
            return "it takes CUDA tensors only"
        if self.problem:
            return self.problem
        if collective == "barrier":
            return "a barrier synchronizes processes, which wait for no GPU"
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
        """What NCCL cannot compute; it moves everything."""
        return lacks(dtype, op) if dtype is not None and op is not None else None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        # In one step: threads that bind at the same time must not make two communicators.
        end = self._ends.setdefault(group, NcclGroup(group, self.devices))
        if collective in _REDUCTIONS:
            assert dtype is not None and op is not None
            calls: NcclReduction | NcclMovement = NcclReduction(end, dtype, op)
        else:
            calls = NcclMovement(group, end)
        operation: Operation = getattr(calls, collective)
        return operation
