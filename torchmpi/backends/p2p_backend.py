"""The backend `p2p`, and which calls it accepts; :mod:`torchmpi.backends.p2p` has its collectives."""

from __future__ import annotations

import importlib.util

import torch

from ..collective_specs import SPECS
from ..communicators.group import Group
from ..config import Config
from .base import Backend, Operation
from .comparing import compared
from .job_facts import JobFacts
from .shm import SharedMemoryBackend


class P2PBackend(Backend):
    """Reductions in rank order, broadcast and allgather over messages between pairs of ranks; on host memory."""

    name = "p2p"
    device_types = ("cpu", "cuda")
    collectives = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
    announces = True
    enqueues = False

    def __init__(self, config: Config, shared: SharedMemoryBackend | None = None) -> None:
        self.config, self.shared = config, shared

    @classmethod
    def make(cls, job: JobFacts) -> P2PBackend:
        return cls(job.config, job.backend(SharedMemoryBackend))

    def takes(self, device_type: str, collective: str) -> bool:
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept movements, and reductions if they can be compiled."""
        if SPECS[collective].reduces and importlib.util.find_spec("llvmlite") is None:
            return "its reductions are compiled by llvmlite (a part of numba), which is not installed"
        return None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        from .p2p import prepare

        return compared(prepare(self.config, group, collective, dtype, op), group, collective, dtype, op, self.shared)
