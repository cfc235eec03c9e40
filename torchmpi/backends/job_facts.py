"""What the backends are made of: the facts about a job, and the agreement of its ranks on what each backend can do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ..backend_specs import BACKENDS
from ..communicators.conditions import gather_unless_equal
from ..config import Config
from ..shared_memory.process_vm import Probe
from ..shared_memory.shared_tensors import SharedHeap
from .base import Backend
from .gpus import Devices


class _Made(Protocol):
    @classmethod
    def make(cls, job: JobFacts) -> Any: ...


_Kind = TypeVar("_Kind", bound=_Made)


@dataclass
class JobFacts:
    """The facts about a job from which its backends are made."""

    world: Any
    """The MPI communicator of all ranks."""
    config: Config
    heap: SharedHeap
    device: torch.device
    devices: Devices
    processes: Sequence[Probe]
    """The ranks of this host."""
    bind_step: Callable[..., Any]
    """Prepares a step of a collective in several steps, by the backend that is selected for it."""
    is_cuda_aware: bool
    problem_of_mpi: str
    """Why the MPI library has no collectives; '' if it has."""
    _made: dict[type, Any] = field(default_factory=dict)

    def backend(self, kind: type[_Kind]) -> _Kind:
        """Return the backend of a class, made when it is first asked for."""
        if kind not in self._made:
            self._made[kind] = kind.make(self)
        made: _Kind = self._made[kind]
        return made


@runtime_checkable
class Agreeing(Protocol):
    """A backend that depends on what all ranks can do."""

    def offer(self) -> object:
        """Return what this rank can do."""

    def agree(self, offers: Sequence[Any]) -> None:
        """Take the offers of all ranks of the world, so that all give the same answers."""


def make_backends(job: JobFacts) -> dict[str, Backend]:
    """Make all backends. Collective."""
    made: dict[str, Backend] = {name: job.backend(kind) for name, kind in load_backends().items()}
    agree(job.world, made)
    return made


def load_backends() -> dict[str, Any]:
    """Import the modules of all backends, and return their classes by name."""
    modules = {row: importlib.import_module(f".{row.module}", __package__) for row in BACKENDS.values()}
    return {row.name: getattr(module, row.class_name) for row, module in modules.items()}


def agree(world: Any, backends: Mapping[str, Backend]) -> None:
    """Let the backends know the offers of all ranks: all ranks or none use a backend for a call. Collective."""
    agreeing = {name: backend for name, backend in backends.items() if isinstance(backend, Agreeing)}
    offers = gather_unless_equal(world, {name: backend.offer() for name, backend in agreeing.items()})
    for name, backend in agreeing.items():
        backend.agree([each[name] for each in offers])


def problem_of_any(problems: Sequence[str], own: str) -> str:
    """Return the problem of this rank, or of the first rank that has one; '' if none has.

    >>> problem_of_any(["", "no memory"], "")
    'rank 1 cannot: no memory'
    """
    return own or next((f"rank {rank} cannot: {problem}" for rank, problem in enumerate(problems) if problem), "")
