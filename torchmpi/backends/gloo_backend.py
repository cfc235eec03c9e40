"""The backend `gloo`, and which calls it accepts; :mod:`torchmpi.backends.gloo` has its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ..communicators.group import Group
from ..config import Config
from .base import Backend, Operation
from .job_facts import JobFacts, problem_of_any
from .shm import SharedMemoryBackend

if TYPE_CHECKING:
    from .gloo import GlooGroup


def problem() -> str:
    """Return the reason why this torch has no gloo; '' if it has."""
    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return "" if has_gloo else "this torch was built without gloo"


class GlooBackend(Backend):
    """Collectives over gloo, on host memory."""

    name = "gloo"
    device_types = ("cpu", "cuda")
    collectives = (
        "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
        "exchange_parts",
    )  # fmt: skip
    announces = True
    enqueues = False

    def __init__(self, config: Config, problem: str, shared: SharedMemoryBackend) -> None:
        self.config, self.problem, self.shared = config, problem, shared
        self._torch_groups: WeakKeyDictionary[Group, GlooGroup] = WeakKeyDictionary()

    @classmethod
    def make(cls, job: JobFacts) -> GlooBackend:
        return cls(job.config, problem(), job.backend(SharedMemoryBackend))

    def offer(self) -> str:
        """Return the problem of this rank."""
        return self.problem

    def agree(self, offers: Sequence[str]) -> None:
        """Take the problem of any rank."""
        self.problem = problem_of_any(offers, self.problem)

    def takes(self, device_type: str, collective: str) -> bool:
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept every collective, if torch has gloo."""
        return self.problem or None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        from .gloo import GlooGroup, prepare

        torch_group = self._torch_groups.setdefault(group, GlooGroup(group))  # atomic: several threads may bind
        return prepare(torch_group, group, collective, dtype, op, config=self.config, shared=self.shared)
